"""What decides how to tune for a device: the part of the GPU check for a second call, in groups that each have a time.

    steps     cublasLt's algorithms by time, and fast accumulation in all FP8 products, each as a whole step
    casts     the bandwidth of each kernel that makes FP8 numbers
    losses    the same 200 steps in bfloat16 and in FP8
    blocks    attention's tiles, warps and stages, one kernel at a time
    counters  ncu on five kernels, where it is installed

A row that a group has no time for is left out, and measured when the program goes on (``--resume``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gpu_check.hardware import device_name, median_seconds, peaks_of
from gpu_check.ladder import FAST_ACCUMULATION, Ladder, Rung, fp8_rungs, rungs
from gpu_check.op_cases import OpCases
from gpu_check.op_speed import cast_rows, fp8_calls
from gpu_check.rows import Rows
from gpu_check.trainer import Trainer
from mlbert.ops import forms as registry
from mlbert.ops.precision import fp8_products
from mlbert.programs.bench.step_time import LEARNING_RATE, make_batch
from mlbert.training.step import GraphMode

Row = tuple[str, Callable[[], dict[str, Any]]]
# Group -> seconds. With the time for compiling, less than the part has.
SECONDS = {"steps": 120, "casts": 25, "losses": 90, "blocks": 130, "counters": 75}
LOSS_STEPS, LOSS_WARM_UP, LOSSES_KEPT = 200, 40, 20
KERNELS = ("forward", "gradient of Q", "gradient of K and V")
# BLOCK_Q, BLOCK_K, warps and stages of each kernel; the forward pass takes keys by 64.
BLOCKS = (
    ((64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 4, 2), (128, 64, 8, 3), (64, 64, 4, 3), (64, 128, 4, 2)),
    ((64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (64, 32, 4, 2), (128, 32, 8, 2)),
    ((64, 64, 4, 2), (64, 64, 4, 3), (32, 64, 4, 2), (64, 32, 4, 2), (64, 128, 8, 2)),
)
# Name of a call of `profiled_call` -> the kernel that ncu looks at.
COUNTED = {
    "attention": "attention_forward_kernel",
    "attention backward": "attention_key_value_gradient_kernel",
    "fp8_quantise": "cast_kernel",
    "fp8_gelu_backward": "cast_kernel",
    "fp8_dropout_add_layer_norm_backward": "fp8_norm_backward_kernel",
}
NCU = ("--section", "SpeedOfLight", "--section", "Occupancy", "--section", "WarpStateStats", "--csv", "--page", "raw")
NCU_SECONDS = 60


@dataclass(frozen=True)
class Bench:
    """What the groups measure with.

    Attributes:
        ladder: of the model.
        cases: ops of one batch.
        seconds: of a micro-benchmark; 0 in the rehearsal, which takes one row of a kind.
        sequences: of a step.
    """

    ladder: Ladder
    cases: OpCases
    seconds: float
    sequences: int

    @property
    def device(self) -> torch.device:
        return self.ladder.device


def measure(rows: Rows, bench: Bench, clock: Callable[[], float] = time.monotonic) -> None:
    """Each group's rows, as many as its seconds allow; the names of the others are kept as ``left_out``."""
    rows.content["left_out"] = []
    for group, found in GROUPS.items():
        ends = clock() + SECONDS[group]
        for name, row in found(bench):
            if clock() < ends:
                rows.measure(f"{group}: {name}", row)
            elif f"{group}: {name}" not in rows.content["rows"]:
                rows.content["left_out"].append(f"{group}: {name}")
    rows.write()


def step_rows(bench: Bench) -> Iterator[Row]:
    """The best steps as graphs, by the heuristic's algorithms and by the fastest, and with fast accumulation."""
    best = rungs(bench.device, bench.ladder.sizes)[-1]
    mode = GraphMode.FULL_ITERATION if bench.device.type == "cuda" else GraphMode.SEGMENTED
    for rung in [best, *fp8_rungs(bench.device, best)[-1:]]:
        graph = replace(rung, name=f"{rung.name}, graph", graph=mode.value, sequences=bench.sequences)
        timed = replace(graph, name=f"{graph.name}, algorithms timed", tuned=True)
        fast = replace(timed, name=f"{timed.name}, {FAST_ACCUMULATION}", accumulation="all")
        for tried in (graph, timed, *([fast] if rung.precision else [])):
            yield tried.name, lambda r=tried: bench.ladder.measure(r)


def loss_rows(bench: Bench) -> Iterator[Row]:
    """Losses of the same steps from the same weights."""
    best = rungs(bench.device, bench.ladder.sizes)[-1]
    tried = [replace(best, name="bf16")]
    for rung in fp8_rungs(bench.device, best)[-1:]:
        tried += [replace(rung, name="fp8"), replace(rung, name=f"fp8, {FAST_ACCUMULATION}", accumulation="all")]
    for rung in tried:
        yield rung.name, lambda r=rung: losses(bench, r)


def losses(bench: Bench, rung: Rung) -> dict[str, Any]:
    """The loss of every tenth step and the mean of the last ones."""
    ladder, count = bench.ladder, LOSS_STEPS if bench.seconds else 2
    registry.select_each(rung.forms, bench.device)
    products = fp8_products(rung.precision, bench.device, rung.accumulation)
    first = make_batch(ladder.config, ladder.sizes.small, None, ladder.seed)
    trainer = Trainer(ladder.config, first, ladder.device, ladder.dtype, ladder.seed, None, rung.lamb, products)
    found: list[Tensor] = []
    for number in range(count):
        batch = make_batch(ladder.config, ladder.sizes.small, None, ladder.seed + number)
        rate = LEARNING_RATE * min(1.0, (number + 1) / LOSS_WARM_UP)
        found.append(trainer.steps([batch], number, rate).loss_sum.clone())
    values = torch.stack(found).tolist()
    last = values[-LOSSES_KEPT:]
    return {"losses": values[::10], "last_losses_mean": sum(last) / len(last), "steps": count}


def block_rows(bench: Bench) -> Iterator[Row]:
    """Attention with other tiles, one kernel at a time, the others as they are chosen."""
    if "triton" not in registry.available(bench.device)["attention"]:
        return
    for kernel, name in enumerate(KERNELS):
        for sizes in BLOCKS[kernel] if bench.seconds else BLOCKS[kernel][:1]:
            yield f"{name} {' '.join(map(str, sizes))}", lambda k=kernel, s=sizes: attention_with(bench, k, s)


def attention_with(bench: Bench, kernel: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Seconds of the pass that the kernel is of, and whether it gives what the chosen tiles give."""
    import triton

    from mlbert.ops.triton import attention as form

    case = bench.cases.attention(bench.ladder.config.attention_probs_dropout_prob)
    qkv, *rest = case.arguments(0)
    qkv = qkv.requires_grad_()

    def both() -> tuple[Tensor, Tensor]:
        out = form.attention(qkv, *rest)
        return out.detach(), torch.autograd.grad(out, qkv, torch.ones_like(out))[0]

    expected, chosen = both(), list(form._blocks(qkv))
    chosen[kernel] = form.AttentionBlocks(*sizes)
    with mock.patch.object(form, "_blocks", return_value=tuple(chosen)):
        try:
            found = both()
        except triton.OutOfResources as error:
            return {"skipped": str(error)}
        seconds = median_seconds(both if kernel else lambda: form.attention(qkv, *rest), bench.device, bench.seconds)
    errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, expected, strict=True)]
    return {"forward_seconds": seconds, "passed": max(errors) < 2**-7, "errors": errors}


def counter_rows(bench: Bench) -> Iterator[Row]:
    """What ncu counts for one launch of each kernel."""
    for name, kernel in COUNTED.items():
        yield f"{name}, {kernel}", lambda n=name, k=kernel: counters(bench.device, n, k)


def counters(device: torch.device, name: str, kernel: str) -> dict[str, Any]:
    """One launch under ncu, in a process of its own."""
    program = shutil.which("ncu")
    if program is None or device.type != "cuda":
        return {"skipped": "ncu is not installed" if program is None else "ncu needs a GPU"}
    command = [program, "--kernel-name", kernel, "--launch-count", "1", *NCU]
    command += [sys.executable, "-m", "gpu_check.main", "--call", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=NCU_SECONDS, env=os.environ, check=False)
    if done.returncode or '"' not in done.stdout:
        return {"skipped": f"ncu: {(done.stderr or done.stdout).strip()[-300:]}"}
    return {"csv": done.stdout[done.stdout.index('"') :]}


def profiled_call(cases: OpCases, name: str) -> None:
    """One call of those in `COUNTED`."""
    if not name.startswith("attention"):
        fp8_calls(cases)[name][0]()
        return
    qkv, *rest = cases.attention(cases.config.attention_probs_dropout_prob).arguments(0)
    out = registry.form("attention", "triton")(qkv.requires_grad_(), *rest)
    torch.autograd.grad(out, qkv, torch.ones_like(out))


def _cast_rows(bench: Bench) -> Iterator[Row]:
    yield from cast_rows(bench.cases, bench.seconds, peaks_of(device_name(bench.device)))


GROUPS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "steps": step_rows,
    "casts": _cast_rows,
    "losses": loss_rows,
    "blocks": block_rows,
    "counters": counter_rows,
}
