"""What a finished run leaves for other programs."""

from __future__ import annotations

import json
from pathlib import Path

from mlbert.core.errors import UserError


def last_evaluation(run: Path) -> dict[str, float]:
    """Metrics of the last evaluation in a run folder's ``metrics.jsonl``. Raises UserError: there is none."""
    path, prefix = run / "metrics.jsonl", "eval_"
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        last = [line for line in lines if line["kind"] == "evaluation"][-1]
    except (OSError, ValueError, KeyError, IndexError):
        raise UserError(path, "holds no evaluation", "Remove its folder and run again") from None
    return {name.removeprefix(prefix): value for name, value in last.items() if name.startswith(prefix)}
