"""The one exception for people's mistakes: one line that names the subject, the problem and the remedy.

Names that are nearly right: the known one that somebody most likely meant.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from mlbert.host.error_codes import ERROR_CODES


class UserError(ValueError):
    """A mistake that the user can mend. A command prints it as one line and exits with the code's status.

    Args:
        code: short stable identifier, one of `ERROR_CODES`.
        subject: the file, variable or flag at fault.
        problem: what is wrong with it, in plain words.
        remedy: what to do about it; may be empty only if the problem says it already.
    """

    def __init__(self, code: str, subject: str | Path, problem: str, remedy: str = "") -> None:
        assert code in ERROR_CODES, f"{code} is not in ERROR_CODES"
        self.code = code
        self.subject = _one_line(str(subject))
        self.problem = _one_line(problem).rstrip(".")
        self.remedy = _one_line(remedy).rstrip(".")
        text = f"{self.subject}: {self.problem}."
        super().__init__(f"{text} {self.remedy}." if self.remedy else text)

    @property
    def exit_status(self) -> int:
        """Exit status of a command that ends with this error."""
        return ERROR_CODES[self.code].exit_status

    def as_line(self) -> str:
        """Return the line that a command prints: the message, then the code in brackets."""
        return f"{self} [{self.code}]"

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str, str]]:
        """Pickle the four parts, so that the error can come back from a worker process."""
        return type(self), (self.code, self.subject, self.problem, self.remedy)


def _one_line(text: str) -> str:
    """Join the lines of a text: a file name or a value may contain line breaks, the message must not."""
    return " ".join(text.splitlines())


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most like ``name``, ignoring case, dashes and underscores; None if none is near."""
    by_shape = {name_shape(candidate): candidate for candidate in known}
    close = difflib.get_close_matches(name_shape(name), by_shape, n=1, cutoff=0.5)
    return by_shape[close[0]] if close else None


def name_shape(name: str) -> str:
    """Return the name without case, dashes and underscores."""
    return re.sub(r"[-_]", "", name).lower()
