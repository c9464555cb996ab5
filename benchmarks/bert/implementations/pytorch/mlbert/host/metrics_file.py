"""Read ``metrics.jsonl``, the file of a run's steps and evaluations, even if it is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlbert.host.files import read_plain
from mlbert.host.json_files import parse_json

_MOST_BYTES = 1 << 16  # per line
# Kind of a point -> the numbers that it must have.
_KINDS = {
    "step": {"step", "samples", "seconds", "loss"},
    "evaluation": {"step", "samples", "seconds", "eval_accuracy"},
    "skipped": {"step", "samples"},
}


def read_points(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the valid points of a metrics file and the number of other lines.

    A partial line at the end, as a killed run leaves it, is not counted.
    Raises UserError if the file cannot be read.
    """
    points = []
    foreign = 0
    for line in read_plain(path, "Move it away").splitlines(keepends=True):
        point = _point(line) if len(line) <= _MOST_BYTES else None
        if point:
            points.append(point)
        elif line.endswith(b"\n"):
            foreign += 1
    return points, foreign


def _point(line: bytes) -> dict[str, Any] | None:
    try:
        value = parse_object(line)
    except ValueError:
        return None
    numbers = {name for name, one in value.items() if type(one) in (int, float)}
    known = _KINDS.get(str(value.get("kind")), {"none"})
    is_valid = numbers == value.keys() - {"kind", "slowest_host"} and numbers >= known
    return value if is_valid else None


def parse_object(text: str | bytes, name: str = "") -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError for anything else."""
    try:
        found = parse_json(text, finite=False)  # a loss may be NaN
    except ValueError as error:
        raise ValueError(f"{name}is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{name}is not a JSON object")
    return found
