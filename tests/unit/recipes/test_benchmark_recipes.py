"""What the benchmark recipes make of the settings: form of the optimizer, clipping, evaluation, resumption."""

from pathlib import Path

import pytest

from mlbert.ops.config import ComputeConfig
from mlbert.optim.config import OptimizerConfig
from mlbert.optim.optimizers import implementation
from mlbert.recipes import packed_lamb
from training_settings import configuration, read_metrics, train


@pytest.mark.parametrize(
    ("ops", "asked", "expected"),
    [
        ("auto", "ops", "auto"),
        ("plain", "ops", "plain"),
        ("native", "ops", "native"),
        ("flash", "ops", "triton"),
        ("flash", "plain", "plain"),
        ("auto", "apex", "apex"),
    ],
)
def test_the_form_of_the_optimizer(ops: str, asked: str, expected: str) -> None:
    config = configuration(packed_lamb.RECIPE, ops=ops, optimizer_implementation=asked)
    assert implementation(config[OptimizerConfig], config[ComputeConfig]) == expected


@pytest.mark.parametrize("changes", [{"sharded_optimizer": "node"}, {"gradient_clipping": "before"}], ids=str)
def test_a_single_process_trains_alike(tmp_path: Path, changes: dict[str, str]) -> None:
    """With one rank there is nothing to share out, and the order of clipping and summing does not show."""
    usual, changed = (
        train(tmp_path, name, max_steps=4, ops="plain", **settings)
        for name, settings in (("usual", {}), ("changed", changes))
    )
    assert [m["loss"] for m in changed] == pytest.approx([m["loss"] for m in usual], abs=1e-4)


def test_evaluating_does_not_change_training(tmp_path: Path) -> None:
    """Evaluation takes the exact weights, the next step the rounded ones again, their FP8 copies included."""
    changes = {"sharded_optimizer": "all", "weights_allgather": "e5m2", "precision": "fp8", "max_steps": 6}
    losses = {}
    for name, distance in (("never", 1_000_000), ("often", 8)):
        metrics = train(tmp_path, name, eval_iter_start_samples=distance, eval_iter_samples=distance, **changes)
        losses[name] = [m["loss"] for m in metrics]
    assert len(read_metrics(tmp_path / "often", "evaluation")) > 1
    assert losses["often"] == losses["never"]


DDP_ADAM = {"recipe": "ddp_adam", "average_packing_rate": 1, "learning_rate": 0.002, "max_steps": 6}


def test_one_bucket_of_one_rank_is_clipping_as_a_whole(tmp_path: Path) -> None:
    """The tiny model is one bucket, a rank alone is its own mean: then the three ways are one."""
    changes = {"gradient_accumulation_steps": 1, "max_grad_norm": 0.5}
    ways = {
        way: train(tmp_path, way, gradient_clipping=way, **DDP_ADAM, **changes)
        for way in ("after", "before", "buckets")
    }
    for way in ("before", "buckets"):
        assert [m["loss"] for m in ways[way]] == pytest.approx([m["loss"] for m in ways["after"]], abs=1e-5)
    norms = {way: [m["grad_norm"] for m in metrics] for way, metrics in ways.items()}
    assert norms["buckets"] == pytest.approx(norms["after"], rel=1e-4)
    assert min(norms["after"]) > 0.5 >= max(norms["before"]) - 1e-6


@pytest.mark.slow
def test_a_resumed_float16_run_keeps_its_loss_scale(tmp_path: Path) -> None:
    half = DDP_ADAM | {"precision": "fp16", "loss_scale": 2**24, "save_checkpoint_steps": 3, "schedule": "constant"}
    whole = train(tmp_path, "whole", **half | {"max_steps": 12})
    train(tmp_path, "parts", **half)
    (tmp_path / "parts/run_0/summary.json").unlink()
    resumed = train(tmp_path, "parts", **half | {"max_steps": 12, "resume": 1})
    assert [m["loss"] for m in resumed[-6:]] == [m["loss"] for m in whole[-6:]]
