"""The parts of the GPU check: one compiles kernels, each of the others writes one JSON file, row by row."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import mlbert
from gpu_check import tune
from gpu_check.hardware import environment_facts
from gpu_check.ladder import Ladder, Rung, Sizes, fp8_rungs, placed, rungs, without
from gpu_check.op_cases import OpCases
from gpu_check.op_checks import check_rows
from gpu_check.op_speed import speed_rows
from gpu_check.profile import profile_step
from gpu_check.rows import Rows
from mlbert.config.bert_config import BertConfig
from mlbert.data.loading.batches import HostBatch
from mlbert.ops import api as ops
from mlbert.programs.bench.step_time import make_batch

SEED = 1
CONFIGS = Path(mlbert.__file__).resolve().parents[1] / "configs"


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        config: the model.
        check_config: the model whose parameters LAMB is checked on.
        compiled, checked, timed: sequences of the calls that compile kernels, the checks and the micro-benchmarks.
        sizes: sequences of the steps.
        smoke: sequences of the first steps of all.
        op_seconds, step_seconds: measuring time of a row.
    """

    config: BertConfig
    check_config: BertConfig
    compiled: int
    checked: int
    timed: int
    sizes: Sizes
    smoke: int
    op_seconds: float
    step_seconds: float


def full_scale() -> Scale:
    """BERT-large at the sizes of training."""
    large = BertConfig.from_json(CONFIGS / "large.json")
    two_layers = BertConfig(**{**vars(large), "num_hidden_layers": 2})
    return Scale(large, two_layers, 8, 48, 448, Sizes(448, 32, 96), 96, 0.3, 3.0)


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
    return Scale(tiny, tiny, 1, 2, 2, Sizes(2, 1, 1, 1), 1, 0.0, 0.0)


def compile_kernels(device: torch.device, shard: int, shards: int) -> None:
    """Calls every `shards`-th op and step once, small, so that Triton's cache holds the kernels; prints the times.

    What fails here fails again where it is checked.
    """
    scale = _prepare(device)
    for name, call in list(compile_calls(scale, device))[shard::shards]:
        started = time.perf_counter()
        try:
            call()
        except Exception:
            print(f"compile: {name}: {traceback.format_exc()}", flush=True)
        print(f"compile: {name}: {time.perf_counter() - started:.1f} s", flush=True)


def compile_calls(scale: Scale, device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, call): steps of all precisions, every check. The longest come first."""
    config = scale.check_config
    ladder = Ladder(config, device, torch.bfloat16, Sizes(*(4 * [scale.compiled])), 0.0, SEED)
    best = rungs(device, ladder.sizes)[-1]

    def step(rung: Rung) -> None:
        ladder.step_of(rung, ladder.batch(scale.compiled))()

    for rung in [*fp8_rungs(device, best), best]:
        yield rung.name, lambda r=rung: step(r)
    for fill in (False, True):
        # Both: some kernels are compiled for numbers of tokens that 16 divides, and once more for others.
        batch = make_batch(config, scale.compiled, None, SEED)
        cases = OpCases(config, placed(batch, device, fill), torch.bfloat16)
        yield from check_rows(config, cases)


def smoke(rows: Rows, scale: Scale, device: torch.device) -> None:
    """The best step in bfloat16 and in FP8, of as many sequences as a GPU has in the published runs of eight."""
    ladder = Ladder(scale.config, device, torch.bfloat16, scale.sizes, scale.step_seconds, SEED)
    best = rungs(device, scale.sizes)[-1]
    for rung in [best, *fp8_rungs(device, best)[-1:]]:
        small = replace(rung, sequences=scale.smoke)
        rows.measure(f"{rung.name}, {scale.smoke} sequences", lambda r=small: ladder.measure(r))


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
        for tried in (rung, without(rung, "cublaslt")):
            rows.measure(tried.name, lambda r=tried: profiled(ladder, r))
            if "error" not in rows.content["rows"][tried.name]:
                break


def profiled(ladder: Ladder, rung: Rung) -> dict[str, Any]:
    """One rung's profile."""

    def measured(batch: HostBatch) -> dict[str, Any]:
        return profile_step(ladder.trainer(rung, batch, None), ladder.config, ladder.dtype)

    return ladder.with_largest_batch(rung.sequences, measured)


def tuning(rows: Rows, scale: Scale, device: torch.device) -> None:
    """What decides how to tune."""
    batch = make_batch(scale.config, scale.timed, None, SEED).to(device)
    cases = OpCases(scale.config, batch, torch.bfloat16)
    ladder = Ladder(scale.config, device, torch.bfloat16, scale.sizes, scale.step_seconds, SEED)
    tune.measure(rows, tune.Bench(ladder, cases, scale.op_seconds, scale.smoke))


def call(device: torch.device, name: str) -> None:
    """One call for a profiler."""
    scale = _prepare(device)
    batch = make_batch(scale.config, scale.checked, None, SEED).to(device)
    tune.profiled_call(OpCases(scale.config, batch, torch.bfloat16), name)


PARTS: dict[str, Callable[[Rows, Scale, torch.device], None]] = {
    "smoke": smoke,
    "checks": checks,
    "ops": speed,
    "step": step,
    "profile": profiles,
    "tune": tuning,
}


def run_part(part: str, path: Path, device: torch.device) -> None:
    """Measures one part into `path`, going on where it ended before; on a CPU at the rehearsal's sizes.

    Raises:
        gpu_check.rows.DeviceLost: this process can measure no more; a new one can go on.
    """
    scale = _prepare(device)
    PARTS[part](Rows(path, device, environment_facts(device)), scale, device)


def _prepare(device: torch.device) -> Scale:
    scale = full_scale() if device.type == "cuda" else tiny_scale()
    if device.type != "cuda":
        torch.set_num_threads(1)
    ops.select("auto", device)
    torch.manual_seed(SEED)
    return scale
