"""Read MLPerf logs: lines with ``:::MLLOG`` and a JSON object; other lines are skipped."""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from mlaudit.findings import Complaint, LogLine, Outcome
from mlaudit.rules import BENCHMARK
from mlbert.host.errors import UserError
from mlbert.host.files import reading
from mlbert.host.json_files import parse_json

_TOKEN = ":::MLLOG "
_MAX_BYTES = 50 * 2**20  # file size limit of the repository checker
_MAX_CHARACTERS = 50_000
_MAX_LINES = 20_000  # MLPerf lines; published logs have up to 507
_OURS = ("configuration", "recipe")
# This code in a checkout or export, relative or below any folder of a container; or installed.
# Others have packages of these names elsewhere: Google's published one is .../prod/tf2_bert/.
_OUR_FILE = re.compile(
    r"(^|/)(benchmarks/bert/implementations/(pytorch/mlbert|tensorflow2/tf2_bert)"
    r"|(site|dist)-packages/(mlbert|tf2_bert))/.+\.py"
)
_CALLBACK = "/mlbert/mlperf/callback.py"  # used by other people's training programs
# In a line's metadata: how far the training is. Logs of BERT have the first.
PROGRESS = ("epoch_num", "samples_count", "step_num")
_MAX_SHOWN = 300  # characters of a line with a complaint
_LARGEST = int(sys.float_info.max)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True for a finite number that fits a float. Booleans are not numbers."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= _LARGEST
    return isinstance(value, float) and math.isfinite(value)


@dataclass(frozen=True)
class Event:
    """One line of a log."""

    line: int  # number in the file, from 1
    text: str  # the JSON
    time_ms: float  # since the epoch
    key: str
    value: Any
    metadata: dict[str, Any] | None  # None if missing, which crashes the official checkers

    @property
    def is_of_this_code(self) -> bool:
        """Return True if only this code logs such a key,
        or if a call in this code wrote the line.
        """
        if self.key in _OURS:
            return True
        name = self.call_site[0] if self.call_site else ""
        return _OUR_FILE.search(name) is not None and not name.endswith(_CALLBACK)

    @property
    def call_site(self) -> tuple[str, int] | None:
        """Return the file and line of the call that wrote it, or None if they are not logged."""
        name = (self.metadata or {}).get("file")
        number = (self.metadata or {}).get("lineno")
        return (name, number) if isinstance(name, str) and isinstance(number, int) else None

    @property
    def samples(self) -> float | None:
        """Return the samples trained so far according to this line,
        or None if that is not a number.

        Of other benchmarks than BERT, some count epochs or steps there. Only with a quality do the
        other keys count training: with eval_stop they may count the samples of the evaluation.
        """
        metadata = self.metadata or {}
        keys = PROGRESS if self.key == "eval_accuracy" else PROGRESS[:1]
        counts = (metadata.get(key) for key in keys)
        samples = next((count for count in counts if count is not None), None)
        return samples if is_number(samples) else None


@dataclass(frozen=True)
class Log:
    """One log file."""

    path: Path
    events: Sequence[Event]  # in file order
    broken: Sequence[str] = ()  # sentences about lines that cannot be read

    @cached_property
    def is_ours(self) -> bool:
        """Return True if this code wrote the log: it has recipe or configuration,
        or a line logged by this code.
        """
        return any(event.is_of_this_code for event in self.events)

    @cached_property
    def _by_key(self) -> dict[str, list[Event]]:
        found: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            found[event.key].append(event)
        return dict(found)

    def all(self, key: str) -> list[Event]:
        """Return the events with this key, in order."""
        return list(self._by_key.get(key, ()))

    def first(self, key: str) -> Event | None:
        """Return the first event with this key, or None."""
        return next(iter(self._by_key.get(key, ())), None)

    def value(self, key: str) -> Any:
        """Return the value of the first event with this key, or None."""
        event = self.first(key)
        return None if event is None else event.value

    def setting(self, name: str) -> Any:
        """Return a value of this code's resolved `configuration`,
        or None if the log does not have it.
        """
        configuration = self.value("configuration")
        entry = configuration.get(name) if isinstance(configuration, dict) else None
        return entry.get("value") if isinstance(entry, dict) else None

    @property
    def benchmark(self) -> str:
        """Return the benchmark that the log names, BERT if it names none."""
        name = self.value("submission_benchmark")
        return name if isinstance(name, str) else BENCHMARK

    @property
    def is_continued(self) -> bool:
        """Return True if the log covers only the later part of a run."""
        return self.first("resumed_from_step") is not None

    @property
    def status(self) -> str | None:
        """Return the status in run_stop, or None."""
        event = self.first("run_stop")
        return None if event is None else (event.metadata or {}).get("status")

    def where(self, event: Event | None = None) -> str:
        """Return the start of a complaint: the file, and the line of an event if given."""
        return f"{self.path.name}: " + (f"line {event.line}: " if event else "")

    def complaint(
        self, outcome: Outcome, text: str, rule: str = "", event: Event | None = None
    ) -> Complaint:
        """Return a complaint about this log, at the line of the event if one is given."""
        if event is None:
            return Complaint(outcome, self.where() + text, rule)
        shown = LogLine(self.path.name, event.line, event.text[:_MAX_SHOWN])
        return Complaint(outcome, self.where(event) + text, rule, (shown,))

    def error(self, text: str, rule: str, event: Event | None = None) -> Complaint:
        """Return an error in this log."""
        return self.complaint(Outcome.ERROR, text, rule, event)

    def warning(self, text: str, rule: str = "", event: Event | None = None) -> Complaint:
        """Return a warning about this log."""
        return self.complaint(Outcome.WARN, text, rule, event)

    def error_if(
        self, is_error: bool, text: str, rule: str, event: Event | None = None
    ) -> Complaint:
        """Return an error or, if ``is_error`` is False, a warning."""
        return self.complaint(Outcome.ERROR if is_error else Outcome.WARN, text, rule, event)


def unfit(path: Path) -> str | None:
    """Return why a log is too large to read in reasonable time, or None if it is not.

    The official tools as published need time quadratic in the text after the token of a line: a
    second for 50,000 characters, four for 100,000. Raises OSError.
    """
    num_lines = 0
    if (problem := too_large(path)) is not None:
        return problem
    with path.open(encoding="latin-1") as lines:
        for number, line in enumerate(lines, start=1):
            _, token, text = line.partition(_TOKEN.strip())
            if token and len(text) > _MAX_CHARACTERS:
                return f"has {len(text)} characters in line {number}, more than {_MAX_CHARACTERS}"
            num_lines += bool(token)
            if num_lines > _MAX_LINES:
                return f"has more than {_MAX_LINES} MLPerf lines"
    return None


def too_large(path: Path) -> str | None:
    """Return the problem if a file is larger than the repository checker allows, else None.

    Raises OSError.
    """
    return f"is larger than {_MAX_BYTES // 2**20} MB" if path.stat().st_size > _MAX_BYTES else None


def read_log(path: Path) -> Log:
    """Read one log. Raises UserError if the file cannot be read."""
    with reading(path, "Name an MLPerf log"):
        if path.exists() and not path.is_file():
            raise UserError("file.wrong-kind", path, "is not a file", "Name an MLPerf log")
        if (reason := unfit(path)) is not None:
            raise UserError(
                "file.too-large",
                path,
                reason,
                "No tool reads such a log in reasonable time; leave it out",
            )
        with path.open(encoding="latin-1") as file:
            lines = [(number, line) for number, line in enumerate(file, start=1) if _TOKEN in line]
    events: list[Event] = []
    broken: list[str] = []
    for number, line in lines:
        try:
            events.append(_event(number, line.rstrip("\n").rpartition(_TOKEN)[2]))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            broken.append(f"line {number}: {type(error).__name__} {error}")
    return Log(path, events, broken)


def _event(number: int, text: str) -> Event:
    fields = parse_json(text, finite=False)
    time_ms = float(fields["time_ms"])
    if not math.isfinite(time_ms):
        raise ValueError(f"time_ms is {time_ms}")
    metadata = fields.get("metadata") if isinstance(fields.get("metadata"), dict) else None
    return Event(number, text, time_ms, str(fields["key"]), fields["value"], metadata)
