"""Result sets of honest runs as other systems could log them, which checks must not accuse.

Each kind is one reason why independent runs look alike. All runs of a set are drawn independently
of each other; what they share (speeds, patterns, grids, constants of a diverged model) is what
honest runs share.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlaudit.logs import Event, Log
from mlaudit.result_set import ResultSet

_START_MS = 1_650_000_000_000
_TARGET = 0.72
_PREDICTIONS = 434_000  # of an evaluation of published logs
_BATCHES = (256, 448, 768, 1536, 3072, 4608, 8192)
_RESOLUTIONS_MS = (1, 1, 1, 1, 10, 100, 1000)

KINDS: dict[str, "Draw"] = {}


@dataclass
class Drawn:
    """One run as numbers."""

    accuracies: np.ndarray  # [E]
    samples: np.ndarray  # [E]
    intervals: np.ndarray  # [E] ms
    seed: int


Draw = Callable[[np.random.Generator], list[Drawn]]


def _kind(draw: Draw) -> Draw:
    """Add a kind of set under its function's name."""
    KINDS[draw.__name__.strip("_").replace("_", " ")] = draw
    return draw


def _curves(
    chance: np.random.Generator, runs: int, evaluations: int, spread: float, noise: float
) -> np.ndarray:
    """Return accuracies [runs, evaluations] that rise from 0.35 to the target, before rounding."""
    shape = 1 - np.exp(-np.arange(1, evaluations + 1) * 5 / evaluations)
    level = 0.35 + (_TARGET - 0.35) * shape
    own = chance.normal(0, spread, (runs, 1)) * (1 - shape) + chance.normal(0, 3e-4, (runs, 1))
    return level + own + chance.normal(0, noise, (runs, evaluations))


def _rounded(chance: np.random.Generator, values: np.ndarray) -> np.ndarray:
    """Return accuracies as logged: k of n predictions, as float32, or with 5 to 7 digits."""
    form = chance.integers(4)
    shares = np.round(values * _PREDICTIONS) / _PREDICTIONS
    if form == 0:
        return shares.astype(np.float32).astype(float)
    if form == 1:
        return np.round(values, int(chance.integers(5, 8)))
    if form == 2:
        return np.round(values * 18_304) / 18_304
    return shares


def _packed(chance: np.random.Generator, runs: int, evaluations: int, batch: int) -> np.ndarray:
    """Return sample counts at the first step after a grid, whose steps vary with packing."""
    grid = 150_000 * np.arange(1, evaluations + 1)
    return grid + chance.integers(0, batch, (runs, evaluations))


def _times(chance: np.random.Generator, runs: int, evaluations: int) -> np.ndarray:
    """Return usual intervals in ms: noise of 0.05 to 3 %."""
    usual = chance.choice([800, 5_000, 12_000, 60_000, 900_000])
    pattern = usual * (1 + 0.05 * chance.random(evaluations))
    speeds = 1 + chance.normal(0, 0.01, (runs, 1))
    noise = 10 ** chance.uniform(-3.3, -1.5)
    return np.round(pattern * speeds * (1 + chance.normal(0, noise, (runs, evaluations))))


@_kind
def _usual(chance: np.random.Generator, evaluations: int | None = None) -> list[Drawn]:
    runs = int(chance.choice([2, 3, 5, 10, 10, 10, 10]))
    number = evaluations or int(chance.choice([4, 8, 12, 16, 20, 30, 50]))
    spread = 10 ** chance.uniform(-3, -2)
    noise = 10 ** chance.uniform(-3.7, -2.7)
    accuracies = _rounded(chance, _curves(chance, runs, number, spread, noise))
    samples = _packed(chance, runs, number, int(chance.choice(_BATCHES)))
    times = _times(chance, runs, number)
    resolution = int(chance.choice(_RESOLUTIONS_MS))
    stamps = np.cumsum(times, axis=1) // resolution * resolution
    times = np.diff(stamps, axis=1, prepend=0)
    seeds = chance.permutation(10_000)[:runs]
    found = []
    for index in range(runs):
        length = max(3, number - int(chance.integers(0, 3)))
        run = Drawn(
            accuracies=accuracies[index, :length],
            samples=samples[index, :length],
            intervals=times[index, :length],
            seed=int(seeds[index]),
        )
        found.append(run)
    return found


@_kind
def multiples(chance: np.random.Generator) -> list[Drawn]:
    """Sample counts are whole multiples of the batch, with asynchronous evaluation a step late."""
    runs = _usual(chance)
    batch = int(chance.choice(_BATCHES))
    every = -(-150_000 // batch) * batch
    may_lag = chance.random() < 0.7
    per_run = chance.random() < 0.5  # a run's evaluator is slow throughout
    for run in runs:
        number = len(run.samples)
        late = chance.integers(0, 3) if per_run else chance.integers(0, 3, number)
        run.samples = every * np.arange(1, number + 1) + batch * late * may_lag
    return runs


@_kind
def even(chance: np.random.Generator) -> list[Drawn]:
    """All runs take the same time to a few milliseconds, with a drift, or some of them do."""
    runs = _usual(chance, int(chance.choice([8, 12, 16, 20, 40])))
    longest = max(len(run.samples) for run in runs)
    usual = chance.choice([350, 1_000, 5_000, 12_000, 30_000])
    pattern = usual * (1 + chance.choice([0, 0.001, 0.1]) * chance.random(longest))
    spread = chance.choice([0, 0, 1e-5, 1e-3, 0.02])
    quiet = chance.choice([0, 0.3, 1, 2, 3, 5, 10, 20])
    noisy = chance.choice([1, 1, 30, 300])
    share = chance.choice([0, 0.2, 0.5])  # of the runs are noisier
    steps = chance.random() < 0.2  # a whole number of even steps
    for run in runs:
        number = len(run.samples)
        noise = quiet * (noisy if chance.random() < share else 1)
        drift = chance.normal(0, chance.choice([0, 0, 2, 20])) * np.arange(number) / number
        own = pattern[:number] * (1 + chance.normal(0, 1) * spread) + drift
        own = own + chance.normal(0, noise, number)
        if steps:
            own = own + 7.25 * chance.integers(0, 2, number)
        run.intervals = np.maximum(1, np.round(own))
        if chance.random() < 0.05:  # one pause
            run.intervals[chance.integers(number)] += 30_000
    return runs


@_kind
def diverged(chance: np.random.Generator) -> list[Drawn]:
    """Some runs diverged: their accuracies are constant, or take few values."""
    runs = _usual(chance)
    values = _rounded(chance, chance.uniform(0.001, 0.5, int(chance.integers(1, 5))))
    jitter = chance.choice([0, 0, 1e-6, 1e-5])
    for run in runs[: int(chance.integers(1, len(runs) + 1))]:
        number = len(run.samples)
        first = int(chance.integers(0, number))
        chosen = chance.choice(values, number - first)
        chosen = np.sort(chosen) if chance.random() < 0.3 else chosen
        run.accuracies[first:] = chosen + chance.normal(0, jitter, number - first)
    return runs


@_kind
def one_seed(chance: np.random.Generator) -> list[Drawn]:
    """Some runs log one seed by mistake; half of those are deterministic and did have one seed."""
    runs = _usual(chance)
    is_repeated = chance.random() < 0.5
    for run in runs[1 : int(chance.integers(2, len(runs) + 1))]:
        run.seed = runs[0].seed
        if is_repeated:
            number = min(len(run.samples), len(runs[0].samples))
            run.accuracies = runs[0].accuracies[:number].copy()
            run.samples = runs[0].samples[:number].copy()
            run.intervals = run.intervals[:number]
    return runs


@_kind
def plateau(chance: np.random.Generator) -> list[Drawn]:
    """Hundreds of evaluations of a model that hardly changes any more."""
    runs = _usual(chance, int(chance.choice([60, 100, 200])))
    wander = 10 ** chance.uniform(-6, -4)
    level = 10 ** chance.uniform(-4, -2.5)
    digits = int(chance.choice([5, 6, 7, 16]))
    for run in runs:
        number = len(run.samples)
        walk = np.cumsum(chance.normal(0, wander, number))
        own = 0.7 + chance.normal(0, level) + walk + chance.normal(0, wander, number)
        run.accuracies = np.round(np.round(own * _PREDICTIONS) / _PREDICTIONS, digits)
    return runs


@_kind
def one_order(chance: np.random.Generator) -> list[Drawn]:
    """All runs, or those of one node, read the data in one order, so their sample counts agree."""
    runs = _usual(chance)
    orders = int(chance.integers(1, 4))
    first = [runs[index].samples for index in range(min(orders, len(runs)))]
    for run in runs:
        chosen = first[int(chance.integers(len(first)))]
        number = min(len(chosen), len(run.samples))
        run.accuracies = run.accuracies[:number]
        run.intervals = run.intervals[:number]
        run.samples = chosen[:number]
    return runs


def draw_set(kind: str, number: int) -> list[Drawn]:
    """Return the runs of this number, always the same."""
    return KINDS[kind](np.random.default_rng([list(KINDS).index(kind), number]))


def honest_set(kind: str, number: int) -> ResultSet:
    """Return the set of this number, always the same."""
    return as_set(draw_set(kind, number))


def as_set(runs: Sequence[Drawn]) -> ResultSet:
    """Return the logs of runs."""
    return ResultSet([_log(index, run) for index, run in enumerate(runs)], division="closed")


def _log(index: int, run: Drawn) -> Log:
    now = _START_MS + 10_000_000_000 // 1000 * 1000 * index
    events: list[Event] = []

    def log(key: str, value: object, time_ms: float, samples: float | None = None) -> None:
        about = {} if samples is None else {"epoch_num": samples}
        text = json.dumps({"time_ms": time_ms, "key": key, "value": value, "metadata": about})
        events.append(Event(len(events) + 1, text, time_ms, key, value, about))

    log("seed", run.seed, now)
    log("run_start", None, now)
    for accuracy, samples, took in _rows(run):
        now += took
        log("eval_accuracy", accuracy, now, samples)
    return Log(Path(f"result_{index}.txt"), events)


def _rows(run: Drawn) -> Sequence[tuple[float, float, float]]:
    accuracies = run.accuracies.tolist()
    samples = run.samples.tolist()
    intervals = run.intervals.tolist()
    return list(zip(accuracies, samples, intervals, strict=True))
