"""Committed and simulated result sets that tests edit, and the findings of our own checks on them."""

import json
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from mlbert.mlperf.check import CHECKS
from mlbert.mlperf.findings import Outcome, finding_of
from mlbert.mlperf.logs import Log, read_log
from mlbert.mlperf.result_set import ResultSet, evaluations_of
from mlbert.mlperf.rules import eval_interval

_TOKEN = ":::MLLOG "
_CHECKS = (
    *("lines", "status", "order of events", "time stamps", "clock", "runs apart", "speed", "evaluation time"),
    *("same settings", "plain numbers", "seeds", "series", "copies", "evaluations", "accuracies", "single lines"),
)
Line = dict[str, Any]
Run = list[Line]
Edit = Callable[[list[Run]], None]
Report = dict[str, tuple[Outcome, str]]

OWN_LOGS = "tests/assets/own_tree/results/cpu_demo/bert"  # ten logs of this code, relative to the tree


@cache
def _committed(folder: Path) -> list[list[str]]:
    return [path.read_text().splitlines() for path in sorted(folder.glob("result_*.txt"))]


def committed(folder: Path) -> list[Run]:
    """Return the runs of a committed result, for editing."""
    return [[json.loads(line.removeprefix(_TOKEN)) for line in lines] for lines in _committed(folder)]


def simulated(seed: int, batch: int = 768, speed: float = 0.1, slow: bool = False) -> list[Run]:
    """Return ten valid packed runs of another program in the closed division, one after the other.

    Speeds vary by 10 % between runs and between intervals. Evaluations come at the first step that reaches the grid;
    sizes of steps vary by 5 %. With ``slow``, one interval takes three times as long.
    """
    chance = random.Random(seed)
    runs, now = [], 1_700_000_000_000 + chance.randrange(10**9)
    for _ in range(10):
        run = _Writer(now)
        about = {"submission_benchmark": "bert", "submission_org": "Some", "submission_division": "closed"}
        about |= {"seed": chance.randrange(2**31), "global_batch_size": batch, "opt_name": "lamb", "init_start": None}
        for key, value in about.items():
            run.log(key, value)
        run.log("init_stop", after=chance.randrange(5000, 50_000))
        run.log("run_start")
        run.log("epoch_start", epoch_num=0)
        pace, slow_one = speed * chance.uniform(0.9, 1.1), chance.randrange(5) if slow else -1
        samples, accuracy, index = 0, 0.35, 0
        while accuracy < 0.72:
            index += 1
            before = samples
            while samples < index * eval_interval(batch):
                samples += round(batch * chance.uniform(0.95, 1.05))
            took = (samples - before) / pace * chance.uniform(0.9, 1.1) * (3 if index == slow_one + 1 else 1)
            accuracy += (0.7215 - accuracy) * chance.uniform(0.2, 0.4)
            accuracy = max(accuracy, 0.7201) if index == 16 else accuracy
            run.log("eval_start", after=round(took), epoch_num=samples)
            run.log("eval_stop", after=round(1000 * chance.uniform(0.8, 1.2)), epoch_num=samples)
            run.log("eval_accuracy", accuracy, epoch_num=samples)
        run.log("epoch_stop", epoch_num=samples)
        run.log("train_samples", samples)
        run.log("eval_samples", 10_000)
        run.log("run_stop", status="success")
        runs.append(run.lines)
        now = run.now + 60_000
    return runs


class _Writer:
    def __init__(self, now: int) -> None:
        self.now = now
        self.lines: Run = []

    def log(self, key: str, value: object = None, after: int = 1, **metadata: object) -> None:
        self.now += after
        about = {"file": "/code/train.py", "lineno": len(key), **metadata}
        self.lines.append({"time_ms": self.now, "key": key, "value": value, "metadata": about})


def write(runs: list[Run], folder: Path) -> list[Log]:
    """Write runs as result_0.txt, ...; return their logs."""
    logs = []
    for index, run in enumerate(runs):
        path = folder / f"result_{index}.txt"
        path.write_text("".join(f"{_TOKEN}{json.dumps(line)}\n" for line in run))
        logs.append(read_log(path))
    return logs


def report(runs: list[Run], folder: Path, **about: Any) -> Report:
    """Run the checks of settings, times and evaluations; return {check: (outcome, message)} unless it passes."""
    results = ResultSet(write(runs, folder), **about)
    findings = [finding_of(name, "here", list(CHECKS[name](results)), "") for name in _CHECKS]
    return {one.check: (one.outcome, one.words) for one in findings if one.outcome != Outcome.PASS}


Faults = dict[str, tuple[Edit, str]]


def by_name(faults: dict[tuple[str, Outcome], Faults]) -> dict[str, tuple[Edit, Outcome, str, str]]:
    """Flatten faults that are grouped by the check that finds them and its outcome."""
    return {
        f"{check}: {name}": (edit, outcome, check, words)
        for (check, outcome), group in faults.items()
        for name, (edit, words) in group.items()
    }


def expect_fault(fault: tuple[Edit, Outcome, str, str], runs: list[Run], folder: Path) -> None:
    """Assert that a check reports an edit of run 3 with this outcome, its file, a line number and these words."""
    edit, expected, check, words = fault
    edit(runs)
    outcome, message = report(runs, folder)[check]
    assert outcome is expected, message
    assert re.search(r"result_3\.txt: line \d+: .*" + re.escape(words), message), message


def nth(run: Run, key: str, index: int = 0) -> Line:
    """Return the line of a key's occurrence by index."""
    return [line for line in run if line["key"] == key][index]


def put(key: str, value: Any, index: int = 0, which: int = 3) -> Edit:
    """Return an edit that changes a value."""
    return lambda runs: nth(runs[which], key, index).update(value=value)


def mark(key: str, name: str, value: Any, index: int = 0, which: int = 3) -> Edit:
    """Return an edit that changes an entry of the metadata."""
    return lambda runs: nth(runs[which], key, index)["metadata"].update({name: value})


def configure(name: str, value: Any, which: int = 3) -> Edit:
    """Return an edit that changes the value of a setting."""
    return lambda runs: nth(runs[which], "configuration")["value"][name].update(value=value)


def drop(key: str, index: int = 0, which: int = 3) -> Edit:
    return lambda runs: runs[which].remove(nth(runs[which], key, index))


def repeat(key: str, index: int = 0, after: int = 0, which: int = 3) -> Edit:
    """Return an edit that repeats a line ``after`` milliseconds later."""

    def edit(runs: list[Run]) -> None:
        line = nth(runs[which], key, index)
        again = {**line, "metadata": dict(line["metadata"]), "time_ms": line["time_ms"] + after}
        runs[which].insert(runs[which].index(line) + 1, again)

    return edit


def move(key: str, behind: str, index: int = 0, which: int = 3) -> Edit:
    """Return an edit that moves a line behind another, 1 ms later."""

    def edit(runs: list[Run]) -> None:
        line, other = nth(runs[which], key, index), nth(runs[which], behind, -1)
        runs[which].remove(line)
        runs[which].insert(runs[which].index(other) + 1, line | {"time_ms": other["time_ms"] + 1})

    return edit


def shift(key: str, ms: float, index: int = 0, which: int = 3) -> Edit:
    """Return an edit that delays this line and all later ones by ``ms``."""

    def edit(runs: list[Run]) -> None:
        first = next(n for n, line in enumerate(runs[which]) if line is nth(runs[which], key, index))
        for line in runs[which][first:]:
            line["time_ms"] += ms

    return edit


def stamp(make: Callable[[int], Any], key: str = "", index: int = 0, which: int = 3) -> Edit:
    """Return an edit that changes the time of one line or, without a key, of all lines."""

    def edit(runs: list[Run]) -> None:
        for line in [nth(runs[which], key, index)] if key else runs[which]:
            line["time_ms"] = make(line["time_ms"])

    return edit


def each(*edits: Edit) -> Edit:
    def edit(runs: list[Run]) -> None:
        for one in edits:
            one(runs)

    return edit


def accuracies(log: Log) -> list[tuple[float, float]]:
    """Return (samples, accuracy) of each evaluation."""
    return [(found.samples, found.accuracy) for found in evaluations_of(log)]
