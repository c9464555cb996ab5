"""The measuring parts of tools/gpu_check.py: each writes one JSON file, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mlbert import ops
from mlbert.bench.hardware import environment_facts
from mlbert.bench.ladder import Ladder, Sizes, fp8_rungs, rungs
from mlbert.bench.op_cases import OpCases
from mlbert.bench.op_checks import check_rows
from mlbert.bench.op_speed import speed_rows
from mlbert.bench.profile import profile_step
from mlbert.bench.rows import Rows
from mlbert.bench.step import make_batch
from mlbert.models import BertConfig

SEED = 1
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        config: the model.
        check_config: the model whose parameters LAMB is checked on.
        checked, timed: sequences of the checks and of the micro-benchmarks.
        sizes: sequences of the steps.
        op_seconds, step_seconds: measuring time of a row.
    """

    config: BertConfig
    check_config: BertConfig
    checked: int
    timed: int
    sizes: Sizes
    op_seconds: float
    step_seconds: float


def full_scale() -> Scale:
    """BERT-large at the sizes of training."""
    large = BertConfig.from_json(CONFIGS / "large.json")
    two_layers = BertConfig(**{**vars(large), "num_hidden_layers": 2})
    return Scale(large, two_layers, 48, 448, Sizes(448, 32, 96), 0.3, 4.0)


def tiny_scale() -> Scale:
    """For the rehearsal on a CPU: seconds even in Triton's interpreter."""
    tiny = BertConfig(
        vocab_size=122,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=64,
        max_position_embeddings=48,
    )
    return Scale(tiny, tiny, 2, 2, Sizes(2, 1, 1), 0.0, 0.0)


def checks(rows: Rows, scale: Scale, device: torch.device) -> None:
    """Every implementation against its plain twin."""
    batch = make_batch(scale.config, scale.checked, None, SEED).to(device)
    for name, row in check_rows(scale.check_config, OpCases(scale.config, batch, torch.bfloat16)):
        rows.measure(name, row)


def speed(rows: Rows, scale: Scale, device: torch.device) -> None:
    """Micro-benchmarks."""
    batch = make_batch(scale.config, scale.timed, None, SEED).to(device)
    cases = OpCases(scale.config, batch, torch.bfloat16)
    for name, row in speed_rows(scale.config, cases, scale.op_seconds):
        rows.measure(name, row)


def step(rows: Rows, scale: Scale, device: torch.device) -> None:
    """The ladder, and Hugging Face."""
    ladder = Ladder(scale.config, device, torch.bfloat16, scale.sizes, scale.step_seconds, SEED)
    for name, row in ladder.rows():
        rows.measure(name, row)


def profiles(rows: Rows, scale: Scale, device: torch.device) -> None:
    """Where the time of the best rungs goes."""
    ladder = Ladder(scale.config, device, torch.bfloat16, scale.sizes, scale.step_seconds, SEED)
    best = rungs(device, scale.sizes)[-1]
    for rung in [best, *fp8_rungs(device, best)[-1:]]:

        def measure(rung: Any = rung) -> dict[str, Any]:
            return ladder.with_largest_batch(
                rung.sequences,
                lambda batch: profile_step(ladder.trainer(rung, batch), scale.config, torch.bfloat16),
            )

        rows.measure(rung.name, measure)


PARTS: dict[str, Callable[[Rows, Scale, torch.device], None]] = {
    "checks": checks,
    "ops": speed,
    "step": step,
    "profile": profiles,
}


def run_part(part: str, path: Path, device: torch.device) -> None:
    """Measures one part into `path`, going on where it ended before; on a CPU at the rehearsal's sizes.

    Raises:
        mlbert.bench.rows.DeviceLost: this process can measure no more; a new one can go on.
    """
    scale = full_scale() if device.type == "cuda" else tiny_scale()
    if device.type != "cuda":
        torch.set_num_threads(1)
    ops.select("auto", device)
    torch.manual_seed(SEED)
    PARTS[part](Rows(path, device, environment_facts(device)), scale, device)
