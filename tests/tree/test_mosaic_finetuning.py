"""The published fine-tuning smoke tests run offline, and the models they train learn."""

import json
import os
import sys
from pathlib import Path

import pytest

from programs import run_checked
from training_settings import read_metrics

HOME = "benchmarks/mosaic_bert"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the working folder of the commands; the first command creates the task's files in it."""
    return tmp_path_factory.mktemp("mosaic bert")


def run_program(tree_root: Path, workdir: Path, program: str, yaml: str, *words: str) -> str:
    home = tree_root / HOME
    environ = {**os.environ, "PYTHONPATH": str(tree_root / "benchmarks/bert/implementations/pytorch")}
    command = (sys.executable, home / program, home / "yamls/test" / yaml, *words)
    return run_checked(*command, cwd=workdir, env=environ).stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf_bert", "mosaic_bert"])
def test_sequence_classification(tree_root: Path, workdir: Path, name: str) -> None:
    words = ("sequence_classification.yaml", f"model.name={name}", f"save_folder={name}")
    output = run_program(tree_root, workdir, "sequence_classification.py", *words)
    losses = [line["loss"] for line in read_metrics(workdir / name)]
    assert sum(losses[-3:]) < sum(losses[:3])
    accuracy = read_metrics(workdir / name, "evaluation")[-1]["eval_accuracy"]
    assert accuracy > 0.6, "half of the rows are entailed"
    assert f"{accuracy:.4f}" in output
    assert (workdir / name / "run_0/predictions.csv").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf_bert", "mosaic_bert"])
def test_glue(tree_root: Path, workdir: Path, name: str) -> None:
    output = run_program(tree_root, workdir, "glue.py", "glue.yaml", f"model.name={name}")
    folder = workdir / f"local-finetune-checkpoints/test-glue-{name}"
    scores = json.loads((folder / "glue_scores.json").read_text())
    assert scores["glue"] == pytest.approx((scores["tasks"]["mnli"] + scores["tasks"]["rte"]) / 2)
    assert f"{scores['glue']:.2f}" in output
    assert scores["tasks"]["mnli"] > 45, "chance is a third"
    assert scores["tasks"]["rte"] > 60, "chance is a half"
    steps = read_metrics(folder / "task=mnli/seed=1111")
    assert steps[-1]["loss"] < 0.95 * steps[0]["loss"]
