"""Trees of earlier rounds, made of a tree that our logger wrote: what those rounds logged instead.

Seen in published results: v0.7 and v1.1 have epochs in epoch_num, rounds up to v2.1 call LAMB's
epsilon opt_epsilon, v1.1 to v2.1 name each tensor, v4.0 has words of logs in descriptions.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from logger_logs import write_tree
from mlaudit.ruleset_edits import _tensors

TOKEN = ":::MLLOG "
Event = dict[str, Any]
Change = Callable[[list[Event]], list[Event]]


def tree_of(folder: Path, version: str, day: str, division: str = "closed") -> Path:
    """Write a tree of a round, whose runs began on a day, such as 2022-10-07."""
    tree = write_tree(folder, division)
    begin = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp() * 1000
    logs = sorted((tree / "results/machine/bert").glob("result_*.txt"))
    first = read(logs[0])[0]["time_ms"]
    for log in logs:
        events = read(log)
        for event in events:
            event["time_ms"] += int(begin) - first
            if event["key"] == "submission_status":
                event["value"] = "onprem"
        for change in changes(version):
            events = change(events)
        write(log, events)
    path = tree / "systems/machine.json"
    status = "onprem" if version <= "4.0" else "Available on-premise"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": status}, indent=2))
    return tree


def read(log: Path) -> list[Event]:
    lines = log.read_text().splitlines()
    return [json.loads(line.removeprefix(TOKEN)) for line in lines]


def write(log: Path, events: list[Event]) -> None:
    log.write_text("".join(f"{TOKEN}{json.dumps(event)}\n" for event in events))


def without(*keys: str) -> Change:
    return lambda events: [event for event in events if event["key"] not in keys]


def name_tensors(events: list[Event]) -> list[Event]:
    """Log each tensor of the model, as the ruleset of v2.1 wants it."""
    seed = next(event for event in events if event["key"] == "seed")
    lines = [
        {**seed, "key": "weights_initialization", "value": None, "metadata": {"tensor": tensor}}
        for tensor in _tensors("2.1.0")
    ]
    place = events.index(seed)
    return [*events[:place], *lines, *events[place:]]


def name_other_tensors(events: list[Event]) -> list[Event]:
    named = name_tensors(events)
    first = next(event for event in named if event["key"] == "weights_initialization")
    return [event for event in named if event is not first]


def count_epochs(events: list[Event]) -> list[Event]:
    """Log the number of the epoch, 1, in place of samples."""
    for event in events:
        if "epoch_num" in event["metadata"]:
            event["metadata"]["epoch_num"] = 1
    return events


def count_shares(events: list[Event]) -> list[Event]:
    """Log the share of an epoch in place of samples."""
    for event in events:
        if "epoch_num" in event["metadata"]:
            event["metadata"]["epoch_num"] /= 156_725_653
    return events


def train_longer(events: list[Event]) -> list[Event]:
    """Train on a tenth more samples, as the reference needed more in the first rounds."""
    for event in events:
        if event["key"] == "train_samples":
            event["value"] = round(1.1 * event["value"])
    return events


def evaluate_late(events: list[Event]) -> list[Event]:
    """Evaluate once, at the first target, with the number of the evaluation: Google's v0.7."""
    last = [event for event in events if event["key"] == "eval_accuracy"][-1]
    last["value"] = 0.7125
    since = events.index(last) - 2
    kept = [
        event
        for place, event in enumerate(events)
        if not event["key"].startswith("eval_s") or place >= since
    ]
    kept = [event for event in kept if event["key"] != "eval_accuracy" or event is last]
    for event in kept:
        if "epoch_num" in event["metadata"]:
            event["metadata"]["epoch_num"] = 6
    return kept


def changes(version: str) -> list[Change]:
    """Return what a round logged in place of what ours logs."""
    known: dict[str, list[Change]] = {
        "0.7": [without("opt_lamb_epsilon", "seed"), evaluate_late],
        "1.0": [without("opt_lamb_epsilon"), train_longer, count_shares],
        "1.1": [without("opt_lamb_epsilon"), name_other_tensors, train_longer, count_epochs],
        "2.1": [without("opt_lamb_epsilon"), name_tensors],
        "3.1": [without("seed")],
        "4.0": [],
        "4.1": [],
        "5.0": [],
    }
    return known[version]
