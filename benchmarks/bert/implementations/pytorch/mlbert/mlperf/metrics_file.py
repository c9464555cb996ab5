"""Reading ``metrics.jsonl``, which a killed run, a full disk or an editor may have left damaged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlbert.host.errors import UserError
from mlbert.host.files import open_plain
from mlbert.host.json_files import parse_json

_MOST_BYTES = 1 << 16  # of a line
_KINDS = {
    "step": {"step", "samples", "seconds", "loss"},
    "evaluation": {"step", "samples", "seconds", "eval_accuracy"},
    "skipped": {"step", "samples"},
}


def read_points(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines that a run wrote, and the number of those that are anything else; half a line at the end, as a killed
    run leaves it, does not count. Raises UserError: the file cannot be read."""
    points, foreign = [], 0
    try:
        with open_plain(path) as file:
            while line := file.readline(_MOST_BYTES):
                point = _point(line)
                points += [point] if point else []
                foreign += not point and line.endswith(b"\n")
    except OSError as error:
        raise UserError("file.unreadable", path, f"cannot be read ({error.strerror})", "Move it away") from None
    return points, foreign


def _point(line: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(line, finite=False)  # a loss may be NaN
    except ValueError:
        return None
    return value if isinstance(value, dict) and _is_point(value) else None


def _is_point(value: Mapping[str, Any]) -> bool:
    numbers = {name for name, one in value.items() if type(one) in (int, float)}
    kind = value.get("kind")
    return isinstance(kind, str) and numbers == value.keys() - {"kind"} and numbers >= _KINDS.get(kind, {"none"})
