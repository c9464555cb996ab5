"""An evaluation gives the same numbers however its batches reach the model, and the run waits for it last."""

from __future__ import annotations

import pytest
import torch

from capturable import SHAPE, select_capturable
from mlbert import ops
from mlbert.cli.main import main
from mlbert.dist.world import World
from mlbert.feed.batch import Batch
from mlbert.feed.compact import CompactBatch
from mlbert.feed.packed import Prefetcher
from mlbert.feed.synthetic import SyntheticSource
from mlbert.models import BertForPreTraining
from mlbert.ops.fp8 import Products
from mlbert.train import loop
from mlbert.train.evaluate import Evaluator, evaluate
from model_loss import loss_of, masked_sums
from recorded_graph import RecordedGraph
from training_settings import read_metrics, train_arguments


@pytest.fixture(autouse=True)
def same_ops():
    select_capturable()
    yield
    ops.select("auto")


@pytest.fixture
def batches() -> list[Batch]:
    source = SyntheticSource(packs_per_step=11, seed=4, vocab_size=SHAPE.vocab_size, max_tokens=32)
    parts = [SyntheticSource(packs_per_step=n, seed=n, vocab_size=120, max_tokens=32).batches_of(0)[0] for n in (5, 1)]
    return [*source.batches_of(0), *parts]


def model_of(seed: int, products: Products | None = None) -> BertForPreTraining:
    model = BertForPreTraining(SHAPE, fp8_products=products)
    model.initialize(seed)
    return model


def by_hand(model: BertForPreTraining, batches: list[Batch]) -> tuple[float, float]:
    correct, loss, masked = (sum(column) for column in zip(*(masked_sums(model, b) for b in batches), strict=True))
    return correct / masked, loss / masked


def test_each_masked_token_counts_once(batches):
    model = model_of(1)
    torch.nn.init.normal_(model.cls.predictions.bias, std=3.0)
    assert evaluate(model, batches, World()) == pytest.approx(by_hand(model, batches), rel=1e-6)
    assert model.training


@pytest.mark.parametrize("graph", [False, True])
def test_kept_batches_of_one_shape_give_the_same(batches, graph):
    model = model_of(1)
    kept = Evaluator(model, batches, World(), RecordedGraph() if graph else None, resident=True)
    for seed in (1, 2, 3):
        model.initialize(seed)
        accuracy, loss = kept.begin().result()
        expected = evaluate(model, batches, World())
        assert accuracy == expected[0]
        assert loss == pytest.approx(expected[1], rel=1e-6)


def test_a_graph_reads_the_fp8_copies_of_the_present_weights(batches):
    def calibrated() -> BertForPreTraining:
        model = model_of(1, Products())
        loss_of(model, batches[0]).backward()
        model.end_step(lambda amax: amax)
        return model

    graphed, plain = calibrated(), calibrated()
    evaluator = Evaluator(graphed, batches, World(), RecordedGraph())
    for seed in (1, 2):
        for model in (graphed, plain):
            model.initialize(seed)
            model.weights_changed()
        found, expected = evaluator.begin().result(), evaluate(plain, batches, World())
        assert found == pytest.approx(expected, rel=1e-6)


def test_the_result_is_of_the_weights_at_the_beginning(batches):
    model = model_of(1)
    evaluator = Evaluator(model, batches, World())
    first = evaluator.begin()
    model.initialize(2)
    second = evaluator.begin()
    model.initialize(1)
    assert first.result() == evaluate(model, batches, World()) != second.result()


def test_kept_batches_are_read_once(batches):
    reads = []

    class Samples:
        def __iter__(self):
            reads.append(1)
            return iter(batches)

    evaluator = Evaluator(model_of(1), Samples(), World(), resident=True)
    assert evaluator.begin().result() == evaluator.begin().result()
    assert len(reads) == 1


def test_a_rank_without_batches_adds_nothing():
    evaluator = Evaluator(model_of(1), [], World(), resident=True)
    with pytest.raises(AssertionError, match="no masked token"):
        evaluator.begin().result()


def test_the_next_step_is_made_ready_before_the_accuracy_is_read(tmp_path, monkeypatch):
    """Not before a checkpoint, whose position is that of the steps which were taken."""
    events = []

    def told(name):
        original = getattr(loop, name)

        def call(*args):
            events.append(name)
            return original(*args)

        monkeypatch.setattr(loop, name, call)

    for name in ("_make_ready", "_begin_evaluation", "_finish_evaluation", "save_checkpoint"):
        told(name)
    settings = {"max_steps": 3, "eval_iter_start_samples": 1, "eval_iter_samples": 1, "save_checkpoint_steps": 2}
    with pytest.raises(SystemExit):
        main(train_arguments(tmp_path, ops="plain", **settings))
    read, begin, finish = "_make_ready", "_begin_evaluation", "_finish_evaluation"
    assert events == [read, begin, read, finish, begin, finish, "save_checkpoint", read, begin, finish]


def test_a_run_on_compact_batches_is_the_same_run(tmp_path, monkeypatch):
    """What a GPU's source gives passes through the loop: counts, transfer, and an evaluation in between."""

    def losses(name: str) -> list[tuple[float, float]]:
        with pytest.raises(SystemExit):
            main(train_arguments(tmp_path, name, ops="plain", max_steps=5, eval_iter_start_samples=9))
        return [(line["loss"], line["samples"]) for line in read_metrics(tmp_path / name)]

    expected = losses("host")
    fetch = Prefetcher.next
    monkeypatch.setattr(Prefetcher, "next", lambda self: [CompactBatch.of(batch) for batch in fetch(self)])
    assert losses("compact") == expected
