"""Check that all runs of one result have the same settings but different seeds.

The most common value counts as the right one, so that complaints name the log that differs.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

from mlaudit.findings import Complaint, Complaints, Outcome
from mlaudit.keys import is_hyperparameter
from mlaudit.logs import Event, Log, is_number
from mlaudit.result_set import ONE_SETTING, OWN_FORM, ResultSet, seconds_to_train
from mlaudit.settings import settings_by_env
from mlbert.host.json_files import parse_json, shown

_WHOSE = ("submission_org", "submission_platform", "submission_status")
_SHAPES = ("d_batch_size", "max_predictions_per_seq", "max_sequence_length")  # other programs' own
_SAME_IN_ALL = ("submission_benchmark", "submission_division", "eval_samples", *_WHOSE, *_SHAPES)
# Keys before run_start that may differ between this code's runs;
# a cluster may assign any of its machines.
_OWN_KEYS = frozenset(
    (
        "cache_clear",
        "init_start",
        "init_stop",
        "resumed_from_step",
        "seed",
        "command",
        "experiment",
        "experiments",
        "hosts",
    )
)
_OF_A_RUN = frozenset({"SEED", "EXPERIMENT", "LOGDIR"})
_MIN_SERIES = 8  # runs, of which one order in 20,000 is sorted
_MIN_OTHERS = 3  # other logs that must agree before one counts as different
_MIN_MOVED = 3  # keys logged at other lines
_MOVED_SHARE = 0.5  # of all keys logged at other lines
_SERIES_RULE = "rules: ten runs in a row are scored, not the best of more"
_SEED_RULE = "rules: seeds are random and logged; package_checker wants them distinct in closed"


def check_program(results: ResultSet) -> Complaints:
    """This code wrote the logs, so they must have its form."""
    others = [log.path.name for log in results.logs if not log.is_ours]
    if len(others) == len(results.logs):
        yield Complaint(
            Outcome.NOTE, "another program wrote the logs, so they are judged by the rules only"
        )
    elif others:
        text = f"{', '.join(others)}: another program wrote it, this code the other logs"
        yield Complaint(Outcome.ERROR, text, ONE_SETTING)


def check_same_settings(results: ResultSet) -> Complaints:
    """Hyper-parameters, code, data, machine, submitter and benchmark are the same in all logs."""
    for key in _shared_keys(results.logs):
        values = [_comparable(key, log.value(key)) for log in results.logs]
        usual = Counter(
            json.dumps(value, sort_keys=True, default=str) for value in values
        ).most_common(1)[0][0]
        first = next(
            n
            for n, value in enumerate(values)
            if json.dumps(value, sort_keys=True, default=str) == usual
        )
        for log, value in zip(results.logs, values, strict=True):
            if value != values[first]:
                for text in _differences(key, value, values[first], results.logs[first].path.name):
                    yield _differs(log, key, text)
    others = [log for log in results.logs if not log.is_ours]
    yield from _other_code(others)
    yield from _other_data(others)


def _other_code(logs: Sequence[Log]) -> Iterator[Complaint]:
    """Find another program's log that logs most keys at other lines than all other logs."""
    sites: list[dict[str, set[tuple[str, int]]]] = []
    for log in logs:
        sites.append(defaultdict(set))
        for event in log.events:
            if event.call_site is not None:
                sites[-1][event.key].add(event.call_site)
    for number, log in enumerate(logs):
        others = [one for other, one in enumerate(sites) if other != number]
        if len(others) < _MIN_OTHERS:
            return
        shared = [
            key
            for key in sites[number]
            if all(key in one and one[key] == others[0][key] for one in others)
        ]
        moved = [key for key in shared if sites[number][key].isdisjoint(others[0][key])]
        if len(moved) >= max(_MIN_MOVED, _MOVED_SHARE * len(shared)):
            event = next(
                event
                for event in log.events
                if event.key == moved[0] and event.call_site is not None
            )
            here, there = (
                ":".join(map(str, site))
                for site in (event.call_site or (), min(others[0][moved[0]]))
            )
            text = f"{event.key} is logged at {here}, in the other logs at {there}"
            text += (
                f", {len(moved)} of {len(shared)} keys elsewhere: another version of the program?"
            )
            yield log.warning(text, ONE_SETTING, event)


def _other_data(logs: Sequence[Log]) -> Iterator[Complaint]:
    """Find another program's log that reads its data from another folder than all other logs."""
    folders_of = [
        {str(PurePath(str(event.value)).parent): event for event in log.all("data_file")}
        for log in logs
    ]
    for number, log in enumerate(logs):
        others = [set(folders) for other, folders in enumerate(folders_of) if other != number]
        if (
            len(others) < _MIN_OTHERS
            or not others[0]
            or any(folders != others[0] for folders in others)
        ):
            continue
        for folder in [folder for folder in folders_of[number] if folder not in others[0]][:1]:
            text = f"data_file is in {shown(folder)}"
            yield log.warning(
                f"{text}, in the other logs in {shown(min(others[0]))}",
                ONE_SETTING,
                folders_of[number][folder],
            )


def _shared_keys(logs: Sequence[Log]) -> list[str]:
    """Return the keys to compare: all that this code logs before run_start,
    otherwise `_SAME_IN_ALL` and settings.
    """
    keys: dict[str, None] = {}
    for log in logs:
        start = log.first("run_start")
        own = log.is_ours
        for event in log.events:
            is_own_key = (
                own and start is not None and event.line < start.line and event.key not in _OWN_KEYS
            )
            if is_own_key or is_hyperparameter(event.key) or event.key in _SAME_IN_ALL:
                keys[event.key] = None
    return list(keys)


def _comparable(key: str, value: Any) -> Any:
    """Return a value without the parts that may differ: origins of settings,
    and folders of paths.
    """
    if key == "starting_weights" and isinstance(value, str):
        return PurePath(value).name
    if key == "ops" and isinstance(value, str):
        return _parsed(value)
    if key != "configuration" or not isinstance(value, dict):
        return value
    values = {}
    for name, entry in value.items():
        setting = settings_by_env().get(name)
        given = entry.get("value") if isinstance(entry, dict) else entry
        if isinstance(given, str) and setting is not None and issubclass(setting.kind, PurePath):
            given = PurePath(given).name
        if name not in _OF_A_RUN:
            values[name] = given
    return values


def _parsed(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return text


def _differences(key: str, value: Any, usual: Any, name: str) -> Iterator[str]:
    """Describe how a value differs from that of the log ``name``,
    entry by entry for dictionaries.
    """
    if isinstance(value, dict) and isinstance(usual, dict):
        for entry in dict.fromkeys((*usual, *value)):
            own = value.get(entry)
            other = usual.get(entry)
            if own != other:
                yield f"{key} {entry} is {shown(own)}, in {name} {shown(other)}"
    else:
        yield f"{key} is {shown(value)}, in {name} {shown(usual)}"


def _differs(log: Log, key: str, text: str) -> Complaint:
    # The system description names the submitter, and the rules do not list the shapes as
    # hyper-parameters.
    is_lenient = key in (*_WHOSE, *_SHAPES) and not log.is_ours
    return log.error_if(not is_lenient, text, ONE_SETTING, log.first(key))


def check_seeds(results: ResultSet) -> Complaints:
    """Each log names one seed, and no two logs name the same."""
    is_closed = results.wanted_division == "closed"
    uses: dict[Any, list[tuple[Log, Event]]] = defaultdict(list)
    for log in results.logs:
        seeds = log.all("seed")
        if len(seeds) != 1 and log.is_ours:
            yield log.error(f"logs {len(seeds)} seeds, not one", OWN_FORM)
        elif any(event.value != seeds[0].value for event in seeds):
            text = f"seed {seeds[1].value!r}, but {seeds[0].value!r} in line {seeds[0].line}"
            yield log.warning(text, _SEED_RULE, seeds[1])
        elif not seeds:
            is_wrong = is_closed and results.round.needs_seeds
            yield log.error_if(is_wrong, "logs no seed", _SEED_RULE)
        counted = seeds[:1] if log.is_ours else seeds
        for event in counted:
            uses[_seed_of(log, event)].append((log, event))
    values = sorted(seed for log in results.logs if is_number(seed := log.value("seed")))
    if (
        len(values) >= _MIN_SERIES
        and len({after - before for before, after in itertools.pairwise(values)}) == 1
    ):
        yield Complaint(
            Outcome.WARN, f"the seeds {values[0]} to {values[-1]} are evenly spaced", _SEED_RULE
        )
    is_asked = is_closed or results.own_logs
    for (seed, *_), found in uses.items():
        yield from _repeated(seed, found, Outcome.ERROR if is_asked else Outcome.WARN)


def check_series(results: ResultSet) -> Complaints:
    """The runs are one series: not chosen or sorted by time,
    and this code's without duplicates or gaps.
    """
    seconds = [seconds_to_train(log) or 0 for log in results.logs]
    if len(seconds) >= _MIN_SERIES and seconds in (sorted(seconds), sorted(seconds, reverse=True)):
        yield Complaint(
            Outcome.WARN, "the logs are sorted by time to train, not by run", _SERIES_RULE
        )
    total = max((n for log in results.logs if is_number(n := log.value("experiments"))), default=0)
    if total > max(len(results.logs), _MIN_SERIES):
        yield Complaint(
            Outcome.WARN,
            f"the series has {total} runs, but {len(results.logs)} are here",
            _SERIES_RULE,
        )
    runs: dict[int, Log] = {}
    for log in results.logs:
        number = log.setting("EXPERIMENT")
        if not isinstance(number, int):
            continue
        if number in runs:
            yield log.error(
                f"EXPERIMENT is {number}, as in {runs[number].path.name}",
                _SERIES_RULE,
                log.first("configuration"),
            )
        runs[number] = log
    numbers = sorted(runs)
    for before, after in itertools.pairwise(numbers):
        if after - before > 1:
            text = f"EXPERIMENT is {after}, the one before is {before}: a run was left out"
            yield runs[after].warning(text, _SERIES_RULE, runs[after].first("configuration"))


def _repeated(seed: str, found: Sequence[tuple[Log, Event]], outcome: Outcome) -> Complaints:
    first, event = found[0]
    for log, again in found[1:]:
        yield log.complaint(
            outcome,
            f"seed {seed} is in {first.path.name}, line {event.line}, too",
            _SEED_RULE,
            again,
        )


def _seed_of(log: Log, event: Event) -> tuple[Any, ...]:
    """Return the seed identity that must be unique: the number and, for other programs,
    the line that logged it.
    """
    return (str(event.value),) if log.is_ours else (str(event.value), event.call_site)
