"""Expect a `UserError` with a code and subject. The wording of all messages is in one golden file.

The choices that follow a sentence are not in it, so that a new choice changes no line.

A sentence can be improved without touching any test: run the suite with
``MLBERT_WRITE_MESSAGES=1``, which adds the new sentences to ``tests/golden/error_messages.txt``,
and delete the old ones there.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from mlbert.host.errors import CHOICES, UserError

MESSAGES = Path(__file__).parent / "golden" / "error_messages.txt"
ROOT = Path(__file__).resolve().parents[1]
_VARIABLE = (
    (re.compile(re.escape(str(ROOT))), "<tree>"),
    (
        re.compile(r"(file://)?/[^ ,:()']*pytest-of-[^/ ]+/pytest-\d+/(popen-gw\d+/)?[^/ ,:()']+"),
        "<tmp>",
    ),
    (re.compile(r"127\.0\.0\.1:\d+"), "<host>"),
    (re.compile(r"\b[0-9a-f]{12,64}\b"), "<hash>"),
    (re.compile(r"0x[0-9a-f]+"), "<address>"),
    (re.compile(r"Unable to \w+ open file \([^()]*\)"), "<HDF5's reason>"),
    (re.compile(r"PyTorch \d\S*"), "PyTorch <version>"),
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@contextmanager
def user_error(
    code: str, subject: str | Path | None = None, *, wording: bool = True
) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect the block to raise a `UserError`.

    Args:
        code: error code.
        subject: error subject; the last parts of a path are enough (None skips this check).
        wording: the message must be in the golden file;
            pass False if it depends on the machine or on random examples.
    """
    with pytest.raises(UserError) as caught:
        yield caught
    assert caught.value.code == code, str(caught.value)
    assert "\n" not in str(caught.value)
    found = caught.value.subject
    assert subject is None or found == str(subject) or found.endswith(f"/{subject}"), str(
        caught.value
    )
    if wording:
        check_wording(code, caught.value.sentence)


def assert_error_line(stderr: str, code: str, subject: str | Path, *, wording: bool = True) -> None:
    """Assert that a command printed nothing but one error.

    Args:
        stderr: output of the command.
        code: error code.
        subject: error subject; the last parts of a path are enough.
        wording: as for `user_error`.
    """
    (line,) = stderr.splitlines()
    found = re.fullmatch(
        rf"mlbert: error: ((.*[/ ])?{re.escape(str(subject))}: .*) \[{re.escape(code)}\]", line
    )
    assert found, line
    if wording:
        sentence, _, _ = found[1].partition(f" {CHOICES}")
        check_wording(code, sentence)


def check_wording(code: str, message: str) -> None:
    """Assert that a message is in the golden file; with ``MLBERT_WRITE_MESSAGES=1``, add it."""
    line = f"{code}: {normalize(message)}"
    if line in _messages():
        return
    assert os.environ.get("MLBERT_WRITE_MESSAGES") == "1", f"not in {MESSAGES.name}: {line}"
    folder = os.open(MESSAGES.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # other workers write too
        lines = {*MESSAGES.read_text().splitlines(), line} if MESSAGES.exists() else {line}
        new = MESSAGES.with_suffix(".new")
        new.write_text("\n".join(sorted(lines)) + "\n")
        new.replace(MESSAGES)
    finally:
        os.close(folder)


def normalize(text: str) -> str:
    """Replace the parts of a message that differ between runs: test folders, ports, checksums."""
    for pattern, name in _VARIABLE:
        text = pattern.sub(name, text)
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


@cache
def _messages() -> frozenset[str]:
    return frozenset(MESSAGES.read_text().splitlines()) if MESSAGES.exists() else frozenset()
