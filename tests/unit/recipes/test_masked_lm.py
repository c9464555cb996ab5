"""What the recipe makes of the settings: both models, decay, the lagging rate, refusals, and a log that is traced."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mlbert.mlperf.logs import read_log
from mlbert.mlperf.trace import Tracer
from programs import RunMlbert
from training_settings import train, train_arguments

METHOD = {"recipe": "masked_lm", "average_packing_rate": 1, "gradient_accumulation_steps": 1}
METHOD |= {"lr_milestones": "4,5", "lr_gamma": 0.5, "warmup_steps": 2, "max_steps": 8}
METHOD["model_options"] = "hidden_dropout_prob=0 attention_probs_dropout_prob=0"


def run(folder: Path, name: str, **changes: object) -> list[dict]:
    return train(folder, name, **{**METHOD, **changes})


@pytest.mark.slow
def test_a_run_has_one_head_the_lagging_rate_and_a_log_that_is_traced(tmp_path: Path, tree_root: Path) -> None:
    metrics = run(tmp_path, "own", learning_rate=0.01)
    rates = [0.01 * x for x in (0, 0, 0.5, 1, 1, 0.5, 0.25, 0.25)]
    assert [m["learning_rate"] for m in metrics] == pytest.approx(rates)
    state = load_file(tmp_path / "own/run_0/weights/model.safetensors")
    assert not [name for name in state if "pooler" in name or "seq_relationship" in name]
    log = read_log(tmp_path / "own/result_0.txt")
    found = {event.key: event.value for event in log.events}
    assert found["opt_name"] == "decoupled_adamw"
    assert found["configuration"]["DECAY_ALL"]["value"] is True
    assert "hidden_dropout_prob=0" in found["configuration"]["MODEL_OPTIONS"]["value"]
    tracer = Tracer(log, tree_root)
    broken = {key: [str(link) for link in tracer.chain(key).broken] for key in tracer.keys}
    allowed = {"model_shape", "model_shape_sha256"}  # the test's own file lies outside of the tree
    assert {key: links for key, links in broken.items() if links and key not in allowed} == {}


def test_hugging_faces_model_learns_the_same(tmp_path: Path) -> None:
    """The same weights, data and updates: the padded model of the baseline is the unpadded one of the methods. Its
    vocabulary is not padded, so both start from weights that a run has left."""
    run(tmp_path, "first", max_steps=1, warmup_steps=0)
    start = tmp_path / "first/run_0/weights"
    ours, theirs = (
        [line["loss"] for line in run(tmp_path, name, model_implementation=name, init_checkpoint=start)]
        for name in ("mlbert", "huggingface")
    )
    assert theirs == pytest.approx(ours, rel=2e-4)


@pytest.mark.parametrize("name", ["mlbert", "huggingface"])
def test_float16_with_a_loss_scale_learns_the_same(tmp_path: Path, name: str) -> None:
    changes = {"model_implementation": name, "loss_scale": 1024, "learning_rate": 0.002}
    losses = {p: [m["loss"] for m in run(tmp_path, p, precision=p, **changes)] for p in ("fp16", "fp32")}
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=5e-3)
    assert losses["fp16"] != losses["fp32"]


@pytest.mark.parametrize("decay_all", [True, False])
def test_decay_of_biases_and_norms(tmp_path: Path, decay_all: bool) -> None:
    """With a rate of 0 there is nothing but decay: after a ramp of 4 it is 0, 0, 1/4 and 1/2 of the setting."""
    changes = {"learning_rate": 1e-12, "weight_decay_rate": 0.5, "warmup_steps": 4, "max_steps": 4}
    run(tmp_path, "one", decay_all=decay_all, **changes)
    state = load_file(tmp_path / "one/run_0/weights/model.safetensors")
    norm = state["bert.encoder.layer.0.output.LayerNorm.weight"]
    expected = (1 - 0.5 / 4) * (1 - 0.5 / 2) if decay_all else 1.0
    assert torch.allclose(norm, torch.full_like(norm, expected), atol=1e-6)


@pytest.mark.parametrize("name", ["mlbert", "huggingface"])
def test_evaluating_a_runs_weights_gives_its_last_accuracy(tmp_path: Path, name: str, run_mlbert: RunMlbert) -> None:
    run(tmp_path, "run", model_implementation=name)
    summary = json.loads((tmp_path / "run/run_0/summary.json").read_text())
    weights = {"init_checkpoint": tmp_path / "run/run_0/weights", "model_implementation": name}
    status, out, _ = run_mlbert(*train_arguments(tmp_path, "other", **{**METHOD, **weights}), "--evaluate-only")
    assert (status, f"initial mlm_accuracy {summary['accuracy']:.5f}" in out) == (0, True)
