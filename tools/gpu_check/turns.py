"""Measure whole training steps in turns A B C D D C B A, so that a drift of the clock hits all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gpu_check.hardware import Meter, calls_within, measure_calls, sampled_power, synchronize
from gpu_check.rows import Rows, read_rows

WARM_UP = 2


@dataclass(frozen=True)
class TimedSide:
    """One side of the turns.

    Attributes:
        name: of the side.
        step: queues one training step.
        units: sequences or tokens of a step.
        unit: "sequences" or "tokens".
        flops: that the losses of a step require.
        precision: "bf16" or "fp8", whose matrix rate the FLOPs are compared with.
        baseline: name of the side whose place this variant may take.
        opponent: beginning of the names of another library's sides.
        remarks: messages of making it, such as ops that were refused.
    """

    name: str
    step: Callable[[], object]
    units: int
    unit: str
    flops: float
    precision: str
    baseline: str | None = None
    opponent: str | None = None
    remarks: tuple[str, ...] = ()


Make = Callable[[], TimedSide]


def take_turns(rows: Rows, makes: dict[str, Make], seconds: float, device: torch.device) -> None:
    """Make the sides and measure each twice; one that cannot be made is left out."""
    sides: list[TimedSide] = []
    for name, make in makes.items():

        def made(make: Make = make) -> dict[str, Any]:
            side = make()
            sides.append(side)
            return {"remarks": list(side.remarks)}

        rows.measure(f"{name}: made", made)
    _measure_halves(rows, sides, seconds, device)
    sides.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _measure_halves(
    rows: Rows, sides: Sequence[TimedSide], seconds: float, device: torch.device
) -> None:
    for half, order in ((1, list(sides)), (2, list(reversed(sides)))):
        for side in order:
            turn = partial(measure_turn, side, half, seconds, device, read_rows(rows.path))
            rows.measure(f"{side.name}: half {half}", turn)


def measure_turn(
    side: TimedSide,
    half: int,
    seconds: float,
    device: torch.device,
    rows: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Run a side's steps for about ``seconds``, and return time, energy, power and clocks.

    ``rows`` may have the ceilings of this call, for the share of the measured matrix rate.
    """
    for _ in range(WARM_UP):
        side.step()
    synchronize(device)
    count = calls_within(seconds, side.step, device)
    meter = Meter(device)
    with sampled_power() as power:
        taken, used = measure_calls(count, side.step, device, meter)
    found: dict[str, Any] = {
        "side": side.name,
        "half": half,
        "baseline": side.baseline,
        "opponent": side.opponent,
        "steps": count,
        "ms": 1e3 * taken / count,
        "unit": side.unit,
        "per_second": side.units * count / taken,
        "joules_per_unit": None if used is None else used / (side.units * count),
        "watts": None if used is None else used / taken,
        "tflops": side.flops * count / taken / 1e12,
        "power": power,
    }
    if meter.reason:
        found["energy"] = meter.reason
    ceiling = matrix_rate(rows, side.precision)
    if ceiling is not None:
        found["matrix_share"] = found["tflops"] / ceiling
    if device.type == "cuda":
        found["peak_memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
    return found


def matrix_rate(rows: Sequence[dict[str, Any]], precision: str) -> float | None:
    """Return the TFLOP/s that this call measured for large square products in a precision."""
    for row in rows:
        if row.get("row") == f"product {precision}" and "tflops" in row:
            return float(row["tflops"])
    return None
