"""Check the form of logs and the order of their events.

This code writes each log in one fixed order, so any other order is an error. The ranks of other
programs may write concurrently, leave out eval_start, eval_stop or the end of a block, or log other
numbers there (tinygrad's eval_stop has no training samples). So their logs must only not contradict
themselves, and time stamps may be a second apart.

The form: which program wrote the logs, readable lines, one division, and plain numbers.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from mlaudit.findings import Complaint, Complaints, Outcome
from mlaudit.keys import CLOSED_KEYS, is_numeric
from mlaudit.logs import Event, Log, is_number
from mlaudit.result_set import (
    LOG_FORMAT,
    OWN_FORM,
    SAMPLE_COUNTS,
    LoggedEvaluation,
    ResultSet,
    evaluations_of,
)

_ONCE = ("init_stop", "run_start", "run_stop")
_MANY = ("eval_start", "eval_stop", "eval_accuracy")
_STARTS_AND_STOPS = {"epoch_start": "epoch_stop", "block_start": "block_stop"}
# What this code logs, by phase; `checks.provenance` checks the place of the other keys.
_PHASES = (
    ("cache_clear",),
    ("init_start",),
    ("init_stop",),
    ("run_start",),
    ("epoch_start",),
    ("block_start",),
    _MANY,
    ("block_stop",),
    ("epoch_stop",),
    ("train_samples", "eval_samples"),
    ("run_stop",),
)
_PHASE_OF = {key: number for number, keys in enumerate(_PHASES) for key in keys}
_BLOCKS = ("block_start", "block_stop")
_ENDS = (("eval_accuracy",), ("epoch_stop", "block_stop", "train_samples"))
_LATER = "checkpoints with time stamps were evaluated after training, which the rules allow"
_SETTLE_LATER = "the time of the checkpoint that reached the target is that of run_stop"
_SKEW_MS = 1000
_MIN_PAIRS = 4  # evaluations needed to know what is usual
_RANKS_APART_MS = 10_000  # between the same line of several ranks
_ORDER = "rules: run_start and run_stop enclose training and its evaluations, once each"
_NUMBERS = (
    "seed",
    "train_samples",
    "eval_samples",
    "eval_accuracy",
    "global_batch_size",
    "gradient_accumulation_steps",
)
_MISREAD_TEXTS = ("eval_accuracy", "eval_error", "global_batch_size")
_MISREAD = "rcp_checker reads any line with this text as the line of that key"
_ONE_DIVISION = "rules: a result is of one division, closed or open"


def check_order(results: ResultSet) -> Complaints:
    """Each log is one run: its events occur once and in order, with starts and stops in pairs."""
    usual = _usually_after_stop(results.logs)
    for log in results.logs:
        yield from _once(log)
        yield from _enclosed(log)
        yield from _after_stop(log, usual)
        yield from _own_order(log) if log.is_ours else _contradictions(log)
    silent = [
        log for log in results.logs if log.first("eval_accuracy") and not log.first("eval_start")
    ]
    if 2 * len(silent) < len(results.logs):
        for log in [log for log in silent if not log.is_ours]:
            yield log.warning("has no eval_start, as the other logs have", _ORDER)


def _once(log: Log) -> Complaints:
    for key in _ONCE:
        events = log.all(key)
        for again in events[1:2]:
            text = f"{key} comes again, first in line {events[0].line}"
            is_rank = not log.is_ours and abs(again.time_ms - events[0].time_ms) < _RANKS_APART_MS
            yield log.error_if(not is_rank, text, "" if is_rank else _ORDER, again)


def _enclosed(log: Log) -> Complaints:
    """Check that initialization ends before the run and that evaluations are within it."""
    skew = 0 if log.is_ours else _SKEW_MS
    init_stop = log.first("init_stop")
    start = log.first("run_start")
    if init_stop is not None and start is not None and init_stop.time_ms > start.time_ms + skew:
        yield log.error(
            f"init_stop is later than run_start in line {start.line}", _ORDER, init_stop
        )
    for keys in (tuple(_STARTS_AND_STOPS), ("eval_accuracy",)):
        events = [event for key in keys for event in log.all(key)]
        for event in [
            event for event in events if start is not None and event.time_ms < start.time_ms - skew
        ][:1]:
            yield log.error(f"{event.key} is earlier than run_start", _ORDER, event)
    for event in [
        event
        for event in log.all("data_file")
        if start is not None and event.time_ms < start.time_ms
    ][:1]:
        yield log.warning("data_file is opened before run_start", event=event)


def _late(log: Log, keys: Sequence[str], skew_ms: float) -> list[Event]:
    """Return the events that are stamped later than run_stop."""
    stop = log.first("run_stop")
    if stop is None:
        return []
    events = [event for key in keys for event in log.all(key)]
    return [event for event in events if event.time_ms > stop.time_ms + skew_ms]


def _usually_after_stop(logs: Sequence[Log]) -> set[tuple[str, ...]]:
    """Return the groups of keys that half of the logs have after run_stop."""
    return {
        keys for keys in _ENDS if 2 * sum(bool(_late(log, keys, 0)) for log in logs) >= len(logs)
    }


def _after_stop(log: Log, usual: set[tuple[str, ...]]) -> Complaints:
    """Find evaluations and ends of training after the clock.

    The rules allow to evaluate time-stamped checkpoints later: the clock stops at the time of the
    one that reaches the target. Then every run of the program has its last evaluation after it.
    """
    for keys in _ENDS:
        for event in _late(log, keys, 0 if log.is_ours else _SKEW_MS)[:1]:
            text = f"{event.key} is later than run_stop"
            if log.is_ours or keys not in usual:
                yield log.error(text, _ORDER, event)
                continue
            found = log.warning(f"{text}, as in most logs", _ORDER, event)
            yield found._replace(honest=_LATER, settle=_SETTLE_LATER)


def _own_order(log: Log) -> Complaints:
    """Check this code's fixed order. An aborted run may lack the final events."""
    counts = Counter(event.key for event in log.events)
    phase = 0
    before = None
    for event in log.events:
        its_phase = _PHASE_OF.get(
            event.key, _PHASE_OF["run_stop"] - 1 if phase == _PHASE_OF["run_stop"] else phase
        )
        if before is not None and its_phase < phase:
            yield log.error(f"{event.key} comes after {before.key}", _ORDER, event)
        else:
            phase = its_phase
            before = event
    yield from _own_evaluations(log)
    if log.status == "success":
        for start, stop in _STARTS_AND_STOPS.items():
            if counts[start] != counts[stop]:
                here, gone = (start, stop) if counts[start] > counts[stop] else (stop, start)
                yield log.error(f"line {log.all(here)[-1].line}: {here} without {gone}", OWN_FORM)
    yield from _own_counts(log)


def _own_evaluations(log: Log) -> Complaints:
    """Check that eval_start, eval_stop and eval_accuracy alternate, with one sample count each."""
    expected = 0
    samples: float | None = None
    for event in (event for event in log.events if event.key in _MANY):
        if event.key != _MANY[expected]:
            yield log.error(f"{event.key} where {_MANY[expected]} should come", OWN_FORM, event)
            return
        count = event.samples
        if expected > 0 and count != samples:
            yield log.error(
                f"{event.key} at {count} samples, its eval_start {samples}", SAMPLE_COUNTS, event
            )
        samples = count if expected == 0 else samples
        expected = (expected + 1) % len(_MANY)
    if expected and log.status == "success":
        line = log.all(_MANY[expected - 1])[-1].line
        yield log.error(
            f"line {line}: the last {_MANY[expected - 1]} has no {_MANY[expected]}", OWN_FORM
        )


def _own_counts(log: Log) -> Complaints:
    """Check that an epoch begins at 0 samples, unless the run was resumed,
    and ends at train_samples.
    """
    start = log.first("epoch_start")
    stop = log.first("epoch_stop")
    trained = log.first("train_samples")
    if start is not None and start.samples != 0 and not log.is_continued:
        text = f"epoch_start has epoch_num {(start.metadata or {}).get('epoch_num')!r}, not 0"
        yield log.error(text, SAMPLE_COUNTS, start)
    if stop is not None and trained is not None and stop.samples != trained.value:
        text = f"epoch_stop has epoch_num {(stop.metadata or {}).get('epoch_num')!r}"
        yield log.error(f"{text}, train_samples is {trained.value!r}", SAMPLE_COUNTS, stop)
    begun = log.first("block_start")
    ended = log.first("block_stop")
    blocks = [
        (event.metadata or {}).get("first_epoch_num")
        for event in (begun, ended)
        if event is not None
    ]
    if ended is not None and len(set(map(repr, blocks))) > 1:
        yield log.error(
            f"block_stop of block {blocks[1]!r}, started was {blocks[0]!r}", OWN_FORM, ended
        )


def _contradictions(log: Log) -> Complaints:
    """Report eval_start and eval_stop whose samples differ from eval_accuracy's, if most agree."""
    evaluations = evaluations_of(log)
    repeated = [one for one in evaluations if one.again]
    if repeated and 2 * len(repeated) < len(evaluations):  # otherwise every rank logs it
        again = repeated[0].again[0]
        yield log.warning(f"eval_accuracy comes again, first in {repeated[0].where}", _ORDER, again)
    missing = [key for key in _MANY[:2] if not log.first(key)]
    if evaluations and missing:
        text = f"eval_accuracy without {' and '.join(missing)} in the whole log; "
        text += "the rules ask for eval_start and eval_stop"
        yield log.complaint(Outcome.NOTE, text, event=evaluations[0].event)
    for key in _MANY[:2]:
        yield from _again(log, key)
        pairs = [(one, one.start if key == "eval_start" else one.stop) for one in evaluations]
        agreeing = sum(event is not None and event.samples == one.samples for one, event in pairs)
        if 2 * agreeing > len(evaluations):
            yield from _disagreeing(log, key, pairs)
        others = [
            event for one, event in pairs if event and event.samples not in (None, one.samples)
        ]
        if others and not agreeing:
            yield log.warning(
                f"every {key} has other samples than its eval_accuracy", SAMPLE_COUNTS, others[0]
            )
        odd = [
            event
            for event in log.all(key)
            if is_number(event.value) and event.value != event.samples
        ]
        for event in odd[:1]:
            yield log.warning(
                f"{key} is {event.value}, its epoch_num {event.samples}", SAMPLE_COUNTS, event
            )
    for before, after in itertools.pairwise(
        [event for event in log.events if event.key in _BLOCKS]
    ):
        if (
            before.key == after.key == "block_start"
            and after.time_ms - before.time_ms > _RANKS_APART_MS
        ):
            yield log.warning(
                f"block_start within the block that starts in line {before.line}", _ORDER, after
            )


def _again(log: Log, key: str) -> Iterator[Complaint]:
    """Find the one evaluation that has a key twice, if every other has it once."""
    found: list[list[Event]] = [[]]
    for event in log.events:
        if event.key == key:
            found[-1].append(event)
        elif event.key == "eval_accuracy":
            found.append([])
    groups = found[:-1]
    if len(groups) >= _MIN_PAIRS and sorted(map(len, groups)) == [*[1] * (len(groups) - 1), 2]:
        first, again = next(events for events in groups if len(events) > 1)
        yield log.error(
            f"{key} comes again before eval_accuracy, first in line {first.line}", _ORDER, again
        )


def _disagreeing(
    log: Log, key: str, pairs: list[tuple[LoggedEvaluation, Event | None]]
) -> Iterator[Complaint]:
    is_odd = len(pairs) >= _MIN_PAIRS and sum(event is None for _, event in pairs) == 1
    for one, event in pairs:
        if event is None:
            yield log.error_if(
                is_odd, f"eval_accuracy without {key}", _ORDER if is_odd else "", one.event
            )
        elif event.samples not in (None, one.samples):
            text = f"{key} at {event.samples} samples, its eval_accuracy at {one.samples}"
            yield log.error(text, SAMPLE_COUNTS, event)


def check_lines(results: ResultSet) -> Complaints:
    """Every line is JSON with metadata, and no line is misread by the official convergence
    checker.
    """
    for log in results.logs:
        for text in log.broken:
            yield log.error(text, LOG_FORMAT)
        if not log.events:
            yield log.error("has no line of an MLPerf log", LOG_FORMAT)
    for log in results.logs:
        for event in log.events:
            if event.metadata is None:
                yield log.error(f"{event.key} has no metadata", LOG_FORMAT, event)
            for text in _MISREAD_TEXTS:
                if text in event.text and event.key != text:
                    # Of other benchmarks it is not known how often honest logs have it.
                    yield log.error_if(
                        results.is_bert, f"{event.key} contains the text {text}", _MISREAD, event
                    )


def check_division(results: ResultSet) -> Complaints:
    """Logs, system description and command line name the same division."""
    wanted = results.wanted_division
    if wanted not in ("open", "closed"):
        yield Complaint(
            Outcome.ERROR, f"division {wanted!r} is neither open nor closed", _ONE_DIVISION
        )
    if results.system is not None and results.system.get("division") != wanted:
        yield Complaint(
            Outcome.ERROR,
            f"the system description says {results.system.get('division')!r}",
            _ONE_DIVISION,
        )
    for log in results.logs:
        event = log.first("submission_division")
        if event is None or event.value != wanted:
            yield log.error(f"says {event and event.value!r}, not {wanted!r}", _ONE_DIVISION, event)


def check_numbers(results: ResultSet) -> Complaints:
    """Numeric values are plain, finite numbers, and sample counts are integers."""
    for log in results.logs:
        for event in log.events:
            if (event.key in _NUMBERS or is_numeric(event.key)) and not is_number(event.value):
                text = f"{event.key} {event.value!r} is not a plain number"
                # No tool calculates with a seed, so one that is written as text does no harm.
                is_seed_as_text = event.key == "seed" and _is_text_of_number(event.value)
                is_needed = event.key in _NUMBERS and not is_seed_as_text
                is_asked = log.is_ours or is_needed or _is_no_number(event)
                yield log.error_if(is_asked, text, LOG_FORMAT if is_asked else "", event)
        for event in log.all("eval_accuracy"):
            samples = (event.metadata or {}).get("epoch_num")
            is_epoch = is_number(samples) and not results.round.counts_samples
            if not is_epoch and (not is_number(samples) or samples != int(samples)):
                text = f"eval_accuracy has epoch_num {samples!r}, not a count of samples"
                yield log.error(text, SAMPLE_COUNTS, event)


def _is_no_number(event: Event) -> bool:
    """Return True if a value is not a number in any form,
    even as a string if closed requires one.
    """
    return isinstance(event.value, float) or (
        event.key in CLOSED_KEYS and not _is_text_of_number(event.value)
    )


def _is_text_of_number(value: object) -> bool:
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False
