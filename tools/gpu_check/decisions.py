"""Decide from the rows of a call: which variants to adopt, and how goals are met.

A variant takes the place of its baseline if a step takes at least 1 % less time and at least 1 %
fewer joules in both halves of the turns A B C D D C B A. Nothing else is adopted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

LEAST_GAIN = 0.01
HALVES = (1, 2)
# Units per second of one H200, by the beginning of a side's name.
GOALS = {
    "bert fp8": 1450.0,
    "bert bf16": 1060.0,
    "modernbert base 1024 bf16": 480_000.0,
    "modernbert base 1024 fp8": 600_000.0,
    "modernbert base 8192 bf16": 384_000.0,
    "modernbert base 8192 fp8": 480_000.0,
}
Rows = Sequence[dict[str, Any]]


def adopted(rows: Rows) -> dict[str, bool | None]:
    """Return variant -> whether to adopt it; None if a half of it or of its baseline is missing, or
    its joules are.
    """
    found: dict[str, bool | None] = {}
    for side, baseline in _baselines(rows).items():
        gains = [_gains(rows, side, baseline, half) for half in HALVES]
        every = [gain for both in gains for gain in both]
        known = [gain for gain in every if gain is not None]
        if len(known) < len(every):
            found[side] = None
        else:
            found[side] = min(known) >= LEAST_GAIN
    return found


def decision_lines(rows: Rows) -> list[str]:
    """Return the decisions, the goals, the opponents and the failures, one a line."""
    lines = []
    baselines = _baselines(rows)
    for side, verdict in adopted(rows).items():
        baseline = baselines[side]
        gains = [_gains(rows, side, baseline, half) for half in HALVES]
        words = ", ".join(_gain_words(gain) for gain in gains)
        if verdict is None:
            lines.append(f"not decided: {side} against {baseline} ({words})")
        else:
            lines.append(f"{'adopt' if verdict else 'keep out'}: {side} ({words})")
    lines += _speed_lines(rows)
    for row in rows:
        where = f"{row['part']}: {row['row']}"
        if "error" in row:
            lines.append(f"failed: {where}: {row['error'].strip().splitlines()[-1]}")
        elif row.get("passed") is False:
            lines.append(f"failed: {where}")
        elif "stopped" in row:
            lines.append(f"stopped: {where}: {row['stopped']}")
        elif "skipped" in row:
            lines.append(f"skipped: {where}: {row['skipped']}")
    return lines


def _speed_lines(rows: Rows) -> Iterator[str]:
    sides = dict.fromkeys(row["side"] for row in rows if "side" in row)
    for side in sides:
        halves = [row for row in rows if row.get("side") == side and "per_second" in row]
        if not halves:
            continue
        mean = sum(row["per_second"] for row in halves) / len(halves)
        words = f"{side}: {mean:,.0f} {halves[0]['unit']}/s"
        joules = [row["joules_per_unit"] for row in halves if row["joules_per_unit"] is not None]
        if joules:
            words += f", {sum(joules) / len(joules):.6f} J each"
        share = halves[0].get("matrix_share")
        if share is not None:
            words += f", {share:.0%} of the measured matrix rate"
        goal = GOALS.get(side.removesuffix(" auto"))
        if goal is not None:
            words += f", {mean / goal:.0%} of the goal of {goal:,.0f}"
        opponent = halves[0].get("opponent")
        if opponent is not None:
            theirs = [
                row["per_second"]
                for row in rows
                if row.get("side", "").startswith(opponent) and "per_second" in row
            ]
            if theirs:
                words += f", {mean / max(theirs):.2f} times the fastest turn of {opponent}"
        yield words


def _baselines(rows: Rows) -> dict[str, str]:
    """Return the baseline of each side that has one."""
    return {row["side"]: row["baseline"] for row in rows if row.get("baseline")}


def _gains(rows: Rows, side: str, baseline: str, half: int) -> list[float | None]:
    """Return the shares of time and of joules that a side saves in a half; None if not measured."""
    ours = _of_half(rows, side, half)
    before = _of_half(rows, baseline, half)
    return [_saved(ours.get(name), before.get(name)) for name in ("ms", "joules_per_unit")]


def _saved(ours: float | None, before: float | None) -> float | None:
    return None if ours is None or before is None else 1 - ours / before


def _of_half(rows: Rows, side: str, half: int) -> dict[str, Any]:
    """Return the row of a turn, empty if there is none."""
    for row in rows:
        if row.get("side") == side and row.get("half") == half and "ms" in row:
            return row
    return {}


def _gain_words(gains: Sequence[float | None]) -> str:
    time_gain, joules_gain = gains
    if time_gain is None:
        return "a half is missing"
    if joules_gain is None:
        return f"step {-time_gain:+.1%}, joules not measured"
    return f"step {-time_gain:+.1%}, joules {-joules_gain:+.1%}"
