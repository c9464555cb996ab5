"""What a finished run leaves behind: the summary, the curve, and the weights as the recipe writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mlbert.data.loading.config import DataConfig
from mlbert.distributed.world import World
from mlbert.host.files import write_atomically
from mlbert.ops.peak import gemm_peak_flops
from mlbert.runs import run_folder
from mlbert.runs.progress import Outcome
from mlbert.training.config import EvaluationConfig
from mlbert.training.protocols import Method


def summarize(
    outcome: Outcome, data: DataConfig, evaluation: EvaluationConfig, method: Method, seed: int, world: World
) -> dict[str, object]:
    """The numbers that ``mlbert report`` prints; rates per second, of training without evaluation."""
    state = outcome.state
    seconds = max(state.train_seconds, 1e-9)
    peak = gemm_peak_flops(method.model.dtype, world.device.type)
    rate = state.flops / seconds / world.world_size
    return {
        **run_folder.summarize(outcome, data, evaluation, seed, world.world_size),
        "model_flops_per_second_per_rank": round(rate),
        "gemm_peak_flops_per_second_per_rank": round(peak),
        "share_of_gemm_peak": round(rate / peak, 4),
    }


def leave_behind(folder: Path, summary: Mapping[str, object], facts: Mapping[str, object], method: Method) -> None:
    """Writes weights, curve and, last of all, the summary: a run folder with one is finished."""
    method.export(folder, {**summary, **facts})
    run_folder.write_curve(folder, summary)
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
