"""What the recipe makes of the settings about the optimizer: forms, refusals, clipping."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlbert.cli.main import main
from mlbert.ops.config import ComputeConfig
from mlbert.optim.config import OptimizerConfig
from mlbert.optim.optimizers import implementation
from mlbert.recipes import packed_lamb
from training_settings import configuration, read_metrics, train_arguments


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
    for name, settings in (("usual", {}), ("changed", changes)):
        with pytest.raises(SystemExit) as end:
            main(train_arguments(tmp_path, name, max_steps=4, ops="plain", **settings))
        assert end.value.code == 1
    usual, changed = (read_metrics(tmp_path / name) for name in ("usual", "changed"))
    assert [m["loss"] for m in changed] == pytest.approx([m["loss"] for m in usual], abs=1e-4)


def test_evaluating_does_not_change_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation takes the exact weights, the next step the rounded ones again, their FP8 copies included."""
    monkeypatch.setattr("mlbert.training.experiment.gemm_peak_flops", lambda *_: 1.0)  # measuring it takes seconds
    changes = {"sharded_optimizer": "all", "weights_allgather": "e5m2", "precision": "fp8", "max_steps": 6}
    losses = {}
    for name, distance in (("never", 1_000_000), ("often", 8)):
        with pytest.raises(SystemExit):
            main(
                train_arguments(tmp_path, name, eval_iter_start_samples=distance, eval_iter_samples=distance, **changes)
            )
        losses[name] = [m["loss"] for m in read_metrics(tmp_path / name)]
    assert len(read_metrics(tmp_path / "often", "evaluation")) > 1
    assert losses["often"] == losses["never"]
