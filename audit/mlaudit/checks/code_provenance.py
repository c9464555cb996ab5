"""Check that this code's own logs have the keys, order and types of the code that wrote them."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from mlaudit.call_sites import Sources, is_inside, key_of, nodes_of
from mlaudit.findings import Complaint, Complaints
from mlaudit.logs import Event, Log
from mlaudit.result_set import OWN_FORM, ResultSet
from mlbert.host.provenance import TENSORFLOW2
from mlbert.host.repository import PACKAGE, PACKAGE_HOME
from mlbert.host.system_description import DISTRIBUTIONS_OF

_IDENTITY = f"{PACKAGE_HOME}/runs/identity.py"
_OLD_IDENTITY = f"{PACKAGE_HOME}/core/identity.py"  # in logs from before the module moved
_WRITER = "this code's own logs: every key of their writer, once and in its order"
_EVENT_TYPES = "log format: INTERVAL_START, INTERVAL_END or POINT_IN_TIME, as the key says"
# Keys of every log of this code since the first: required
# if the code of the log's commit is not available.
_ALWAYS = (
    "recipe",
    "config_file",
    "config_file_sha256",
    "config_parents",
    "model_shape",
    "model_shape_sha256",
    "train_data",
    "eval_data",
    "commit",
    "tree_modified",
    "image",
    "image_digest",
    "image_commit",
    "python",
    "platform",
    "packages",
    "precision",
    "ops",
    "ranks",
    "configuration",
    "submission_benchmark",
    "submission_org",
    "submission_division",
    "submission_status",
    "submission_platform",
    "global_batch_size",
    "gradient_accumulation_steps",
)
_INTERVALS = frozenset(
    f"{name}_{end}"
    for name in ("init", "run", "epoch", "block", "eval")
    for end in ("start", "stop")
)
_PHASES = (
    ("cache_clear",),
    ("init_start",),
    ("seed", *_ALWAYS),
    ("init_stop",),
    ("run_start",),
    (
        "epoch_start",
        "block_start",
        "eval_start",
        "eval_stop",
        "eval_accuracy",
        "block_stop",
        "epoch_stop",
    ),
    ("train_samples", "eval_samples"),
    ("run_stop",),
)
_PHASE_OF = {key: number for number, keys in enumerate(_PHASES) for key in keys}
_MANY = frozenset(_PHASES[5])

_DIGEST = re.compile(r"(\S+@)?sha256:[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}|tree:sha256:[0-9a-f]{64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SET = r"([a-z0-9-]+:)*[0-9a-f]{64}"
_DATA = re.compile(f"{_SET}(,{_SET})*|synthetic")
_FORMS = {
    "commit": (_COMMIT, "neither a commit of 40 hexadecimal digits nor tree:sha256:..."),
    "image_digest": (re.compile(f"none|{_DIGEST.pattern}"), "not a sha256: digest"),
    "image_commit": (re.compile(r"none|unknown|[0-9a-f]{7,40}(-dirty)?"), "not a commit"),
    "config_file_sha256": (re.compile(f"none|{_SHA256.pattern}"), "not a SHA-256"),
    "model_shape_sha256": (_SHA256, "not a SHA-256"),
    "starting_weights_sha256": (re.compile(f"none|unknown|{_SHA256.pattern}"), "not a SHA-256"),
    "train_data": (_DATA, "neither the identity of a set nor synthetic"),
    "eval_data": (_DATA, "neither the identity of a set nor synthetic"),
    "python": (re.compile(r"\d+\.\d+\.\d+\S*"), "not a version"),
}


def check_event_types(results: ResultSet) -> Complaints:
    """Interval keys start and end intervals, all others are points in time;
    this code's logs have no namespace.
    """
    for log in results.logs:
        ours = log.is_ours
        for event in log.events:
            wanted = _type_of(event.key)
            if f'"event_type": "{wanted}"' in event.text and '"namespace": ""' in event.text:
                continue
            fields = json.loads(event.text)
            is_asked = ours or (event.key in _INTERVALS and "event_type" in fields)
            if fields.get("event_type") != wanted and is_asked:
                text = f"{event.key} is of type {fields.get('event_type')!r}, not {wanted}"
                yield log.error_if(ours, text, _EVENT_TYPES, event)
            if fields.get("namespace") != "" and ours:
                text = f"{event.key} has the namespace {fields.get('namespace')!r}, ours have none"
                yield log.error(text, OWN_FORM, event)


def check_writer(results: ResultSet) -> Complaints:
    """This code's logs have every key that their writer logs,
    in its order and in the right form.
    """
    logs = results.own_logs
    keys_of_commit: dict[str, set[str]] = defaultdict(set)
    for log in logs:
        keys_of_commit[repr(log.value("commit"))].update(event.key for event in log.events)
    for log in logs:
        sources = Sources(results.tree, log) if results.tree is not None else None
        yield from _missing(log, sources, keys_of_commit[repr(log.value("commit"))])
        yield from _disorder(log)
        yield from _forms(log)


def _type_of(key: str) -> str:
    if key not in _INTERVALS:
        return "POINT_IN_TIME"
    return "INTERVAL_START" if key.endswith("_start") else "INTERVAL_END"


def _missing(log: Log, sources: Sources | None, of_same: set[str]) -> Iterable[Complaint]:
    """Find missing keys: those every log of ours has,
    and those logged by a function that wrote other lines.

    Without the code of the log's commit, the keys in other logs of that commit count (``of_same``).
    """
    logged = {event.key for event in log.events}
    lacking = {key: "" for key in _ALWAYS if key not in logged}
    for name in _files(log):
        for function, keys in _writers(_text(name, sources)):
            if not _wrote(function, name, log):
                continue
            is_known = sources is not None and not sources.gap
            sure = set(keys) if is_known else _surely_written(keys, name, log) | of_same
            for key in keys.keys() - logged:
                if key in sure or key in lacking:
                    lacking[key] = f", which {name}:{keys[key]} logs"
    for key, place in lacking.items():
        yield log.error(f"{key} is missing{place}", _WRITER)


def _identity_file(log: Log) -> str:
    """Return the name that the file that logs a run's identity had when the log was written."""
    is_old = any(event.call_site and event.call_site[0] == _OLD_IDENTITY for event in log.events)
    return _OLD_IDENTITY if is_old else _IDENTITY


def _files(log: Log) -> list[str]:
    """Return the files that wrote the log, always including the identity file."""
    names = [event.call_site[0] for event in log.events if event.call_site]
    return list(dict.fromkeys([_identity_file(log), *names]))


def _text(name: str, sources: Sources | None) -> str:
    """Return the file at the log's commit, or this installation's copy if there is no tree
    or no such file in it.
    """
    text = sources.text(name) if sources is not None else None
    own = PACKAGE / name.removeprefix(f"{PACKAGE_HOME}/")
    if (
        text is None
        and is_inside(name)
        and own.is_file()
        and (sources is None or name == _IDENTITY)
    ):
        text = own.read_text(encoding="utf-8")
    return text or ""


@lru_cache(maxsize=256)
def _writers(text: str) -> tuple[tuple[ast.FunctionDef, dict[str, int]], ...]:
    """Return the functions with a parameter `event` (the logger's method),
    and the keys that they log.
    """
    functions = [node for node in nodes_of(text) if isinstance(node, ast.FunctionDef)]
    writers = [
        node for node in functions if any(argument.arg == "event" for argument in node.args.args)
    ]
    return tuple((node, dict(_keys_of(node))) for node in writers)


def _keys_of(function: ast.FunctionDef) -> Iterator[tuple[str, int]]:
    """Yield the keys that a function logs unconditionally, with their lines, in order."""
    for statement in function.body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id == "event"
            and call.args
        ):
            key = key_of(call.args[0])
            if key is not None:
                yield key, call.lineno


def _wrote(function: ast.FunctionDef, name: str, log: Log) -> bool:
    """Return True if the function wrote a line of the log.

    Those of the identity file always write.
    """
    if name == _identity_file(log) and function.name.startswith("log_"):
        return True
    sites = (event.call_site for event in log.events)
    return any(
        site and site[0] == name and function.lineno <= site[1] <= (function.end_lineno or 0)
        for site in sites
    )


def _surely_written(keys: Mapping[str, int], name: str, log: Log) -> set[str]:
    """Return the keys that the log's version of the function must have written too.

    If all logged lines have the same distances as in this version,
    these are the keys up to the last logged one.
    """
    named = {
        event.key: event.call_site[1]
        for event in log.events
        if event.call_site and event.call_site[0] == name
    }
    shared = [key for key in keys if key in named]
    if len(shared) < 2 or len({named[key] - keys[key] for key in shared}) > 1:
        return set()
    return {key for key, line in keys.items() if line <= keys[shared[-1]]}


def _disorder(log: Log) -> Iterable[Complaint]:
    """Check the order of a log's phases and, within a phase,
    that the lines of one file are in the writer's order.
    """
    known = [event for event in log.events if _phase_of(event) is not None]
    for before, after in itertools.pairwise(known):
        if (_phase_of(after) or 0) < (_phase_of(before) or 0):
            yield log.error(
                f"{after.key} comes after {before.key} (line {before.line})", _WRITER, after
            )
            return
    for key in dict.fromkeys(event.key for event in known):
        first, *others = log.all(key)
        if others and key not in _MANY and key != "seed":
            yield log.error(f"{key} is logged again, after line {first.line}", _WRITER, others[0])
    for group in _blocks(log):
        for before, after in itertools.pairwise(group):
            if before.call_site and after.call_site and after.call_site[1] < before.call_site[1]:
                yield log.error(
                    f"{after.key} comes after {before.key}, which the code logs later",
                    _WRITER,
                    after,
                )


def _phase_of(event: Event) -> int | None:
    return 2 if event.key.startswith("opt_") else _PHASE_OF.get(event.key)


def _blocks(log: Log) -> Iterator[list[Event]]:
    """Yield the events of the identity file in groups, one for each function."""
    file = _identity_file(log)
    events = [event for event in log.events if event.call_site and event.call_site[0] == file]
    parts = itertools.groupby(events, key=lambda event: event.key.startswith("submission_"))
    for is_submission, part in parts:
        group = list(part)
        yield group if is_submission else [event for event in group if event.key in _ALWAYS]


def _forms(log: Log) -> Iterable[Complaint]:
    """Check values with a fixed form: commits, digests, versions."""
    for event in log.events:
        pattern, problem = _FORMS.get(event.key, (None, ""))
        if pattern is not None and not pattern.fullmatch(str(event.value)):
            yield log.error(f"{event.key} {event.value!r} is {problem}", OWN_FORM, event)
    built = log.first("image_commit")
    commit = str(log.value("commit"))
    built_from = str(built.value).removesuffix("-dirty") if built is not None else "none"
    if built_from not in ("none", "unknown") and not commit.startswith(built_from):
        yield log.warning(f"image_commit is {built_from}, commit {commit}", OWN_FORM, built)
    image = log.value("image")
    digest = log.first("image_digest")
    if image == "none" and digest is not None and digest.value != "none":
        yield log.error("image_digest without an image", OWN_FORM, digest)
    yield from _packages(log)


def _packages(log: Log) -> Iterable[Complaint]:
    event = log.first("packages")
    if event is None:
        return
    versions = event.value if isinstance(event.value, dict) else {}
    names = DISTRIBUTIONS_OF["TensorFlow" if log.value("recipe") == TENSORFLOW2 else "PyTorch"]
    if not any(versions.get(name) for name in names):
        yield log.error(f"packages has no {names[0]}, which ran the training", OWN_FORM, event)
    for name in ("numpy", "mlperf-logging"):
        if not versions.get(name):
            yield log.error(f"packages has no {name}, which the program needs", OWN_FORM, event)
