"""Edit the copy that the official tools read, if their ruleset was changed after its round.

Rulesets of finished rounds were changed in later versions of mlperf-logging: a key or a status got
another name, a list of tensors another content. They reject logs that were accepted in their round.
With the renamed words in the copy, the tools judge everything else. Lines keep their numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path

from mlaudit.logs import Log
from mlaudit.round_rules import Round
from mlaudit.rounds import earlier_status

_TOKEN = b":::MLLOG "
_OLD_EPSILON = "opt_epsilon"
_NEW_EPSILON = "opt_lamb_epsilon"
_WEIGHTS = "weights_initialization"
_STATUS = re.compile(rb'("status"\s*:\s*")([^"]*)(")')


def edit_copy(judged: Round, logs: Sequence[Log], systems: Sequence[Path]) -> list[str]:
    """Give files of a copy the words that the ruleset of their round asks for today.

    Args:
        judged: the round of the logs.
        logs: with their paths in the copy.
        systems: system descriptions in the copy.

    Returns:
        A sentence for each change of the ruleset that its logs or descriptions do not fit.
    """
    sentences = []
    closed = [log for log in logs if log.value("submission_division") == "closed"]
    if judged.version == (2, 1):
        renamed = [log for log in closed if _add_epsilon(log)]
        if renamed:
            sentences.append(
                f"ruleset {judged.ruleset} calls {_OLD_EPSILON} {_NEW_EPSILON} since its round and"
                f" rejects {len(renamed)} logs of it: the official tools read copies with both"
            )
    if judged.version == (1, 1):
        changed = [log for log in closed if _replace_weights(log, judged.ruleset)]
        if changed:
            sentences.append(
                f"ruleset {judged.ruleset} got its list of {_WEIGHTS} after its round and rejects"
                f" {len(changed)} logs of it: the official tools read copies with that list"
            )
    if judged.version == (4, 0):
        translated = [path for path in systems if _translate_status(path)]
        if translated:
            sentences.append(
                f"ruleset {judged.ruleset} asks for the status words of v4.1 since its round and"
                f" rejects {len(translated)} descriptions of it: the official tools read copies"
                " with those words"
            )
    return sentences


def _add_epsilon(log: Log) -> bool:
    event = log.first(_OLD_EPSILON)
    if event is None or log.first(_NEW_EPSILON) is not None:
        return False
    line = event.text.replace(f'"{_OLD_EPSILON}"', f'"{_NEW_EPSILON}"')
    _append(log.path, [line])
    return True


def _replace_weights(log: Log, ruleset: str) -> bool:
    wanted = _tensors(ruleset)
    events = log.all(_WEIGHTS)
    found = [(event.metadata or {}).get("tensor") for event in events]
    if sorted(map(str, found)) == sorted(wanted) or not log.events:
        return False
    lines = log.path.read_bytes().split(b"\n")
    for event in events:
        lines[event.line - 1] = b""
    log.path.write_bytes(b"\n".join(lines))
    time_ms = log.events[-1].time_ms
    _append(log.path, [_weights_line(time_ms, tensor) for tensor in wanted])
    return True


def _weights_line(time_ms: float, tensor: str) -> str:
    return json.dumps(
        {
            "namespace": "",
            "time_ms": time_ms,
            "event_type": "POINT_IN_TIME",
            "key": _WEIGHTS,
            "value": None,
            "metadata": {"file": "", "lineno": 0, "tensor": tensor},
        }
    )


@cache
def _tensors(ruleset: str) -> tuple[str, ...]:
    """Return the tensors that a ruleset wants to be named."""
    name = f"compliance_checker/training_{ruleset}/closed_bert.yaml"
    text = resources.files("mlperf_logging").joinpath(name).read_text(encoding="utf-8")
    listed = text.partition("== sorted([")[2].partition("])")[0]
    return tuple(re.findall(r'"([^"]+)"', listed))


def _translate_status(path: Path) -> bool:
    content = path.read_bytes()
    match = _STATUS.search(content)
    status = earlier_status(match[2].decode(errors="replace")) if match is not None else None
    if match is None or status is None or status.encode() == match[2]:
        return False
    path.write_bytes(content[: match.start(2)] + status.encode() + content[match.end(2) :])
    return True


def _append(path: Path, lines: Sequence[str]) -> None:
    content = path.read_bytes()
    end = b"" if content.endswith(b"\n") else b"\n"
    # The text of an event was read as Latin-1, so this gives its bytes back.
    added = b"".join(_TOKEN + line.encode("latin-1") + b"\n" for line in lines)
    path.write_bytes(content + end + added)
