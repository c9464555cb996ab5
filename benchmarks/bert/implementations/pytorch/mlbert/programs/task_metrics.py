"""Read the metrics of the last evaluation of a fine-tuning run."""

from __future__ import annotations

from pathlib import Path

from mlbert.host.errors import UserError
from mlbert.host.metrics_file import read_points

_PREFIX = "eval_"


def last_evaluation(run: Path) -> dict[str, float]:
    """Return the metrics of the last evaluation in a run's ``metrics.jsonl``.

    Raises:
        UserError: there is none.
    """
    path = run / "metrics.jsonl"
    try:
        last = [point for point in read_points(path)[0] if point["kind"] == "evaluation"][-1]
    except (UserError, IndexError):
        raise UserError(
            "log.incomplete", path, "contains no evaluation", "Remove its folder and run again"
        ) from None
    return {
        name.removeprefix(_PREFIX): value
        for name, value in last.items()
        if name.startswith(_PREFIX)
    }
