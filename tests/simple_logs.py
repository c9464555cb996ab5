"""Short MLPerf logs for tests of their readers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RUN_START_MS = 1_000_000


def line(key: str, seconds: float, value: Any = None, **metadata: Any) -> str:
    """Return a log line ``seconds`` after run_start."""
    event_type = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}.get(
        key.rpartition("_")[2], "POINT_IN_TIME"
    )
    event = {
        "namespace": "",
        "time_ms": RUN_START_MS + 1000 * seconds,
        "event_type": event_type,
        "key": key,
    }
    return ":::MLLOG " + json.dumps(
        {**event, "value": value, "metadata": {"file": "x.py", "lineno": 1, **metadata}}
    )


def write_log(
    path: Path,
    evaluations: Sequence[tuple[float, float, float]] = ((100, 10.0, 0.5), (200, 20.0, 0.72)),
    *,
    eval_seconds: float | None = 1.0,
    status: str | None = "success",
    seconds: float | None = None,
    logged: Mapping[str, Any] | None = None,
) -> Path:
    """Write a log.

    Args:
        path: file to write.
        evaluations: (samples, seconds after run_start, accuracy) of each result.
        eval_seconds: duration of each evaluation (None omits eval_start and eval_stop).
        status: status of run_stop (None omits run_stop).
        seconds: time of run_stop (default: that of the last evaluation).
        logged: additional keys and values.
    """
    keys = {
        "submission_benchmark": "bert",
        "seed": 1,
        "global_batch_size": 448,
        "submission_division": "closed",
    }
    lines = [
        line("init_start", -5.0),
        *(line(key, -1.0, value) for key, value in {**keys, **(logged or {})}.items()),
    ]
    lines += [line("run_start", 0.0), line("block_start", 0.5)]
    for samples, at, accuracy in evaluations:
        if eval_seconds is not None:
            lines.append(line("eval_start", at - eval_seconds, epoch_num=samples))
            lines.append(line("eval_stop", at, epoch_num=samples))
        lines.append(line("eval_accuracy", at, accuracy, epoch_num=samples))
    if status is not None:
        end = max((at for _, at, _ in evaluations), default=0.0) if seconds is None else seconds
        lines.append(line("run_stop", end, status=status))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def write_runs(
    folder: Path, seconds: Sequence[float], missed: Sequence[int] = (), samples: Sequence[int] = ()
) -> None:
    """Write runs of one evaluation that end at these seconds;
    those of ``missed`` do not reach the target.
    """
    for index, end in enumerate(seconds):
        evaluations = [(samples[index] if samples else 100, end, 0.73)]
        status = "aborted" if index in missed else "success"
        write_log(
            folder / f"result_{index}.txt", evaluations, status=status, logged={"seed": index}
        )
