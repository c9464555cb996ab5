"""What the official tools know of every benchmark: how many runs make a result, the quality that
ends a run, and the command that checks a log.

All of it is read from mlperf-logging, so it holds for benchmarks that this program does not know.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from mlperf_logging.benchmark_meta import (
    get_allowed_benchmarks,
    get_result_file_counts,
)

from mlaudit.logs import Log, is_number
from mlaudit.rules import BENCHMARK, NUM_RESULT_FILES

_USAGE = "training"
_RULES = "compliance_checker"
_RULESET = re.compile(r"training_(\d+)\.(\d+)\.(\d+)")
# package_checker accepts one run of a result that does not comply, and four of this benchmark.
_MANY_RUNS = "unet3d"
_DROPPED_OF_MANY = 4
_KEY = re.compile(r"^- KEY:\s*\n\s+NAME:\s*(?:aggregated_)?eval_accuracy\b", re.M)
_TARGET = re.compile(r"ATLEAST_ONE_CHECK:.*?(<=|>=)\s*(\d+(?:\.\d+)?)")


class Ruleset(NamedTuple):
    """A version of the rules, as the official tools number them."""

    major: int
    minor: int
    patch: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


@dataclass(frozen=True)
class Target:
    """The quality that ends a run."""

    value: float
    is_upper_limit: bool  # True if lower is better, as for a loss


@cache
def rulesets_of(benchmark: str) -> tuple[Ruleset, ...]:
    """Return the rulesets with which the official tools check a benchmark, the oldest first."""
    found = []
    for folder in resources.files("mlperf_logging").joinpath(_RULES).iterdir():
        match = _RULESET.fullmatch(folder.name)
        if match is None:
            continue
        ruleset = Ruleset(*map(int, match.groups()))
        try:
            known = get_allowed_benchmarks(_USAGE, str(ruleset))
        except ValueError:  # a ruleset that the tools know only in part
            continue
        if benchmark in known and folder.joinpath(f"closed_{benchmark}.yaml").is_file():
            found.append(ruleset)
    return tuple(sorted(found))


def num_runs(benchmark: str) -> int:
    """Return how many runs make a result; BERT's number for an unknown benchmark."""
    return int(get_result_file_counts(_USAGE).get(benchmark, NUM_RESULT_FILES))


def num_dropped(benchmark: str) -> int:
    """Return how many of these runs may miss the target."""
    return _DROPPED_OF_MANY if benchmark == _MANY_RUNS else 1


def official_command(benchmark: str, log: Path | str) -> str:
    """Return the command that checks one log of a benchmark by the newest rules that know it."""
    known = rulesets_of(benchmark)
    ruleset = str(known[-1]) if known else "RULESET"
    command = f"python -m mlperf_logging.{_RULES} --usage {_USAGE} --ruleset {ruleset}"
    return f"{command} {log}"


def target_of(log: Log) -> Target | None:
    """Return the quality that ends a run of the log's benchmark, or None if it is not known.

    Of several rulesets the newest counts; a benchmark whose target changed has another name since,
    except for ssd, whose target was lower before v2.0.
    """
    return _official_target(log.benchmark)


@cache
def _official_target(benchmark: str) -> Target | None:
    known = rulesets_of(benchmark)
    if not known or benchmark == BENCHMARK:
        return None
    folder = resources.files("mlperf_logging").joinpath(_RULES, f"training_{known[-1]}")
    text = folder.joinpath(f"closed_{benchmark}.yaml").read_text(encoding="utf-8")
    key = _KEY.search(text)
    if key is None:
        return None
    record = text[key.start() :].partition("\n- ")[0]
    match = _TARGET.search(record)
    if match is None or not is_number(float(match[2])):
        return None
    return Target(float(match[2]), match[1] == "<=")
