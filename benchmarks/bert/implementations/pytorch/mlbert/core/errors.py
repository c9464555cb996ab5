"""The one exception for people's mistakes: one line that names the subject, the reason and the remedy."""

from __future__ import annotations

from pathlib import Path


class UserError(ValueError):
    """A mistake that the user can mend. The command line prints it as one line and exits with code 2.

    Args:
        subject: the file, variable or flag at fault.
        reason: what is wrong with it, in plain words.
        remedy: what to do about it; may be empty only where the reason says it already.
    """

    def __init__(self, subject: str | Path, reason: str, remedy: str = "") -> None:
        self.subject = _one_line(str(subject))
        self.reason = _one_line(reason).rstrip(".")
        self.remedy = _one_line(remedy).rstrip(".")
        text = f"{self.subject}: {self.reason}."
        super().__init__(f"{text} {self.remedy}." if self.remedy else text)

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str]]:
        """Pickled by its three parts, so that it can come back from a worker process."""
        return type(self), (self.subject, self.reason, self.remedy)


def _one_line(text: str) -> str:
    """A file name or a value may hold line breaks; the message must not."""
    return " ".join(text.splitlines())
