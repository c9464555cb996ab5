"""Committed and simulated result sets that tests edit,
and the findings of our own checks on them.
"""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from audit import Report
from log_edits import Run
from mlaudit.findings import Outcome, finding_of
from mlaudit.logs import Log, read_log
from mlaudit.own_checks import CHECKS, complaints_of
from mlaudit.result_set import ResultSet, evaluations_of
from mlbert.mlperf.rules import eval_interval

_TOKEN = ":::MLLOG "
_CHECKS = (
    "lines",
    "status",
    "order of events",
    "time stamps",
    "clock",
    "runs apart",
    "speed",
    "evaluation time",
    "same settings",
    "plain numbers",
    "seeds",
    "series",
    "copies",
    "evaluations",
    "accuracies",
    "single lines",
    "rules",
    "values",
)
# Ten logs of this code, relative to the root of the repository.
OWN_LOGS = "tests/assets/own_tree/results/cpu_demo/bert"


@cache
def _committed(folder: Path) -> list[list[str]]:
    return [path.read_text().splitlines() for path in sorted(folder.glob("result_*.txt"))]


def committed(folder: Path) -> list[Run]:
    """Return the runs of a committed result, for editing."""
    return [
        [json.loads(line.removeprefix(_TOKEN)) for line in lines] for lines in _committed(folder)
    ]


def simulated(seed: int, batch: int = 768, speed: float = 0.1, slow: bool = False) -> list[Run]:
    """Return ten valid packed runs of another program in the closed division, one after the other.

    Speeds vary by 10 % between runs and between intervals. Evaluations come at the first step that
    reaches the grid; sizes of steps vary by 5 %. With ``slow``, one interval takes three times as
    long.
    """
    chance = random.Random(seed)
    runs: list[Run] = []
    now = 1_700_000_000_000 + chance.randrange(10**9)

    def log(key: str, value: object = None, after: int = 1, **metadata: object) -> None:
        nonlocal now
        now += after
        about = {"file": "/code/train.py", "lineno": len(key), **metadata}
        runs[-1].append({"time_ms": now, "key": key, "value": value, "metadata": about})

    for _ in range(10):
        runs.append([])
        about = {
            "submission_benchmark": "bert",
            "submission_org": "Some",
            "submission_division": "closed",
        }
        about |= {
            "seed": chance.randrange(2**31),
            "global_batch_size": batch,
            "opt_name": "lamb",
            "init_start": None,
        }
        for key, value in about.items():
            log(key, value)
        log("init_stop", after=chance.randrange(5000, 50_000))
        log("run_start")
        log("epoch_start", epoch_num=0)
        pace = speed * chance.uniform(0.9, 1.1)
        slow_one = chance.randrange(5) if slow else -1
        samples = 0
        accuracy = 0.35
        index = 0
        while accuracy < 0.72:
            index += 1
            before = samples
            while samples < index * eval_interval(batch):
                samples += round(batch * chance.uniform(0.95, 1.05))
            took = (
                (samples - before)
                / pace
                * chance.uniform(0.9, 1.1)
                * (3 if index == slow_one + 1 else 1)
            )
            accuracy += (0.7215 - accuracy) * chance.uniform(0.2, 0.4)
            accuracy = max(accuracy, 0.7201) if index == 16 else accuracy
            log("eval_start", after=round(took), epoch_num=samples)
            log("eval_stop", after=round(1000 * chance.uniform(0.8, 1.2)), epoch_num=samples)
            log("eval_accuracy", accuracy, epoch_num=samples)
        log("epoch_stop", epoch_num=samples)
        log("train_samples", samples)
        log("eval_samples", 10_000)
        log("run_stop", status="success")
        now += 60_000
    return runs


def write(runs: list[Run], folder: Path) -> list[Log]:
    """Write runs as result_0.txt, ...; return their logs."""
    logs = []
    for index, run in enumerate(runs):
        path = folder / f"result_{index}.txt"
        path.write_text("".join(f"{_TOKEN}{json.dumps(line)}\n" for line in run))
        logs.append(read_log(path))
    return logs


def report(runs: list[Run], folder: Path, **about: Any) -> Report:
    """Run the checks of settings, times and evaluations;
    return {check: (outcome, message)} unless it passes.
    """
    results = ResultSet(write(runs, folder), **about)
    findings = [
        finding_of(name, "here", complaints_of(CHECKS[name], results), "") for name in _CHECKS
    ]
    return {one.check: (one.outcome, one.words) for one in findings if one.outcome != Outcome.PASS}


def accuracies(log: Log) -> list[tuple[float, float]]:
    """Return (samples, accuracy) of each evaluation."""
    return [(found.samples, found.accuracy) for found in evaluations_of(log)]
