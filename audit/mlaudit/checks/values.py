"""Check that hyper-parameters are plausible, consistent and, in the closed division,
those of the rules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mlaudit.checks.caches import check_caches
from mlaudit.checks.value_range import ValueRange
from mlaudit.findings import Complaint, Complaints, Outcome
from mlaudit.keys import is_hyperparameter
from mlaudit.logs import Event, Log, is_number
from mlaudit.result_set import ResultSet, counts_samples
from mlaudit.round_rules import Round
from mlaudit.rules import BENCHMARK, NUM_EVAL_SAMPLES, REFERENCE_MODEL
from mlaudit.settings import registry_of

_MEANING = "rules: hyper-parameters are logged as they were used"
_CLOSED = (
    "rules, BERT closed: LAMB, the reference's clipping and polynomial decay, sequences of 512"
)
_ONE_LINE = "compliance_checker: a key of a run is logged once"

_ACCUMULATION = "gradient_accumulation_steps"
_BATCH = "global_batch_size"
_RATE = "opt_base_learning_rate"
_STEPS = "opt_learning_rate_training_steps"
_WARMUPS = ("opt_learning_rate_warmup_steps", "num_warmup_steps")
_START = "start_warmup_step"
_COUNTS = (_BATCH, _ACCUMULATION)
_WHOLE = (*_COUNTS, _STEPS, *_WARMUPS, _START)
_LEAST_RATE = 1e-7  # learning rate
_SINGLE = ("train_samples", "eval_samples", "init_stop", "run_start", "run_stop")
_COUNT = re.compile(r"\d{1,9}", re.ASCII)
_MACHINES = ("number_of_nodes", "accelerators_per_node")
# Of logs by other code, which has its own names. A line is the polynomial of power 1.
_OTHER_OPTIMIZERS = ("adam", "adamw", "sgd", "madgrad", "acclip", "muon", "lars", "adagrad")
_CLOSED_OPTIMIZERS = ("lamb",)
_CLOSED_SCHEDULES = ("poly", "linear")
_MAX_PADDING = 1000  # an evaluation may be padded to full batches
_WANTED = {
    **REFERENCE_MODEL,
    "dropout": 0.1,
    "opt_gradient_clip_norm": 1.0,
    "opt_lamb_learning_rate_decay_poly_power": 1.0,
    "max_sequence_length": 512,
    "max_predictions_per_seq": 76,
}
_PRECISION = "precision"
_FORMATS = re.compile(
    r"(torch\.)?(float(64|32|16|8)|bfloat16|fp(64|32|16|8)|tf32|bf16|u?int[48])(?![0-9])"
)
_LARGEST_RATE = 0.1  # of published results, 0.0035 is the largest
_NUM_TENSORS = 398  # of the reference model, if a log names each tensor that it initializes
_SCHEDULE_SLACK = 1.1  # the batch is nominal if data is packed
_MOST_SAMPLES = 1e12  # of a plausible run
_NUMBERED = ("epoch_start", "block_start")
_RANGES = {
    _BATCH: ValueRange(1, 1e6),
    _ACCUMULATION: ValueRange(1, 1e6),
    _RATE: ValueRange(0, 1, has_low=False),
    "opt_end_learning_rate": ValueRange(0, 1),
    "opt_gradient_clip_norm": ValueRange(0, 1e6),
    "opt_lamb_learning_rate_decay_poly_power": ValueRange(0, 100, has_low=False),
    _STEPS: ValueRange(1, 1e9),
    **dict.fromkeys(_WARMUPS, ValueRange(0, _MOST_SAMPLES)),
    _START: ValueRange(-_MOST_SAMPLES, _MOST_SAMPLES),
    "train_samples": ValueRange(1, _MOST_SAMPLES),
    "eval_samples": ValueRange(1, _MOST_SAMPLES),
}
_RANGES_BY_ENDING = {
    re.compile(r"opt_.*(beta_?[12]|momentum)$"): ValueRange(0, 1, has_high=False),
    re.compile(r"opt_.*weight_decay(_rate)?$"): ValueRange(0, 1, has_high=False),
    re.compile(r"opt_.*epsilon$"): ValueRange(0, 1e-3, has_low=False),
}


def check_values(results: ResultSet) -> Complaints:
    """Hyper-parameters are plausible and agree with each other and with the training that took
    place.
    """
    for log in results.logs:
        yield from _possible(log, results.wanted_division == "closed")
        yield from _warmup(log, results.wanted_division == "closed")
        yield from _epsilons(log)
        yield from _schedule(log, results.wanted_division == "closed")
        yield from _accumulation(log, results.wanted_division == "closed")
        yield from _shares(log, results.system)
        if results.round.counts_samples or counts_samples(log):
            yield from _step_numbers(log)


def check_single_lines(results: ResultSet) -> Complaints:
    """Keys that a run has once are logged once."""
    for log in results.logs:
        for key in dict.fromkeys(event.key for event in log.events if _is_single(event.key)):
            first, *others = log.all(key)
            for event in others:
                is_same = event.value == first.value
                text = f"{key} {event.value!r} is {'said again' if is_same else 'another value'}, "
                text += f"line {first.line}: {first.value!r}"
                mild = Outcome.WARN if key in _SINGLE else Outcome.NOTE
                outcome = mild if is_same and not log.is_ours else Outcome.ERROR
                yield log.complaint(outcome, text, _ONE_LINE, event)


def check_rules(results: ResultSet) -> Complaints:
    """The benchmark is BERT, and caches were cleared before the run. In the closed division, the
    method is that of the rules.
    """
    for log in results.logs:
        for event in log.all("submission_benchmark"):
            if event.value != BENCHMARK:
                text = f"submission_benchmark is {event.value!r}, not {BENCHMARK!r}"
                yield log.error(
                    text, "rules: results/<system>/bert contains results of BERT", event
                )
        if results.wanted_division == "closed":
            yield from _closed(log, results.round)
    yield from check_caches(results)


def _possible(log: Log, is_closed: bool) -> Iterable[Complaint]:
    for event in log.events:
        wanted = _range_of(event.key)
        if wanted is None or not is_number(event.value):
            continue  # check_numbers reports values that are not numbers
        if event.key == _STEPS and event.value == 0 and not log.is_ours:
            yield log.warning(f"{event.key} is 0: the schedule is not known", _MEANING, event)
        elif event.value not in wanted:
            yield log.error(
                f"{event.key} is {event.value!r}, possible is {wanted}", _MEANING, event
            )
        elif event.key in _WHOLE and not _is_whole(event, log.is_ours):
            yield log.error(f"{event.key} is {event.value!r}, not a whole number", _MEANING, event)
        elif is_closed and event.key == _RATE and event.value < _LEAST_RATE:
            yield log.error(
                f"{_RATE} is {event.value!r}, below {_LEAST_RATE:g} nothing is learned",
                _MEANING,
                event,
            )


def _is_whole(event: Event, is_own: bool) -> bool:
    """NVIDIA logs whole steps as floats; our own counts are integers."""
    return bool(event.value == int(event.value)) and not (
        is_own and event.key in _COUNTS and type(event.value) is float
    )


def _range_of(key: str) -> ValueRange | None:
    by_ending = (wanted for pattern, wanted in _RANGES_BY_ENDING.items() if pattern.match(key))
    return _RANGES.get(key) or next(by_ending, None)


def _is_single(key: str) -> bool:
    return is_hyperparameter(key) or key.startswith("submission_") or key in _SINGLE


def _number(log: Log, key: str) -> float | None:
    value = log.value(key)
    return value if is_number(value) else None


def _warmup(log: Log, is_closed: bool) -> Iterable[Complaint]:
    """Check that both warm-up keys agree and that the warm-up fits into the schedule.

    NVIDIA logs samples if its warm-up begins 200,000 samples before the start.
    """
    event = log.first(_WARMUPS[0])
    other = log.first(_WARMUPS[1])
    if (
        event
        and other
        and is_number(event.value)
        and is_number(other.value)
        and event.value != other.value
    ):
        yield log.error(
            f"{other.key} is {other.value!r}, but {event.key} {event.value!r}", _MEANING, other
        )
    steps = _number(log, _STEPS)
    batch = _number(log, _BATCH)
    start = log.first(_START)
    first = _number(log, _START) or 0
    if start is not None and first > 0:
        yield log.error(
            f"{_START} is {first!r}, so the rate is negative before it", _MEANING, start
        )
    if steps is None or steps < 1:
        return
    in_samples = first < -steps
    length = steps * (batch or 1) if in_samples else steps
    unit = "samples" if in_samples else "steps"
    for ramp in (event, other):
        if ramp and is_number(ramp.value) and ramp.value > length:
            is_trial = log.is_ours and not is_closed  # cut short by a smaller MAX_STEPS
            text = f"{ramp.key} is {ramp.value!r}, longer than the {length:g} {unit} of training"
            yield log.error_if(not is_trial, text, _MEANING, ramp)
    if start is not None and -first > length:
        yield log.error(
            f"{_START} is {first!r}, further back than the {length:g} {unit} of training",
            _MEANING,
            start,
        )


def _epsilons(log: Log) -> Iterable[Complaint]:
    event = log.first("opt_lamb_epsilon")
    other = log.first("opt_epsilon")
    if event and other and event.value != other.value:
        yield log.error(
            f"opt_epsilon is {other.value!r}, but opt_lamb_epsilon {event.value!r}", _MEANING, other
        )
    end = log.first("opt_end_learning_rate")
    base = _number(log, _RATE)
    if end and base is not None and is_number(end.value) and end.value > base:
        yield log.error(f"{end.key} {end.value!r} is above {_RATE} {base!r}", _MEANING, end)


def _schedule(log: Log, is_closed: bool) -> Iterable[Complaint]:
    """Check that training does not continue past the schedule, where the rate is 0."""
    event = log.first(_STEPS)
    batch = _number(log, _BATCH)
    samples = [event.samples for event in log.all("eval_accuracy") if event.samples is not None]
    if (
        event is None
        or batch is None
        or not is_number(event.value)
        or not samples
        or event.value < 1
        or log.is_ours
    ):
        return  # our own batch is nominal, and its steps are checked against the configuration
    planned = event.value * batch
    if max(samples) > planned * _SCHEDULE_SLACK:
        text = f"{_STEPS} {event.value!r} of {batch:g} end at {planned:g} samples, "
        text += f"but training went on to {max(samples):g}"
        yield log.error_if(is_closed, text, _MEANING, event)


def _step_numbers(log: Log) -> Iterable[Complaint]:
    """Check that the steps logged with an event match its samples.

    Yields the first complaint of each key.

    Where an epoch or block starts, `epoch_num` may be its number.
    """
    batch = _number(log, _BATCH)
    found: dict[str, Complaint] = {}
    for event in log.events:
        steps = (event.metadata or {}).get("step_num")
        samples = event.samples
        if batch is None or samples is None or not is_number(steps):
            continue
        if event.key in found or event.key in _NUMBERED:
            continue
        planned = steps * batch
        if max(planned, samples) > _SCHEDULE_SLACK * min(planned, samples):
            text = f"step_num {steps} of {batch:g} sequences, but epoch_num {samples}"
            found[event.key] = log.warning(text, _MEANING, event)
    yield from found.values()


def _accumulation(log: Log, is_closed: bool) -> Iterable[Complaint]:
    """Check that other programs' batch divides evenly.

    Ours is nominal and checked against the configuration.
    """
    event = log.first(_ACCUMULATION)
    batch = _number(log, _BATCH)
    if (
        event is None
        or batch is None
        or not is_number(event.value)
        or event.value < 1
        or log.is_ours
    ):
        return
    if math.fmod(batch, event.value):
        yield log.error_if(
            is_closed, f"{_BATCH} {batch:g} cannot be {event.value!r} equal parts", _MEANING, event
        )


def _shares(log: Log, system: Mapping[str, Any] | None) -> Iterable[Complaint]:
    """Check that accelerators get equal shares of the batch.

    Ours is checked against the configuration.
    """
    event = log.first(_BATCH)
    counts = [str((system or {}).get(key)) for key in _MACHINES]
    if (
        event is None
        or not is_number(event.value)
        or not all(map(_COUNT.fullmatch, counts))
        or log.is_ours
    ):
        return
    nodes, each = map(int, counts)
    if nodes * each > 0 and math.fmod(event.value, nodes * each):
        text = (
            f"{_BATCH} {event.value!r} has no equal shares for {nodes} nodes x {each} accelerators"
        )
        yield log.warning(text, _MEANING, event)


def _closed(log: Log, judged: Round) -> Iterable[Complaint]:
    tensors = {
        str((event.metadata or {}).get("tensor")) for event in log.all("weights_initialization")
    }
    if judged.names_tensors and tensors and len(tensors) != _NUM_TENSORS:
        yield log.error(
            f"weights_initialization names {len(tensors)} tensors, not {_NUM_TENSORS}", _CLOSED
        )
    for event in log.events:
        problem = _not_closed(event, is_ours=log.is_ours) or _low_target(event, log, judged)
        if problem:
            yield log.error(f"{event.key} is {event.value!r}, {problem}", _CLOSED, event)


def _low_target(event: Event, log: Log, judged: Round) -> str:
    """Return why the closed division does not allow a logged target, or an empty string."""
    required = judged.target(log.value("global_batch_size"))
    is_target = event.key == "target_accuracy" and is_number(event.value)
    return f"closed requires {required}" if is_target and event.value < required else ""


def _is_allowed(value: object, setting: str, words: Iterable[str], *, is_ours: bool) -> bool:
    """Return whether the closed division allows a value: our registry says so of our names,
    and one of the words of the names of other code.
    """
    if is_ours:
        return value in registry_of(setting).allowed_in_closed
    return any(word in str(value).casefold() for word in words)


def _is_of_another_optimizer(key: str, *, is_ours: bool) -> bool:
    """Return whether a key is a number of an optimizer that the closed division does not allow."""
    names = [*_OTHER_OPTIMIZERS]
    if is_ours:
        optimizers = registry_of("optimizer")
        names += [name for name, choice in optimizers.items() if not choice.in_closed]
    return key.startswith(tuple(f"opt_{name}_" for name in names))


def _not_closed(event: Event, *, is_ours: bool) -> str:
    """Return why the closed division does not allow a line, or an empty string."""
    key = event.key
    value = event.value
    if key == "opt_name" and not _is_allowed(
        value, "optimizer", _CLOSED_OPTIMIZERS, is_ours=is_ours
    ):
        return "closed requires LAMB"
    if key.startswith("opt_") and _is_of_another_optimizer(key, is_ours=is_ours):
        return "which LAMB does not have"
    if key == "opt_learning_rate_decay_schedule" and not _is_allowed(
        value, "schedule", _CLOSED_SCHEDULES, is_ours=is_ours
    ):
        return "closed requires polynomial decay"
    if key in _WANTED and value != _WANTED[key]:
        return f"closed requires {_WANTED[key]:g}"
    if key == _PRECISION and not _FORMATS.match(str(value)):
        return "a number format that v5.0 does not approve"
    if key == _RATE and is_number(value) and value > _LARGEST_RATE:
        return f"with LAMB nothing is learned above {_LARGEST_RATE}"
    if key == "starting_weights" and value == "none":
        return "closed starts from the reference's checkpoint"
    if key == "eval_samples" and is_number(value) and value > NUM_EVAL_SAMPLES + _MAX_PADDING:
        return f"closed requires {NUM_EVAL_SAMPLES}"
    return ""
