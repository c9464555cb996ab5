"""MLPerf logs of a few lines, for tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RUN_START_MS = 1_000_000


def line(key: str, seconds: float, value: Any = None, **metadata: Any) -> str:
    """One line, so many seconds after run_start."""
    event_type = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}.get(key.rpartition("_")[2], "POINT_IN_TIME")
    event = {"namespace": "", "time_ms": RUN_START_MS + 1000 * seconds, "event_type": event_type, "key": key}
    return ":::MLLOG " + json.dumps({**event, "value": value, "metadata": {"file": "x.py", "lineno": 1, **metadata}})


def write_log(
    path: Path,
    evaluations: Sequence[tuple[float, float, float]] = ((100, 10.0, 0.5), (200, 20.0, 0.72)),
    *,
    eval_seconds: float | None = 1.0,
    status: str | None = "success",
    seconds: float | None = None,
    logged: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a log.

    Args:
        path: its file.
        evaluations: (samples, seconds after run_start when the result is known, accuracy).
        eval_seconds: how long each took; None for logs without eval_start.
        status: that run_stop gives; None for a log without run_stop.
        seconds: of run_stop; the last evaluation's when None.
        logged: further keys with their values.
    """
    keys = {"submission_benchmark": "bert", "seed": 1, "global_batch_size": 448, "submission_division": "closed"}
    lines = [line("init_start", -5.0), *(line(key, -1.0, value) for key, value in {**keys, **(logged or {})}.items())]
    lines += [line("run_start", 0.0), line("block_start", 0.5)]
    for samples, at, accuracy in evaluations:
        if eval_seconds is not None:
            lines += [
                line("eval_start", at - eval_seconds, epoch_num=samples),
                line("eval_stop", at, epoch_num=samples),
            ]
        lines.append(line("eval_accuracy", at, accuracy, epoch_num=samples))
    if status is not None:
        end = max((at for _, at, _ in evaluations), default=0.0) if seconds is None else seconds
        lines.append(line("run_stop", end, status=status))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path
