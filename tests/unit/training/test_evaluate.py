"""An evaluation gives the same numbers however its batches reach the model,
and the run waits for it last.
"""

from unittest.mock import MagicMock

import pytest
import torch

from capturable import SHAPE, select_capturable
from host_batches import made_up_batches
from mlbert.data.batches import HostBatch, StaticShape
from mlbert.distributed.world import World
from mlbert.models.bert import BertForPreTraining
from mlbert.models.objectives import PreTraining
from mlbert.ops.fp8_scaling import Products
from mlbert.training.checkpoint import Snapshots
from mlbert.training.evaluate import Evaluation, Evaluator, evaluate
from mlbert.training.reader import BatchReader
from model_loss import loss_of
from recorded_graph import RecordedGraph
from training_settings import run
from user_errors import user_error

OBJECTIVE = PreTraining(scope="step")


@pytest.fixture(autouse=True)
def same_ops(restore_selection):
    select_capturable()


@pytest.fixture
def batches() -> list[HostBatch]:
    return [
        made_up_batches(packs, seed, SHAPE.vocab_size, 32)[0]
        for packs, seed in ((11, 4), (5, 5), (1, 1))
    ]


def model_of(seed: int, products: Products | None = None) -> BertForPreTraining:
    model = BertForPreTraining(SHAPE, fp8_products=products)
    model.initialize(seed)
    return model


def metrics(model: BertForPreTraining, batches: list[HostBatch]) -> dict[str, float]:
    return evaluate(model, OBJECTIVE, batches, World())


def test_each_masked_token_counts_once(batches):
    model = model_of(1)
    torch.nn.init.normal_(model.cls.predictions.bias, std=3.0)
    with torch.no_grad():
        sums = sum(OBJECTIVE.sums(model, batch.to("cpu")) for batch in batches)
    assert metrics(model, batches) == pytest.approx(
        OBJECTIVE.metrics(sums.tolist(), None), rel=1e-6
    )
    assert model.training


@pytest.mark.parametrize("graph", [False, True])
def test_kept_batches_of_one_shape_give_the_same(batches, graph):
    model = model_of(1)
    static_shapes = [StaticShape.over(batches[1:]), StaticShape.over(batches)] if graph else []
    capture = RecordedGraph() if graph else None
    samples = MagicMock()
    samples.__iter__.side_effect = lambda: iter(batches)
    kept = Evaluator(model, OBJECTIVE, samples, World(), capture, static_shapes, resident=True)
    kept.record()
    for seed in (1, 2, 3):
        model.initialize(seed)
        found = kept.begin().result()
        expected = metrics(model, batches)
        assert found["mlm_accuracy"] == expected["mlm_accuracy"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    samples.__iter__.assert_called_once()


def test_a_graph_reads_the_fp8_copies_of_the_present_weights(batches):
    graphed = model_of(1, Products())
    plain = model_of(1, Products())
    for model in (graphed, plain):
        loss_of(model, batches[0].to("cpu"), counts=(1, 1)).backward()
        model.end_step(lambda amax: amax)
    capture = RecordedGraph()
    # One batch is over the only budget.
    evaluator = Evaluator(
        graphed, OBJECTIVE, batches, World(), capture, [StaticShape.over(batches[1:])]
    )
    evaluator.record()
    assert capture.num_operations > 20
    assert graphed.is_calibrated
    for seed in (1, 2):
        for model in (graphed, plain):
            model.initialize(seed)
            model.weights_changed()
        assert evaluator.begin().result() == pytest.approx(metrics(plain, batches), rel=1e-6)


def test_the_result_is_of_the_weights_at_the_beginning(batches):
    model = model_of(1)
    evaluator = Evaluator(model, OBJECTIVE, batches, World())
    first = evaluator.begin()
    model.initialize(2)
    second = evaluator.begin()
    model.initialize(1)
    assert first.result() == metrics(model, batches) != second.result()
    with user_error("data.empty", "the evaluation set"):  # a rank without batches adds nothing
        Evaluator(model, OBJECTIVE, [], World(), resident=True).begin().result()


def test_a_further_step_is_read_before_the_result_of_an_evaluation(tmp_path, monkeypatch):
    events = []
    for owner, name in (
        (BatchReader, "read_ahead"),
        (Evaluator, "begin"),
        (Evaluation, "result"),
        (Snapshots, "save"),
    ):
        original = getattr(owner, name)

        def call(*args, name=name, original=original):
            events.append(name)
            return original(*args)

        monkeypatch.setattr(owner, name, call)
    settings = {
        "max_steps": 3,
        "eval_iter_start_samples": 1,
        "eval_iter_samples": 1,
        "save_checkpoint_steps": 2,
    }
    run(tmp_path, ops="plain", **settings)
    assert events == [
        "begin",
        "read_ahead",
        "result",
        "begin",
        "read_ahead",
        "result",
        "save",
        "begin",
        "result",
    ]
