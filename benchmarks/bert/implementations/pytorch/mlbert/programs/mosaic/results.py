"""What a finished run leaves for other programs."""

from __future__ import annotations

from pathlib import Path

from mlbert.host.errors import UserError
from mlbert.mlperf.metrics_file import read_points


def last_evaluation(run: Path) -> dict[str, float]:
    """Metrics of the last evaluation in a run folder's ``metrics.jsonl``. Raises UserError: there is none."""
    path, prefix = run / "metrics.jsonl", "eval_"
    try:
        last = [point for point in read_points(path)[0] if point["kind"] == "evaluation"][-1]
    except (UserError, IndexError):
        raise UserError("log.incomplete", path, "holds no evaluation", "Remove its folder and run again") from None
    return {name.removeprefix(prefix): value for name, value in last.items() if name.startswith(prefix)}
