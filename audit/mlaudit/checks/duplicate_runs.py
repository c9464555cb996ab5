"""Detect logs copied from other logs: runs with different seeds never agree in values that depend on chance.

In the 14 published v5.0 systems and this code's three small ones (170 logs, 765 pairs), two honest runs share at most
one accuracy in a row and two within 2e-5, one growth of accuracy within 2e-6, three intervals between evaluations
within 1 ms, and one sample count if packing varies them. Without packing most pairs share their counts, which proves
nothing. The number of intervals that must agree depends on how much those of most pairs differ: 4 on shared CPUs and
two GPUs, 4 to 10 on 4 to 512 GPUs. In honest runs, that many in a row are never proportional to within 3 ms.

If accuracies of two runs are within 0.005, they are equal to the last digit in 23 of 59,000 pairs in the published sets
and in 3 of 830 in this code's, whose evaluations make fewer predictions. Three equal in a row, anywhere in both runs,
have a chance of 6e-11 and 5e-8 per pair, and of 2e-7 and 1e-5 for the 4,000 and 300 such pairs of a set.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mlaudit.checks.pace import has_plausible_stamps
from mlaudit.findings import Complaint, Complaints, Outcome
from mlaudit.logs import Log
from mlaudit.result_set import ResultSet, evaluations_of, significant_digits

_SAME_ACCURACIES = 3
_NEAR_ACCURACIES = 5
_NEAR = 2e-5
_SAME_GROWTHS = 4
_GROWTH = 2e-6
_SAME_SAMPLES = 4
_ROUNDING_MS = 1.2
_MIN_WINDOW = 4
_MAX_WINDOW = 10**6
_LOG_ODDS = 16  # accept a chance of exp(-16) over all windows of a set
_CHANCE_MS = 0.8  # divided by the noise in ms: the chance of one match
_LONG_MS = 10_000  # longer intervals are never equal by chance
_MAX_EVALUATIONS = 1000  # compared at most: the time is quadratic, and published runs have up to 50
_MIN_DECIMALS = 5  # shorter accuracies agree by chance
_OWN_RUNS = "rules: ten runs, each with a seed of its own"


class _RunIntervals(NamedTuple):
    log: Log
    lines: list[int]  # of the evaluations
    accuracies: list[float]
    samples: list[float]
    intervals: list[float]  # in ms, from run_start; empty if the time stamps cannot be compared


def check_copies(results: ResultSet) -> Complaints:
    """No run is a copy of another, by its accuracies, packed sample counts and time intervals."""
    runs = [_run_of(log) for log in results.logs]
    pairs = list(itertools.combinations(runs, 2))
    shared = [_shared_counts(a, b)[1] for a, b in pairs]
    counts_vary = bool(shared) and statistics.median(shared) < _SAME_SAMPLES / 2
    window = _window([(a.intervals, b.intervals) for a, b in pairs])
    for one, other in pairs:
        for what, (end, length) in _likenesses(one, other, window, counts_vary):
            first = other.lines[end - length]
            last = other.lines[end - 1]
            text = f"line {first}: {length} {what}, up to line {last}, are those of {one.log.path.name}"
            yield other.log.error(f"{text} from line {one.lines[end - length]} on", _OWN_RUNS)
            break
        else:
            yield from _moved(one, other, lambda log: log.path.name)


def check_copies_between(systems: Iterable[Sequence[Log]]) -> Complaints:
    """No run of a system is a copy of another system's: no three accuracies in a row are the same."""
    runs = [[_run_of(log) for log in logs] for logs in systems]
    for ours, theirs in itertools.combinations(runs, 2):
        for one, other in itertools.product(ours, theirs):
            yield from _moved(one, other, _filed)


def _filed(log: Log) -> str:
    """Return a log's name below results/."""
    return "/".join(log.path.parts[-3:])


def _moved(one: _RunIntervals, other: _RunIntervals, name: Callable[[Log], str]) -> Complaints:
    """Find the longest run of equal accuracies, at any offset."""
    shared = {value for value in one.accuracies if significant_digits(value) >= _MIN_DECIMALS}
    shared &= set(other.accuracies)
    if len(shared) < 2:
        return
    best = (0, 0, 0)  # start in one, end in the other, length
    for offset in range(1 - len(other.accuracies), len(one.accuracies)):
        mine = one.accuracies[max(0, offset) :]
        theirs = other.accuracies[max(0, -offset) :]
        end, length = _longest(a == b and a in shared for a, b in zip(mine, theirs, strict=False))
        if length > best[2] and len(set(mine[end - length : end])) > 1:
            best = (max(0, offset) + end - length, max(0, -offset) + end, length)
    begin, end, length = best
    if length >= _SAME_ACCURACIES:
        text = f"{name(other.log)}: line {other.lines[end - length]}: {length} accuracies, "
        text += f"up to line {other.lines[end - 1]}, are those of {name(one.log)} from line {one.lines[begin]} on"
        yield Complaint(Outcome.ERROR, text, _OWN_RUNS)


def _run_of(log: Log) -> _RunIntervals:
    evaluations = evaluations_of(log)[:_MAX_EVALUATIONS]
    start = log.first("run_start")
    times = [one.event.time_ms for one in evaluations]
    intervals = []
    if start is not None and has_plausible_stamps(log):
        intervals = [
            after - before for before, after in itertools.pairwise([start.time_ms, *times])
        ]
    samples = [one.samples for one in evaluations]
    lines = [one.event.line for one in evaluations]
    return _RunIntervals(log, lines, [one.accuracy for one in evaluations], samples, intervals)


def _window(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> int:
    """Return how many equal intervals in a row prove a copy, given how much most pairs differ apart from speed."""
    noise = []
    usual = []
    for one, other in pairs:
        both = list(zip(one, other, strict=False))
        if both and (total := sum(a for a, _ in both)) > 0:
            factor = sum(b for _, b in both) / total
            noise.append(statistics.median(abs(b - factor * a) for a, b in both))
            usual.append(total / len(both))
    if not noise:
        return _MAX_WINDOW
    low = sorted(noise)[len(noise) // 4]  # a few copies do not make the set look noiseless
    if low <= 2 * _CHANCE_MS:
        return _MIN_WINDOW + 2 if statistics.median(usual) > _LONG_MS else _MAX_WINDOW
    return max(_MIN_WINDOW, math.ceil(_LOG_ODDS / math.log(low / _CHANCE_MS)))


def _likenesses(
    one: _RunIntervals, other: _RunIntervals, window: int, counts_vary: bool
) -> Iterable[tuple[str, tuple[int, int]]]:
    """Yield similarities that chance does not explain: a description, and the end and length of the stretch."""
    pairs = list(zip(one.accuracies, other.accuracies, strict=False))
    same = _longest(a == b and len(repr(a)) > _MIN_DECIMALS + 1 for a, b in pairs)
    if same[1] >= min(_SAME_ACCURACIES, max(2, len(pairs))):
        yield "accuracies", same
    near = _longest(abs(a - b) < _NEAR for a, b in pairs)
    if near[1] >= _NEAR_ACCURACIES:
        yield "accuracies, to 5 digits", near
    growths = _longest(
        abs((b - a) - (d - c)) < _GROWTH for (a, c), (b, d) in itertools.pairwise(pairs)
    )
    if growths[1] >= _SAME_GROWTHS:
        yield "accuracies, but for one number added to all", (growths[0] + 1, growths[1] + 1)
    counts = _shared_counts(one, other)
    if counts_vary and counts[1] >= _SAME_SAMPLES:
        yield "sample counts, which vary with packing", counts
    times = list(zip(one.intervals, other.intervals, strict=False))
    equal = _longest(abs(a - b) <= 1 for a, b in times)
    if equal[1] >= window:
        yield "intervals between evaluations, to 1 ms", equal
    for end in range(window, len(times) + 1):
        if _are_proportional(times[end - window : end]):
            yield "intervals between evaluations, times one factor", (end, window)
            return


def _shared_counts(one: _RunIntervals, other: _RunIntervals) -> tuple[int, int]:
    return _longest(a == b for a, b in zip(one.samples, other.samples, strict=False))


def _longest(flags: Iterable[bool]) -> tuple[int, int]:
    """Return the end and the length of the longest run of true flags."""
    best = 0
    end = 0
    length = 0
    for index, flag in enumerate(flags, start=1):
        length = length + 1 if flag else 0
        if length > best:
            best = length
            end = index
    return end, best


def _are_proportional(times: Sequence[tuple[float, float]]) -> bool:
    total = sum(a for a, _ in times)
    if total <= 0 or any(a <= 0 or b <= 0 for a, b in times):
        return False
    factor = sum(b for _, b in times) / total
    return all(abs(b - factor * a) <= _ROUNDING_MS * max(1.0, factor) for a, b in times)
