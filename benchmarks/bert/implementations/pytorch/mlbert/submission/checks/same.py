"""What has to be the same in all runs of one result, and what must not be: the seeds."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from mlbert.submission.findings import Complaint, Complaints, Outcome
from mlbert.submission.keys import is_hyperparameter
from mlbert.submission.logs import Event, Log
from mlbert.submission.result_set import ONE_SETTING, OWN_FORM, ResultSet, error, is_ours

_WHOSE = ("submission_org", "submission_platform")
_SAME_IN_ALL = (
    *("submission_benchmark", "eval_samples", *_WHOSE),
    *("recipe", "config_file_sha256", "model_shape_sha256", "train_data", "eval_data", "commit"),
)
_SAME_IN_ALL = (
    *("submission_benchmark", "eval_samples", *_WHOSE),
    *("recipe", "config_file_sha256", "model_shape_sha256", "train_data", "eval_data", "commit"),
)
_SEED_RULE = "rules: seeds are random and logged; package_checker wants them distinct in closed"


def check_same_settings(results: ResultSet) -> Complaints:
    """Hyper-parameters, code and data, and what is submitted by whom, are the same in all logs."""
    first, *others = results.logs
    logged = dict.fromkeys(event.key for log in results.logs for event in log.events)
    for key in (*filter(is_hyperparameter, logged), *_SAME_IN_ALL):
        for log in others:
            if log.value(key) != first.value(key):
                text = f"{log.path.name}: {key} is {log.value(key)!r}, in {first.path.name} {first.value(key)!r}"
                is_name = key in _WHOSE and not is_ours(log)  # the system description says whose it is
                yield Complaint(Outcome.WARN if is_name else Outcome.ERROR, text, ONE_SETTING)


def check_seeds(results: ResultSet) -> Complaints:
    """Each log names one seed, and no two the same."""
    names_of: dict[Any, list[str]] = defaultdict(list)
    for log in results.logs:
        seeds = log.all("seed")
        if len(seeds) != 1 and is_ours(log):
            yield error(log, f"logs {len(seeds)} seeds, not one", OWN_FORM)
        elif not seeds:
            outcome = Outcome.ERROR if results.wanted_division == "closed" else Outcome.WARN
            yield Complaint(outcome, f"{log.path.name}: logs no seed", _SEED_RULE)
        for event in seeds if not is_ours(log) else seeds[:1]:
            names_of[_seed_of(log, event)].append(log.path.name)
    for (seed, *_), names in names_of.items():
        if len(names) > 1:
            is_asked = results.wanted_division == "closed" or any(is_ours(log) for log in results.logs)
            text = f"seed {seed} is in {', '.join(names)}"
            yield Complaint(Outcome.ERROR if is_asked else Outcome.WARN, text, _SEED_RULE)


def _seed_of(log: Log, event: Event) -> tuple[Any, ...]:
    """What may occur once: ours is one number a run; another program's processes may each draw one at its own line."""
    return (str(event.value),) if is_ours(log) else (str(event.value), event.call_site)
