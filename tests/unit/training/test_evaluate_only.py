"""``mlbert train --evaluate-only``: the accuracy of the starting weights,
from the evaluation set alone.
"""

import re

import pytest
import torch
from safetensors.torch import save_file

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.open import describe
from mlbert.data.loading.pretraining import EvalSet
from mlbert.distributed.world import World
from mlbert.models.bert import BertForPreTraining
from mlbert.models.objectives import PreTraining
from mlbert.models.weights.huggingface import to_huggingface
from mlbert.models.weights.load import load_weights
from mlbert.training.evaluate import evaluate
from training_settings import SHAPE
from training_settings import run as run_train


@pytest.fixture
def shape(prepared_data):
    values = {
        "vocab_size": describe(prepared_data / "eval").vocab_size,
        "max_position_embeddings": 32,
    }
    return BertConfig(**SHAPE | values)


@pytest.fixture
def start(tmp_path, shape, prepared_data):
    """Return weights that are right sometimes: they always predict the most frequent label."""
    samples = EvalSet(prepared_data / "eval", 64, packs_per_batch=64, max_sequences_per_pack=3)
    samples.open()
    labels = torch.cat([batch.to("cpu").masked_labels for batch in samples])
    model = BertForPreTraining(shape)
    model.initialize(seed=3)
    torch.nn.init.constant_(model.cls.predictions.bias[labels.mode().values], 5.0)
    save_file(to_huggingface(model), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def run(tmp_path, capsys, prepared_data, shape):
    def run(**changes):
        sizes = {
            "vocab_size": shape.vocab_size,
            "max_position_embeddings": shape.max_position_embeddings,
        }
        settings = {"synthetic_data": 0, "input_dir": tmp_path / "no-training-set", "shape": sizes}
        settings |= {"eval_dir": prepared_data / "eval", "num_eval_examples": 64, **changes}
        return run_train(tmp_path, "out", "--evaluate-only", **settings), *capsys.readouterr()

    return run


def test_prints_what_the_evaluator_finds_and_writes_nothing(
    tmp_path, run, start, shape, prepared_data
):
    code, out, _ = run(init_checkpoint=start)
    assert code == 0
    model = BertForPreTraining(shape)
    load_weights(model, start)
    samples = EvalSet(prepared_data / "eval", 64, packs_per_batch=5, max_sequences_per_pack=3)
    samples.open()
    metrics = evaluate(model, PreTraining("step"), samples, World.identify({}))
    assert 0 < metrics["mlm_accuracy"] < 1
    printed = re.search(
        r"initial mlm_accuracy (\d\.\d{5}), loss (\d+\.\d{5}), 64 samples", out
    ).groups()
    assert tuple(map(float, printed)) == pytest.approx(
        (metrics["mlm_accuracy"], metrics["loss"]), abs=1e-5
    )
    assert "0.34085" in out, "the benchmark's number"
    assert "evaluating: 64 samples" in out, "its progress reached the end"
    assert not (tmp_path / "out").exists()


def test_bad_input_is_one_line(run, start):
    for changes, named in (
        ({}, "INIT_CHECKPOINT"),
        ({"init_checkpoint": start, "eval_dir": "/nowhere"}, "/nowhere"),
        ({"init_checkpoint": start, "shape": {"vocab_size": 50}}, "vocabulary"),
        ({"init_checkpoint": start, "num_eval_examples": 100_000}, "NUM_EVAL_EXAMPLES"),
    ):
        code, _, error = run(**changes)
        assert code == 2, changes
        assert error.startswith("mlbert: error: ")
        assert error.count("\n") == 1
        assert named in error
