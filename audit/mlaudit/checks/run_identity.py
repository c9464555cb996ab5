"""Check that a log matches the code that wrote it and the system it is filed under."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlaudit.call_sites import Sources
from mlaudit.findings import Complaint, Complaints, Outcome
from mlaudit.logs import Event, Log
from mlaudit.result_set import OWN_FORM, ResultSet
from mlaudit.rounds import earlier_status
from mlaudit.rules import REFERENCE_MODEL
from mlbert.host.json_files import parse_json
from mlbert.host.provenance import recipe_file
from mlbert.host.system_description import STATUSES

_CODE = "rules: the code of a result is submitted with it"
_REFERENCE = "rules, BERT closed: the reference's model"
_FILED = "rules: results/<system> and systems/<system>.json are of the system that ran"
_FULL_COMMIT = re.compile(r"[0-9a-f]{40}")
_ANYWHERE = ("run_stop",)  # logged wherever a run can end
_NOT_THERE = "is not in the tree"
# Clock difference allowed between the committing and the training machine.
_CLOCKS_APART_MS = 600_000
_FEWEST_LOGS = 3  # needed to outvote one
_SHORTEST_WORD = 3


def check_call_sites(results: ResultSet) -> Complaints:
    """Every file:lineno in this code's logs is in the tree and is the call that logged the key."""
    assert results.tree is not None
    logs = results.own_logs
    for log in logs:
        yield from _calls(log, Sources(results.tree, log))
    yield from _odd_calls(logs)


def check_code(results: ResultSet) -> Complaints:
    """This code's logs come from an unmodified commit of the tree, with its config,
    model shape and recipe.
    """
    for log in results.own_logs:
        modified = log.first("tree_modified")
        in_tree = results.tree is not None
        if modified and modified.value is not False:
            text = f"tree_modified is {modified.value!r}, so no commit contains the code"
            yield log.error_if(in_tree, text, _CODE, modified)
        if results.tree is None:
            continue
        sources = Sources(results.tree, log)
        commit = log.first("commit")
        if commit and sources.lacks_commit and _FULL_COMMIT.fullmatch(str(commit.value)):
            yield log.error(f"commit {commit.value} is not in the tree's history", _CODE, commit)
        start = log.first("run_start")
        made = sources.committed_ms
        if start is not None and made is not None and start.time_ms < made - _CLOCKS_APART_MS:
            hours = (made - start.time_ms) / 3_600_000
            yield log.error(
                f"run_start is {hours:.4g} hours before commit {log.value('commit')}", _CODE, start
            )
        yield from _files(log, sources)


def check_whose(results: ResultSet) -> Complaints:
    """The logs are filed under their platform, and their status is that of the system
    description.
    """
    assert results.system is not None
    described = str(results.system.get("status", ""))
    if results.round.has_earlier_statuses:
        described = earlier_status(described) or described
    for log in results.logs:
        platform = log.first("submission_platform")
        status = log.first("submission_status")
        folder = log.path.parent.parent.name
        if (
            log.is_ours
            and platform
            and platform.value != folder
            and results.system_file is not None
        ):
            yield log.error(
                f"submission_platform is {platform.value!r}, filed under {folder!r}",
                _FILED,
                platform,
            )
        if platform and not log.is_ours and not _is_of(str(platform.value), folder, results.system):
            text = f"submission_platform is {platform.value!r}, filed under {folder!r}, "
            text += f"the description's system_name is {results.system.get('system_name')!r}"
            yield log.warning(text, _FILED, platform)
        if status is None:
            continue
        wanted = STATUSES.get(str(status.value))
        if wanted is None:
            text = f"submission_status {status.value!r} is not one of {', '.join(STATUSES)}"
            yield log.error_if(log.is_ours, text, _FILED, status)
        elif described and _plain(described) != _plain(wanted):
            text = (
                f"submission_status is {status.value!r}, the system description says {described!r}"
            )
            yield log.error_if(log.is_ours, text, _FILED, status)


def _is_of(platform: str, folder: str, system: Mapping[str, Any]) -> bool:
    """Return False if a platform names a model, such as 2xNVIDIA GB200,
    unknown to its folder and description.
    """
    parts = re.split(r"[^a-z0-9]+|(?<=\d)x(?=[a-z0-9])", platform.casefold())
    words = [word for part in parts if len(word := part.lstrip("0123456789")) >= _SHORTEST_WORD]
    names = (folder, system.get("system_name"), system.get("accelerator_model_name"))
    known = re.sub(r"[^a-z0-9]", "", " ".join(map(str, names)).casefold())
    names_model = any(re.search(r"\d", word) for word in words)
    return not names_model or any(word in known for word in words)


def _plain(text: str) -> str:
    """Return a status without the spelling differences between rounds."""
    return re.sub(r"[^a-z]", "", text.casefold()).replace("availablein", "available")


def _calls(log: Log, sources: Sources) -> Iterable[Complaint]:
    if sources.gap:
        yield log.warning(f"{sources.gap}, so its lines are looked up in the tree", OWN_FORM)
    for name in dict.fromkeys(event.call_site[0] for event in log.events if event.call_site):
        if sources.is_altered(name):
            yield log.error(f"{name} is not the file of source.json", _CODE)
    wrong = [(problem, event) for event in log.events if (problem := _wrong_call(event, sources))]
    if (
        sources.gap
    ):  # the tree is not the code that ran, so report one problem, preferably a missing file
        wrong.sort(key=lambda pair: not pair[0].endswith(_NOT_THERE))
        more = f", and {len(wrong) - 1} more lines are other calls there" if len(wrong) > 1 else ""
        yield from (log.warning(problem + more, OWN_FORM, event) for problem, event in wrong[:1])
    else:
        yield from (log.error(problem, OWN_FORM, event) for problem, event in wrong)
    for event in log.events:
        if event.call_site is None:
            yield log.error(f"{event.key} names no file and line", OWN_FORM, event)


def _wrong_call(event: Event, sources: Sources) -> str:
    """Return what is wrong with the call site that a line names, or an empty string."""
    if event.call_site is None:
        return ""
    name, number = event.call_site
    if sources.line(name, number) is None:
        return f"{event.key}: {name}:{number} {_NOT_THERE}"
    if sources.call_of(name, number, event.key) is None:
        return f"{name}:{number} does not log {event.key}"
    return ""


def _odd_calls(logs: Sequence[Log]) -> Iterable[Complaint]:
    """Find keys logged at different places in logs of one commit. This needs no git history."""
    places: dict[tuple[str, str], Counter[tuple[str, int]]] = {}
    for log in logs:
        for event in {event.key: event for event in log.events if event.call_site}.values():
            assert event.call_site is not None
            places.setdefault((str(log.value("commit")), event.key), Counter())[
                event.call_site
            ] += 1
    for log in logs:
        for event in log.events:
            counts = places.get((str(log.value("commit")), event.key), Counter())
            if event.call_site is None or event.key in _ANYWHERE or not counts:
                continue
            ((usual, votes),) = counts.most_common(1)
            if (
                event.call_site != usual
                and votes >= _FEWEST_LOGS
                and 2 * votes > sum(counts.values())
            ):
                here = _place(event.call_site)
                text = f"{event.key} is logged at {here}, in other logs at {_place(usual)}"
                yield log.error(text, OWN_FORM, event)


def _place(site: tuple[str, int]) -> str:
    return f"{site[0]}:{site[1]}"


def _files(log: Log, sources: Sources) -> Iterable[Complaint]:
    """Check that config, its parents, model shape and recipe are those of the commit."""
    outcome = Outcome.WARN if sources.gap else Outcome.ERROR
    for event, stated, name, digest in _named_files(log):
        text = sources.text(name)
        if text is None and name.startswith("/"):
            yield log.warning(f"{name} is outside the tree", _CODE, event)
        elif text is None:
            yield log.complaint(outcome, f"{event.key} {name} is not in the tree", _CODE, event)
        elif hashlib.sha256(text.encode()).hexdigest() != digest:
            yield log.complaint(
                outcome, f"{name} is another file: {stated.key} differs", _CODE, stated
            )
        elif event.key == "model_shape" and log.value("submission_division") == "closed":
            shape = parse_json(text)
            for key, wanted in REFERENCE_MODEL.items():
                if key in shape and shape[key] != wanted:
                    yield log.error(
                        f"{name}: {key} is {shape[key]}, closed requires {wanted}",
                        _REFERENCE,
                        event,
                    )
    recipe = log.first("recipe")
    if recipe is not None and sources.text(recipe_file(str(recipe.value))) is None:
        text = f"recipe {recipe.value!r}: {recipe_file(str(recipe.value))} is not in the tree"
        yield log.complaint(outcome, text, _CODE, recipe)


def _named_files(log: Log) -> Iterable[tuple[Event, Event, str, object]]:
    """Yield (event that names a file, event with its digest, name, digest)."""
    for key in ("config_file", "model_shape"):
        event = log.first(key)
        stated = log.first(f"{key}_sha256")
        if event and stated and isinstance(event.value, str) and event.value != "none":
            yield event, stated, event.value, stated.value
    parents = log.first("config_parents")
    if parents is not None and isinstance(parents.value, dict):
        for name, digest in parents.value.items():
            yield parents, parents, name, digest
