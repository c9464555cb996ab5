"""The example's plain loop computes what `mlbert train` computes."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.manifest import read_manifest
from training_settings import SHAPE, read_metrics, train

STEPS = 20
SEED = 20


@pytest.fixture(scope="module")
def example(tree_root: Path) -> dict[str, Any]:
    """Return the names that the example defines."""
    return runpy.run_path(str(tree_root / "docs/examples/plain_loop.py"))


def test_plain_loop_has_the_losses_of_mlbert_train(
    example: dict[str, Any], tmp_path: Path, prepared_data: Path
) -> None:
    changes = {"vocab_size": read_manifest(prepared_data / "train").vocab_size}
    metrics = train(
        tmp_path,
        shape=changes,
        synthetic_data=0,
        input_dir=prepared_data / "train",
        eval_dir=prepared_data / "eval",
        num_eval_examples=example["EVAL_SEQUENCES"],
        max_steps=STEPS,
        warmup_steps=example["WARMUP_STEPS"],
        seed=SEED,
    )
    (evaluation,) = read_metrics(tmp_path / "out", kind="evaluation")
    shape = BertConfig(**SHAPE | changes)
    losses, accuracy = example["train"](
        prepared_data / "train", prepared_data / "eval", shape, steps=STEPS, seed=SEED
    )
    assert losses == pytest.approx([line["loss"] for line in metrics], abs=1e-5)
    assert accuracy == pytest.approx(evaluation["eval_accuracy"], abs=1e-6)


def test_the_example_is_short(tree_root: Path) -> None:
    """A newcomer reads it first."""
    text = (tree_root / "docs/examples/plain_loop.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
