"""Detect copied logs: runs with different seeds do not agree in values that depend on chance.

Signs are equal accuracies in a row (at any place of both logs, to the last digit; at the same
place also to 5 digits, or with one number added to all), equal sample counts if packing varies
them, and intervals between evaluations that are equal or proportional. For each,
`mlaudit.checks.chance` says how many such stretches are expected in a set of honest runs.

An error needs one sign of which at most `_CERTAIN` are expected (1 in 10,000 honest sets; times:
`_CERTAIN_TIMES`), or two kinds of sign (accuracies, counts, times) of at most `_WEAK` each, whose
product is at most `_TOGETHER`.

What honest runs have is no sign: accuracies that a run has more than once (a diverged run is
constant, or repeats a few values); sample counts that take few values, such as whole multiples of
the batch size; intervals of machines so even that all runs agree. Runs that log one seed may repeat
each other to the last digit, which `check_seeds` reports: there, accuracies and counts are a
warning, and only equal times an error. Sample counts that are equal from the first evaluation to
the last may come from one order of the data: a warning.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mlaudit.checks import chance
from mlaudit.checks.pace import has_plausible_stamps
from mlaudit.findings import Complaint, Complaints, Outcome
from mlaudit.logs import Log, is_number
from mlaudit.result_set import ResultSet, evaluations_of, significant_digits

_CERTAIN = 1e-4  # expected stretches in a set of honest runs
_CERTAIN_TIMES = 1e-5  # likewise, of intervals, whose noise is measured on few values
_FEWEST_STEPS = 5  # or tolerances, in the narrowest range whose differences are counted
_WEAK = 0.03  # likewise, if there is a second sign
_TOGETHER = 1e-6  # product of the expectations of two signs
_CERTAIN_MOMENTS = 10  # equal absolute time stamps of two runs
_SAME_ACCURACIES = 3
_NEAR_ACCURACIES = 5
_NEAR = 2e-5
_ALONE = 1e-4  # accuracies of one run that are nearer are one value, with noise
_SAME_GROWTHS = 4
_GROWTH = 2e-6
_SAME_SAMPLES = 4
_FEW_VALUES = 20  # steps between sample counts of two runs, below which equal ones prove nothing
_MOST = 0.9  # of the pairs differ by less than that
_ROUNDING_MS = 1.2
_MIN_WINDOW = 4
_SHORT_MS = 100  # evaluations that are logged at once are apart by the time of a log line
_EQUAL_MS = 1  # two intervals count as equal
_LONG_MS = 10_000  # intervals that are rarely equal, even on an even machine
_MANY_EQUAL = 6  # of these, worth a warning
_MAX_EVALUATIONS = 1000  # compared at most: the time is quadratic, and published runs have up to 50
_MIN_DIGITS = 5  # shorter accuracies agree by chance
_OWN_RUNS = "rules: ten runs, each with its own seed"
_HONEST_SEED = "the program is deterministic and its seed was not the logged one"
_HONEST_ORDER = "all runs read the data in one order"
_HONEST_TIMES = "a very even machine"
_SETTLE = "the complete output of both jobs, with dates and hosts, or the checkpoints"


@dataclass(frozen=True, eq=False)  # compared by identity
class _Run:
    log: Log
    lines: Sequence[int]  # of the evaluations
    accuracies: Sequence[float]
    samples: Sequence[float]
    intervals: Sequence[float]  # in ms, from run_start; empty if the time stamps cannot be compared

    @cached_property
    def moments(self) -> frozenset[float]:
        """Return the time stamps of all lines, in ms."""
        return frozenset(event.time_ms for event in self.log.events if event.time_ms)

    @cached_property
    def single(self) -> frozenset[float]:
        """Return the accuracies with enough digits that this run has once."""
        counts = Counter(self.accuracies)
        return frozenset(
            value
            for value, count in counts.items()
            if count == 1 and significant_digits(value) >= _MIN_DIGITS
        )

    @cached_property
    def solitary(self) -> frozenset[float]:
        """Return the accuracies that have no other of this run near them."""
        ordered = [-math.inf, *sorted(self.accuracies), math.inf]
        return frozenset(
            here
            for before, here, after in zip(ordered, ordered[1:], ordered[2:], strict=False)
            if min(here - before, after - here) > _ALONE
        )


class _Sign(NamedTuple):
    """A stretch of two runs that agrees."""

    kind: str  # signs of the same kind are not independent
    what: str
    first: int  # evaluation of the first run
    first_other: int  # of the other run
    length: int
    proving: int  # evaluations of the stretch that prove something
    expected: float  # such stretches in a set of honest runs


class _Stretch(NamedTuple):
    """Evaluations in a row that agree."""

    first: int
    length: int
    proving: int  # of them that prove something


_Pair = tuple[_Run, _Run]
_Measure = Callable[[_Pair], "Sequence[float] | np.ndarray"]


class _Set:
    """Runs of which pairs are compared, with what their other pairs have in common."""

    def __init__(self, runs: Sequence[_Run], pairs: Sequence[_Pair]) -> None:
        self._pairs = pairs
        # A diverged run's noise is finer than the steps of accuracies.
        self._step = chance.accuracy_step(value for run in runs for value in run.solitary)
        self._count_step = chance.count_step(value for run in runs for value in run.samples)
        noise = chance.noise_of_intervals([run.intervals for run in runs])
        self._density = {run: chance.density_of(own) for run, own in zip(runs, noise, strict=True)}
        self._totals: dict[tuple[_Measure, int, tuple[float, ...]], np.ndarray] = {}
        apart = sorted(abs(value) for pair in pairs for value in _counts_apart(pair))
        usual = apart[int(_MOST * (len(apart) - 1))] if apart else 0
        are_multiples = any(
            self._count_step % batch == 0 for batch in filter(None, map(_batch, runs))
        )
        self._counts_vary = usual >= _FEW_VALUES * self._count_step and not are_multiples

    def _expected(self, pair: _Pair, measure: _Measure, length: int, tolerance: float) -> float:
        """Return E by the other pairs or, if there are none, by this one."""
        if measure is _counts_apart:
            widths: Sequence[float] = chance.COUNT_WIDTHS
            counts = self._count(pair, measure, length, widths)
            return chance.expected_stretches(counts, length, self._count_step, tolerance, widths)
        narrowest = _FEWEST_STEPS * max(self._step, tolerance)
        widths = [max(width, narrowest) for width in chance.ACCURACY_WIDTHS]
        counts = self._count(pair, measure, length, widths)
        expected = chance.expected_stretches(counts, length, self._step, tolerance, widths)
        # Diverged runs take few values, of which any two share some.
        equal, close = self._count(pair, measure, 1, (tolerance, chance.CLOSE_ACCURACIES))
        return max(expected, chance.expected_repeats(float(equal), float(close), length))

    def _count(
        self, pair: _Pair, measure: _Measure, length: int, widths: Sequence[float]
    ) -> np.ndarray:
        """Count the stretches of the other pairs at each width."""
        known = (measure, length, tuple(widths))
        if known not in self._totals:
            own = [chance.count_stretches(measure(found), length, widths) for found in self._pairs]
            self._totals[known] = np.sum(own, axis=0)
        counts = self._totals[known]
        if len(self._pairs) > 1:
            counts = counts - chance.count_stretches(measure(pair), length, widths)
        return counts

    def signs(self, pair: _Pair) -> list[_Sign]:
        """Return the stretches in which two runs agree, by chance or not."""
        return [*self.equal_accuracies(pair), *self._alike(pair), *self._times(pair)]

    def equal_accuracies(self, pair: _Pair) -> Iterator[_Sign]:
        """Find the stretch with the most equal accuracies that each run has once, at any offset."""
        one, other = pair
        shared = one.single & other.single
        if len(shared) < _SAME_ACCURACIES:
            return
        best = _Stretch(0, 0, 0)
        begins = (0, 0)
        for offset in range(1 - len(other.accuracies), len(one.accuracies)):
            first = max(0, offset)
            second = max(0, -offset)
            mine = one.accuracies[first:]
            theirs = other.accuracies[second:]
            found = _longest((a == b, a in shared) for a, b in zip(mine, theirs, strict=False))
            if found.proving > best.proving:
                best = found
                begins = (first + found.first, second + found.first)
        if best.proving >= _SAME_ACCURACIES:
            expected = self._expected(pair, _all_apart, best.proving, 0)
            yield _Sign(
                kind="accuracies",
                what="accuracies",
                first=begins[0],
                first_other=begins[1],
                length=best.length,
                proving=best.proving,
                expected=expected,
            )

    def _alike(self, pair: _Pair) -> Iterator[_Sign]:
        """Find what agrees at the same place: near or shifted accuracies, and sample counts."""
        one, other = pair
        proves = [
            a in one.solitary and b in other.solitary
            for a, b in zip(one.accuracies, other.accuracies, strict=False)
        ]
        near = [abs(value) < _NEAR for value in _apart(pair)]
        found = _longest(zip(near, proves, strict=True))
        if found.proving >= _NEAR_ACCURACIES:
            expected = self._expected(pair, _apart, found.proving, _NEAR)
            yield _sign("accuracies", "accuracies, to 5 digits", found, expected)
        grown = [abs(value) < _GROWTH for value in _growths_apart(pair)]
        found = _longest(zip(grown, proves[1:], strict=True))
        if found.proving >= _SAME_GROWTHS:
            expected = self._expected(pair, _growths_apart, found.proving, _GROWTH)
            found = found._replace(length=found.length + 1)
            yield _sign(
                "accuracies", "accuracies, but for one number added to all", found, expected
            )
        if not self._counts_vary:
            return
        found = _longest((value == 0, True) for value in _counts_apart(pair))
        if found.proving >= _SAME_SAMPLES:
            expected = self._expected(pair, _counts_apart, found.proving, 0)
            yield _sign("counts", "sample counts, which vary with packing", found, expected)

    def _times(self, pair: _Pair) -> Iterator[_Sign]:
        one, other = pair
        times = list(zip(one.intervals, other.intervals, strict=False))
        if len(times) < _MIN_WINDOW:
            return
        resolution = chance.time_step(itertools.chain.from_iterable(times))
        density = min(self._density[one], self._density[other])
        factor = max(1.0, sum(b for _, b in times) / max(1e-9, sum(a for a, _ in times)))
        probability = min(1.0, density * (2 * _ROUNDING_MS * factor + resolution))
        windows = self._windows
        found = chance.length_needed(_WEAK, probability, windows)
        if found > len(times):
            return
        length = max(_MIN_WINDOW, int(found))
        sign = None
        while length <= len(times):
            begin = _proportional(times, length)
            if begin is None:
                break
            stretch = times[begin : begin + length]
            is_equal = all(abs(a - b) <= _EQUAL_MS for a, b in stretch)
            what = "intervals between evaluations, "
            what += "to 1 ms" if is_equal else "times one factor"
            expected = windows * probability ** (length - 1)
            sign = _sign("times", what, _Stretch(begin, length, length), expected)
            length += 1
        if sign is not None:
            yield sign

    @cached_property
    def _windows(self) -> int:
        """Return the number of stretches of `_MIN_WINDOW` intervals of all pairs."""
        lengths = (min(len(one.intervals), len(other.intervals)) for one, other in self._pairs)
        return sum(max(0, length - _MIN_WINDOW + 1) for length in lengths)


def check_copies(results: ResultSet) -> Complaints:
    """No run is a copy of another, by its accuracies, packed sample counts and time intervals."""
    runs = [_run_of(log) for log in results.logs]
    pairs = list(itertools.combinations(runs, 2))
    known = _Set(runs, pairs)
    even: list[_Pair] = []
    for pair in pairs:
        signs = known.signs(pair)
        verdict = _verdict(signs, _has_one_seed(pair), _is_whole(pair, signs))
        if verdict is not None:
            yield _complaint(pair, verdict, signs, lambda log: log.path.name, is_between=False)
        elif _is_even(pair):
            even.append(pair)
    if even:
        one, other = even[0]
        text = f"all intervals between evaluations are those of {one.log.path.name}, to 1 ms"
        more = f", and so are those of {len(even) - 1} more pairs" if len(even) > 1 else ""
        yield other.log.warning(text + more)._replace(honest=_HONEST_TIMES, settle=_SETTLE)


def check_copies_between(systems: Iterable[Sequence[Log]]) -> Complaints:
    """No run of a system is a copy of another system's, by its accuracies or its moments."""
    groups = [[_run_of(log) for log in logs] for logs in systems]
    pairs = [
        pair
        for ours, theirs in itertools.combinations(groups, 2)
        for pair in itertools.product(ours, theirs)
    ]
    known = _Set([run for group in groups for run in group], pairs)
    for pair in pairs:
        signs = list(known.equal_accuracies(pair))
        verdict = _verdict(signs, is_one_seed=False, is_whole=False)
        shared = 0 if verdict is Outcome.ERROR else _shared_moments(pair)
        if shared:
            one, other = pair
            text = f"{_filed(other.log)}: {shared} time stamps are those of {_filed(one.log)}"
            yield Complaint(Outcome.ERROR, text, _OWN_RUNS, settle=_SETTLE)
        elif verdict is not None:
            yield _complaint(pair, verdict, signs, _filed, is_between=True)


def _shared_moments(pair: _Pair) -> int:
    """Return the number of milliseconds at which both runs log something, 0 if chance can explain
    it: even runs side by side log at few equal moments.
    """
    one, other = pair
    shared = len(one.moments & other.moments)
    fewest = min(len(one.moments), len(other.moments))
    is_certain = shared >= _CERTAIN_MOMENTS and 2 * shared > fewest
    return shared if is_certain else 0


def _verdict(signs: Sequence[_Sign], is_one_seed: bool, is_whole: bool) -> Outcome | None:
    """Judge two runs: an error if nothing honest (chance, one seed, one order) explains it."""
    kinds: dict[str, float] = {}
    for sign in signs:
        kinds[sign.kind] = min(kinds.get(sign.kind, 1.0), sign.expected)
    certain = {kind for kind, expected in kinds.items() if expected <= _limit(kind)}
    weak = sorted(expected for expected in kinds.values() if expected <= _WEAK)
    explained = {"accuracies", "counts"} if is_one_seed else set()
    if is_whole:
        explained.add("counts")
    together = len(weak) > 1 and weak[0] * weak[1] <= _TOGETHER
    if certain - explained:
        return Outcome.ERROR
    if together and not {kind for kind in kinds if kinds[kind] <= _WEAK} <= explained:
        return Outcome.ERROR
    return Outcome.WARN if certain or together else None


def _limit(kind: str) -> float:
    """Return the largest expectation of a kind of sign that proves a copy alone."""
    return _CERTAIN_TIMES if kind == "times" else _CERTAIN


def _complaint(
    pair: _Pair,
    verdict: Outcome,
    signs: Sequence[_Sign],
    name: Callable[[Log], str],
    is_between: bool,
) -> Complaint:
    one, other = pair
    found = [sign for sign in signs if sign.expected <= _WEAK]
    # The first certain sign is the one that is easiest to look up.
    sign = next((sign for sign in found if sign.expected <= _limit(sign.kind)), found[0])
    first = other.lines[sign.first_other]
    last = other.lines[sign.first_other + sign.length - 1]
    text = f"line {first}: {sign.length} {sign.what}, up to line {last}, "
    text += f"are those of {name(one.log)} from line {one.lines[sign.first]} on"
    text += f"; honest sets have {_as_number(sign.expected)} of that"
    further = [more for more in found if more.kind != sign.kind]
    if further:
        text += f", and {further[0].length} {further[0].what}: {_as_number(further[0].expected)}"
    honest = {"accuracies": _HONEST_SEED, "counts": _HONEST_ORDER, "times": _HONEST_TIMES}
    place = f"{name(other.log)}: " if is_between else other.log.where()
    return Complaint(verdict, place + text, _OWN_RUNS, honest=honest[sign.kind], settle=_SETTLE)


def _as_number(expected: float) -> str:
    return f"{expected:.1g}" if expected > 1e-12 else "less than 1e-12"


def _batch(run: _Run) -> int | None:
    """Return the batch size that a log names, or None."""
    value = run.log.value("global_batch_size")
    return int(value) if is_number(value) and value >= 1 else None


def _has_one_seed(pair: _Pair) -> bool:
    seeds = [run.log.value("seed") for run in pair]
    return seeds[0] is not None and seeds[0] == seeds[1]


def _is_whole(pair: _Pair, signs: Iterable[_Sign]) -> bool:
    """Return True if sample counts agree up to the last evaluation of the shorter run."""
    shorter = min(len(run.samples) for run in pair)
    return any(sign.kind == "counts" and sign.length >= shorter for sign in signs)


def _is_even(pair: _Pair) -> bool:
    """Return True if all intervals of two runs are equal and long."""
    times = list(zip(pair[0].intervals, pair[1].intervals, strict=False))
    if len(times) < _MANY_EQUAL or chance.time_step(itertools.chain.from_iterable(times)) > 1:
        return False
    is_long = statistics.median(a for a, _ in times) > _LONG_MS
    return is_long and all(abs(a - b) <= _EQUAL_MS for a, b in times)


def _filed(log: Log) -> str:
    """Return a log's name below results/."""
    return "/".join(log.path.parts[-3:])


def _run_of(log: Log) -> _Run:
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
    return _Run(log, lines, [one.accuracy for one in evaluations], samples, intervals)


def _apart(pair: _Pair) -> list[float]:
    return [a - b for a, b in zip(pair[0].accuracies, pair[1].accuracies, strict=False)]


def _growths_apart(pair: _Pair) -> list[float]:
    return [after - before for before, after in itertools.pairwise(_apart(pair))]


def _all_apart(pair: _Pair) -> np.ndarray:
    return np.subtract.outer(np.asarray(pair[0].accuracies), np.asarray(pair[1].accuracies))


def _counts_apart(pair: _Pair) -> list[float]:
    return [a - b for a, b in zip(pair[0].samples, pair[1].samples, strict=False)]


def _sign(kind: str, what: str, found: _Stretch, expected: float) -> _Sign:
    """Return a sign at the same place of both runs."""
    return _Sign(kind, what, found.first, found.first, found.length, found.proving, expected)


def _longest(flags: Iterable[tuple[bool, bool]]) -> _Stretch:
    """Return the stretch of (agrees, proves) in which all agree and the most prove something."""
    best = _Stretch(0, 0, 0)
    begin = 0
    count = 0
    for index, (agrees, proves) in enumerate(flags):
        if not agrees:
            begin = index + 1
            count = 0
        elif proves:
            count += 1
            if count > best.proving:
                best = _Stretch(begin, index + 1 - begin, count)
    return best


def _proportional(times: Sequence[tuple[float, float]], length: int) -> int | None:
    """Return the start of a stretch of intervals that are equal but for one factor, or None."""
    for begin in range(len(times) - length + 1):
        if _are_proportional(times[begin : begin + length]):
            return begin
    return None


def _are_proportional(times: Sequence[tuple[float, float]]) -> bool:
    total = sum(a for a, _ in times)
    if any(min(pair) < _SHORT_MS for pair in times):
        return False
    factor = sum(b for _, b in times) / total
    return all(abs(b - factor * a) <= _ROUNDING_MS * max(1.0, factor) for a, b in times)
