"""The copy that is judged, so that no tool writes where the user's files are, without what cannot be judged."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from mlbert.host.errors import UserError
from mlbert.mlperf.findings import Complaint, Outcome
from mlbert.mlperf.logs import unfit

RESULT_PATTERN = "result_*.txt"
_PART = re.compile(r"result_.*\.part\d+\.txt")  # log of an interrupted part, see `RunFolder.set_log_aside`
READABLE = "rules: a submission holds its files itself, fit for the official tools"

_LED_OUT = "is a link out of the tree"


def logs_in(folder: Path) -> list[Path]:
    """Return the logs of a folder by name, without those of interrupted parts: they are no runs of their own."""
    return sorted(path for path in folder.glob(RESULT_PATTERN) if not _PART.fullmatch(path.name))


@dataclass(frozen=True)
class Workplace:
    """Where the tools work: the folder as the user knows it, its copy, and an empty one for the tools' own files."""

    given: Path
    copy: Path
    scratch: Path
    is_tree: bool = True  # then links may not lead out of it

    def name(self, path: Path) -> str:
        """A path in the copy as the user knows it, relative to the folder given."""
        return shown(path.relative_to(self.copy)) if path != self.copy else "."

    def take(self, sources: Iterable[Path]) -> list[Complaint]:
        """Copies files and whole folders of the folder given; complaints about what is left out.

        Raises:
            UserError: the copy cannot be written.
        """
        left_out, waiting = [], [source for source in sources if os.path.lexists(source)]
        while waiting:
            path = waiting.pop()
            problem, inside = self._look(path)
            if problem is not None:
                name = shown(path.relative_to(self.given)) if path != self.given else "."
                left_out.append(Complaint(Outcome.ERROR, f"{name} {problem}", READABLE))
                continue
            target = self.copy / path.relative_to(self.given)
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                if inside is None:
                    shutil.copy2(path, target, follow_symlinks=not self.is_tree)
                else:
                    target.mkdir(exist_ok=True)
            except OSError as error:
                reason = f"cannot be copied to {self.copy} ({error.strerror})"
                raise UserError("file.unwritable", self.given, reason, "Make room there, or set TMPDIR") from error
            waiting += inside or []
        return sorted(left_out)

    def _look(self, path: Path) -> tuple[str | None, list[Path] | None]:
        """Why a path cannot be taken, or ``None``; and what a folder holds, ``None`` for a file or link."""
        try:
            is_link = path.is_symlink() and path != self.given
            problem = _problem_of_link(path, self.given) if is_link else None
            if problem is not None and (self.is_tree or problem != _LED_OUT):
                return problem, None
            if path.is_dir():
                if fnmatch(path.name, RESULT_PATTERN):
                    return "is a folder", None
                return None, None if is_link else [entry for entry in path.iterdir() if entry.name != "__pycache__"]
            if not path.is_file():
                return "is neither a file nor a folder", None
            if fnmatch(path.name, RESULT_PATTERN):
                return unfit(path), None
            with path.open("rb"):
                return None, None
        except OSError as error:
            return f"cannot be read ({error.strerror})", None


def shown(path: Path) -> str:
    """A name that can be printed, whatever its bytes are."""
    return os.fsencode(path).decode("utf-8", errors="replace")


def _problem_of_link(path: Path, root: Path) -> str | None:
    """A link may lead to another place of the tree, wherever the tree lies."""
    try:
        end = path.resolve(strict=True)
    except RuntimeError:  # what Python 3.11 raises for a circle
        return "is a link to itself"
    except OSError:
        return "is a link to nothing"
    is_inside = end.is_relative_to(root.resolve()) and not path.readlink().is_absolute()
    return None if is_inside else _LED_OUT
