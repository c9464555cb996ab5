"""What the recipe makes of the settings: the way of clipping, refusals, and what a resumed run continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlbert.cli.main import main
from training_settings import read_metrics, train_arguments

METHOD = {"recipe": "ddp_adam", "average_packing_rate": 1, "learning_rate": 0.002, "max_steps": 6}


def run(folder: Path, name: str, **changes: object) -> list[dict]:
    with pytest.raises(SystemExit) as end:
        main(train_arguments(folder, name, **{**METHOD, **changes}))
    assert end.value.code == 1
    return read_metrics(folder / name)


def test_one_bucket_of_one_rank_is_clipping_as_a_whole(tmp_path: Path) -> None:
    """The tiny model is one bucket, a rank alone is its own mean: then the three ways are one."""
    changes = {"gradient_accumulation_steps": 1, "max_grad_norm": 0.5}
    ways = {way: run(tmp_path, way, gradient_clipping=way, **changes) for way in ("after", "before", "buckets")}
    for way in ("before", "buckets"):
        assert [m["loss"] for m in ways[way]] == pytest.approx([m["loss"] for m in ways["after"]], abs=1e-5)
    norms = {way: [m["grad_norm"] for m in metrics] for way, metrics in ways.items()}
    assert norms["buckets"] == pytest.approx(norms["after"], rel=1e-4)
    assert min(norms["after"]) > 0.5 >= max(norms["before"]) - 1e-6


@pytest.mark.slow
def test_a_resumed_float16_run_keeps_its_loss_scale(tmp_path: Path) -> None:
    half = {"precision": "fp16", "loss_scale": 2**24, "save_checkpoint_steps": 3, "schedule": "constant"}
    whole = run(tmp_path, "whole", max_steps=12, **half)
    run(tmp_path, "parts", max_steps=6, **half)
    (tmp_path / "parts/run_0/summary.json").unlink()
    resumed = run(tmp_path, "parts", max_steps=12, resume=1, **half)
    assert [m["loss"] for m in resumed[-6:]] == [m["loss"] for m in whole[-6:]]
