"""Whether a run that was repeated agrees with its log: status, accuracies and samples to the target.

Floating-point sums differ from processor to processor, so curves drift apart from some step on, and a repeated run is
another draw of the same distribution. The other runs beside the log tell its spread: a number agrees that lies in their
prediction interval, ``mean ± t * s * sqrt(1 + 1/n)`` of Student's t; for samples, which cannot be negative, of their
logarithms. The intervals together hold at least 95 % of good runs (Bonferroni). Where fewer than three runs lie there,
the numbers have to be equal up to `ACCURACY` and `SAMPLES`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbert.mlperf.logs import Log
from mlbert.mlperf.metrics_file import read_points
from mlbert.mlperf.run_files import run_file
from mlbert.mlperf.run_numbers import samples_per_second, samples_to_target
from mlbert.mlperf.run_view import evaluations_of
from mlbert.mlperf.significance import FEWEST_RUNS

LEVEL = 0.05  # of good runs at most fall out of an interval
ACCURACY = 1e-3  # absolute: intervals are at least as wide
SAMPLES = 1e-3  # relative, likewise
LOSS = 1e-3  # relative: where loss curves count as different


@dataclass(frozen=True)
class Row:
    """One number or word that is judged."""

    name: str
    log: str
    repeated: str
    allowed: str
    agrees: bool


def judge(log: Log, repeated: Log, siblings: Sequence[Log]) -> list[Row]:
    """Judge a repeated run; ``siblings`` are the runs of the same settings beside the log, it among them."""
    rows = [Row("status", str(log.status), str(repeated.status), str(log.status), log.status == repeated.status)]
    has_spread = len(siblings) >= FEWEST_RUNS
    wanted, got = evaluations_of(log), evaluations_of(repeated)
    drawn = [evaluations_of(run) for run in siblings] if has_spread else [wanted]
    # Behind the first that reached the target only the slow ones are left, whose accuracies are lower.
    length = min(map(len, drawn))
    targets = [value for run in siblings if (value := samples_to_target(run)) is not None]
    mine, other = samples_to_target(log), samples_to_target(repeated)
    level = LEVEL / (length + 1)
    for index in range(length):
        samples, accuracy = wanted[index].samples, wanted[index].accuracy
        low, high = _interval([run[index].accuracy for run in drawn], level, ACCURACY)
        # A run that reached the target sooner has no more evaluations: samples to the target tells of it.
        found = got[index].accuracy if index < len(got) else None
        if found is None and other is not None and has_spread:
            continue
        agrees = found is not None and low <= found <= high
        shown = "none" if found is None else f"{found:.4f}"
        rows.append(Row(f"accuracy after {samples:,.0f}", f"{accuracy:.4f}", shown, f"{low:.4f}–{high:.4f}", agrees))
    if mine is not None and other is not None:
        logarithms = [math.log(value) for value in (targets if has_spread else [mine])]
        low, high = map(math.exp, _interval(logarithms, level, SAMPLES))
        allowed = f"{low:,.0f}–{high:,.0f}"
        rows.append(Row("samples to target", f"{mine:,.0f}", f"{other:,.0f}", allowed, low <= other <= high))
    return rows


def remarks(log: Log, repeated: Log, same_seed: bool) -> list[str]:
    """Sentences about what is told and not judged: equality, order of the data, losses, precision, speed."""
    told = []
    if same_seed:
        pairs = list(zip(evaluations_of(log), evaluations_of(repeated), strict=False))
        equal = sum(a.accuracy == b.accuracy for a, b in pairs)
        told.append(f"{equal} of {len(pairs)} accuracies are equal to the last digit.")
        if any(a.samples != b.samples for a, b in pairs):
            told.append("Evaluations came after other numbers of samples: the code deals them out in another order.")
        told.append(_losses(log, repeated))
    for key in ("precision", "ops"):
        if log.value(key) != repeated.value(key):
            told.append(f"The {key} of this machine are not the log's (mlbert submission diff shows them).")
    speeds = samples_per_second(log), samples_per_second(repeated)
    if None not in speeds:
        told.append(f"Speed, not judged: {speeds[0]:,.4g} samples/s in the log, {speeds[1]:,.4g} here.")
    return told


def _interval(values: Sequence[float], level: float, least: float) -> tuple[float, float]:
    """Where the next value lies, but for ``level`` of them; at least ``least`` to either side of the mean."""
    mean, width = statistics.fmean(values), 0.0
    if len(values) >= FEWEST_RUNS:
        from scipy.stats import t

        deviation = statistics.stdev(values) * math.sqrt(1 + 1 / len(values))
        width = float(t.ppf(1 - level / 2, len(values) - 1)) * deviation
    return mean - max(width, least), mean + max(width, least)


def _losses(log: Log, repeated: Log) -> str:
    """Where the loss curves part."""
    a, b = (_loss_of_steps(run_file(run.path, "metrics.jsonl")) for run in (log, repeated))
    if not a or not b:
        return "No metrics.jsonl lies beside the log: losses are not compared."
    both = sorted(a.keys() & b.keys())
    for step in both:
        if not math.isclose(a[step], b[step], rel_tol=LOSS):
            return f"Losses differ by more than {LOSS:g} from step {step} on ({a[step]:.5f}, {b[step]:.5f})."
    return f"Losses of all {len(both)} logged steps agree to {LOSS:g}."


def _loss_of_steps(metrics: Path | None) -> dict[int, float]:
    if metrics is None:
        return {}
    points, _ = read_points(metrics)
    return {point["step"]: point["loss"] for point in points if point["kind"] == "step"}
