"""`UserError`, the one exception for user mistakes; settings by the names that this user types; and
the search for the name that a user probably meant.

Code that raises an error names a setting by its export, such as BATCHSIZE. A front end with other
names, YAML keys of another program or a command's options, wraps its work in `public_names`.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlbert.host.error_codes import ERROR_CODES
from mlbert.host.exit_statuses import WRONG_INPUT
from mlbert.host.repository import repository

# Neither pattern begins with a repetition, which would make the time quadratic in the length of a
# word.
_USER_OF_ADDRESS = re.compile(r"(?<=\w)://[^/@\s]+@")
_SECRET_OF_QUERY = re.compile(
    r"([?&][\w-]*(?:sig|signature|credential|token|accesskeyid)=)[^&\s'\"]+", re.IGNORECASE
)
CHOICES = "Choices: "  # before the names that are known, at the end of a message


class UserError(ValueError):
    """A mistake that the user can fix.

    A command prints it as one line and exits with `exit_status`.

    Args:
        code: short stable identifier, one of `ERROR_CODES`.
        subject: the file, variable or flag at fault.
        problem: what is wrong with it.
        remedy: how to fix it; empty only if the problem already says so.
        choices: the names that are known, if an unknown one was given. They follow the sentence,
            so that a new choice changes no sentence.

    Attributes:
        sentence: problem and remedy, without the choices.
        is_agreed: True if the ranks of a run have agreed that this one reports it.
    """

    exit_status = WRONG_INPUT  # of a command that fails with this error
    is_agreed = False

    def __init__(
        self,
        code: str,
        subject: str | Path,
        problem: str,
        remedy: str = "",
        choices: Iterable[str] = (),
    ) -> None:
        assert code in ERROR_CODES, f"{code} is not in ERROR_CODES"
        self.code = code
        self.subject = in_public_words(_one_line(str(subject)))
        self.problem = in_public_words(_one_line(problem)).rstrip(".")
        self.remedy = in_public_words(_one_line(remedy)).rstrip(".")
        self.choices = tuple(choices)
        self.sentence = f"{self.subject}: {self.problem}."
        if self.remedy:
            self.sentence += f" {self.remedy}{'' if self.remedy.endswith('?') else '.'}"
        known = _one_line(", ".join(self.choices))
        super().__init__(f"{self.sentence} {CHOICES}{known}." if known else self.sentence)

    def about(self, subject: str | Path) -> UserError:
        """Return the same error with the file, variable or flag that the user knows."""
        return UserError(self.code, subject, self.problem, self.remedy, self.choices)

    def as_line(self) -> str:
        """Return the line that a command prints: the message, then the code in brackets."""
        return f"{self} [{self.code}]"

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str, str, tuple[str, ...]]]:
        """Pickle the parts, so that the error can be passed back from a worker process."""
        return UserError, (self.code, self.subject, self.problem, self.remedy, self.choices)


class Refused(Exception):
    """A program that this one started has refused its input and has said why on standard error.

    Args:
        exit_status: of the other program, which becomes this one's.
    """

    def __init__(self, exit_status: int) -> None:
        super().__init__(exit_status)
        self.exit_status = exit_status


_front_ends: list[Mapping[str, str]] = []  # of `public_names`, the innermost first


@contextlib.contextmanager
def public_names(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors that are raised in the block name settings as the user of this front end types
    them.

    Args:
        names: export -> what to write instead; also ``EXPORT=value``, and ``EXPORT=`` before any
            other value. If blocks are nested, the inner one's names are replaced first, so that the
            outer one can name its results.
    """
    _front_ends.insert(0, names)
    try:
        yield
    finally:
        _front_ends.remove(names)


def in_public_words(text: str) -> str:
    """Replace the names of settings by those of `public_names`.

    Parts of paths and quoted values stay.
    """
    for names in _front_ends:
        text = replace_names(text, names)
    return text


def replace_names(text: str, names: Mapping[str, str]) -> str:
    """Replace names in a sentence; the longest one wins where several begin."""
    if not names:
        return text
    longest_first = sorted(names, key=len, reverse=True)
    any_name = "|".join(re.escape(name) for name in longest_first)
    not_before = r"(?<![\w/.'\"-])"
    not_after = r"(?:(?<==)|(?![\w/-]|\.\w))"
    return re.sub(f"{not_before}({any_name}){not_after}", lambda found: names[found[1]], text)


def _one_line(text: str) -> str:
    """Join the lines of a text: file names and values may contain line breaks,
    messages must not.
    """
    return hide_credentials(" ".join(text.splitlines()))


def install_words(extra: str) -> str:
    """Return the command that installs one of pyproject's extras."""
    if repository() is None:
        return f"Run: pip install 'mlbert[{extra}]'"
    return f"Run in the root of the repository: pip install -c constraints.txt -e '.[{extra}]'"


def import_package(name: str, subject: str | Path, extra: str) -> Any:
    """Return an optional package of an extra.

    Raises UserError, about what needs it, if it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        problem = f"needs the Python package {name.partition('.')[0]}, which is not installed"
        raise UserError("package.missing", subject, problem, install_words(extra)) from None


def hide_credentials(text: str) -> str:
    """Mask the secrets in addresses: ``https://name:password@host/``,
    and the query of a signed one.
    """
    text = _USER_OF_ADDRESS.sub("://***@", text)
    return _SECRET_OF_QUERY.sub(r"\1***", text)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to ``name``, ignoring case, dashes and underscores;
    None if none is close.
    """
    by_shape = {name_shape(candidate): candidate for candidate in known}
    close = difflib.get_close_matches(name_shape(name), by_shape, n=1, cutoff=0.5)
    return by_shape[close[0]] if close else None


def name_shape(name: str) -> str:
    """Return the name without case, dashes and underscores."""
    return re.sub(r"[-_]", "", name).lower()
