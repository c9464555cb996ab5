"""Recommend the next steps after a run, from its measurements, as lines ``next: ...``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu_check.tables import GOALS, failures, read_rows

MIN_SPEEDUP = 1.03  # to recommend another implementation
MIN_CLOCK = 0.9  # share of the median below which the clock was throttled
BUSY_PERCENT = 60.0  # of a peak; a kernel below it in both is limited by latency
COMMAND = "tools/gpu_check.sh --run"
Rows = Mapping[str, Mapping[str, Any]]


def next_lines(run: int, work: Path, ends: Mapping[str, str]) -> list[str]:
    """Return the lines for the parts that have ended so far."""
    found = [*_failed(run, work, ends)]
    found += _speeds({**read_rows(work, "smoke"), **read_rows(work, "record")})
    choice = _form(read_rows(work, "ops"), read_rows(work, "checks"))
    if choice:
        found.append(
            f"attention {choice} is the fastest form that passed its checks; OPS={choice} uses it"
        )
    found += _kernels(read_rows(work, "counters"))
    found.append(
        {
            1: f"{f'OPS={choice} ' if choice else ''}{COMMAND} 2",
            2: f"{COMMAND} 3",
            3: "write a README into the results folder, and commit it under records/",
        }[run]
    )
    return [f"next: {line}" for line in found]


def _failed(run: int, work: Path, ends: Mapping[str, str]) -> Iterator[str]:
    if failed := failures(work, dict(ends)):
        yield f"fix the first failure ({failed[0]}), then {COMMAND} {run} --resume"


def _speeds(rows: Rows) -> Iterator[str]:
    """Compare the rates of the published step with the goals and with each other."""
    best: dict[str, tuple[str, float]] = {}
    for name, row in rows.items():
        precision = row.get("precision")
        speed = row.get("sequences_per_second", 0.0)
        if precision in GOALS and speed > best.get(precision, ("", 0.0))[1]:
            best[precision] = (name, speed)
        power = row.get("power", {})
        if power.get("least_sm_mhz", 0.0) < MIN_CLOCK * power.get("sm_mhz", 0.0):
            yield (
                f"measure {name} again: the clock fell from {power['sm_mhz']:.0f} to "
                f"{power['least_sm_mhz']:.0f} MHz"
            )
        if "did_not_fit" in row:
            yield f"find out what uses the memory of {name}: {row['did_not_fit']} packs did not fit"
    for precision, (name, speed) in best.items():
        share = speed / GOALS[precision]
        verdict = (
            "the goal is reached"
            if share >= 1
            else "the table of the part profile shows where the time goes"
        )
        yield (
            f"{precision} reaches {speed:.0f} sequences/s ({name}), {share:.0%} of its goal: "
            f"{verdict}"
        )
    if len(best) == len(GOALS) and best["fp8"][1] < best["bf16"][1]:
        yield "look at the part ops: FP8 is slower than bfloat16"


def _form(timed: Rows, checked: Rows) -> str:
    """Return the attention that passed its checks and is clearly faster than the default,
    or an empty string.
    """
    seconds = {}
    for name, row in timed.items():
        op, _, form = name.partition(": ")
        passed = all(
            r.get("passed")
            for n, r in checked.items()
            if n.startswith("attention") and n.endswith(f": {form}")
        )
        if op == "attention" and form != "plain" and passed and "forward_seconds" in row:
            seconds[form] = row["forward_seconds"] + (row.get("backward_seconds") or 0.0)
    best = min(seconds, key=lambda form: seconds[form], default="triton")
    return (
        "" if best == "triton" or seconds[best] * MIN_SPEEDUP > seconds.get("triton", 0.0) else best
    )


def _kernels(rows: Rows) -> Iterator[str]:
    for name, row in rows.items():
        compute, memory = (row.get(f"{kind}_percent", 100.0) for kind in ("compute", "memory"))
        if max(compute, memory) < BUSY_PERCENT:
            busy = f"compute {compute:.0f} %, memory {memory:.0f} %"
            warps = f"occupancy {row.get('occupancy_percent', 0.0):.0f} %"
            yield (
                f"{name} saturates neither compute nor memory ({busy}, {warps}): "
                "more warps or a deeper pipeline"
            )
