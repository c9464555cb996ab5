"""Copy the files to check to a temporary folder, so that no tool writes to the user's folder."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from mlaudit.findings import Complaint, Outcome
from mlaudit.logs import too_large, unfit
from mlaudit.rules import BENCHMARK
from mlbert.host.errors import UserError

RESULT_PATTERN = "result_*.txt"
# Log of an interrupted part of a run; see `RunFolder.set_log_aside`.
_PART = re.compile(r"(?P<run>result_.*)\.part(?P<number>\d+)\.txt")
READABLE = "rules: a submission contains its files itself, fit for the official tools"

_LED_OUT = "is a link out of the tree"


def logs_in(folder: Path) -> list[Path]:
    """Return the logs of a folder sorted by name, without those of interrupted parts,
    which are not runs.
    """
    return sorted(path for path in folder.glob(RESULT_PATTERN) if not _PART.fullmatch(path.name))


def earlier_parts(log: Path) -> list[Path]:
    """Return the logs of the interrupted parts of a run, oldest first,
    given the log of its last part.
    """
    found: dict[int, Path] = {}
    for path in log.parent.glob(RESULT_PATTERN):
        part = _PART.fullmatch(path.name)
        if part is not None and f"{part['run']}.txt" == log.name:
            found[int(part["number"])] = path
    return [found[number] for number in sorted(found)]


def without_parts(paths: Sequence[Path]) -> list[Path]:
    """Return the paths without logs of interrupted parts of runs whose last log is among them.

    ``result_*.txt`` in a shell names both.
    """
    kept = []
    for path in paths:
        part = _PART.fullmatch(path.name)
        if part is None or path.with_name(f"{part['run']}.txt") not in paths:
            kept.append(path)
    return kept


def logs_at(path: Path) -> list[Path]:
    """Return one log, or the logs of a LOGDIR, of ``results/<system>`` or of its ``bert/``."""
    folder = path / BENCHMARK if (path / BENCHMARK).is_dir() else path
    return logs_in(folder) if folder.is_dir() else [path]


@dataclass(frozen=True)
class Workplace:
    """The folder given by the user, its copy, and an empty folder for the tools' own files."""

    given: Path
    copy: Path
    scratch: Path
    is_tree: bool = True  # if True, links must not lead out of it

    def name(self, path: Path) -> str:
        """Return the name of a path in the copy, relative to the given folder."""
        return shown(path.relative_to(self.copy)) if path != self.copy else "."

    def take(self, sources: Iterable[Path]) -> list[Complaint]:
        """Copy files and folders from the given folder,
        and return complaints about what was left out.

        Raises:
            UserError: the copy cannot be written.
        """
        left_out = []
        waiting = [source for source in sources if os.path.lexists(source)]
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
                raise UserError(
                    "file.unwritable", self.given, reason, "Free space there, or set TMPDIR"
                ) from error
            waiting += inside or []
        return sorted(left_out)

    def _look(self, path: Path) -> tuple[str | None, list[Path] | None]:
        """Return why a path cannot be copied (or None),
        and the entries of a folder (None for a file or link).
        """
        try:
            is_link = path.is_symlink() and path != self.given
            problem = _problem_of_link(path, self.given) if is_link else None
            if problem is not None and (self.is_tree or problem != _LED_OUT):
                return problem, None
            if path.is_dir():
                if fnmatch(path.name, RESULT_PATTERN):
                    return "is a folder", None
                return None, None if is_link else [
                    entry for entry in path.iterdir() if entry.name != "__pycache__"
                ]
            if not path.is_file():
                return "is neither a file nor a folder", None
            if fnmatch(path.name, RESULT_PATTERN):
                return unfit(path), None
            with path.open("rb"):
                return too_large(path), None
        except OSError as error:
            return f"cannot be read ({error.strerror})", None


def shown(path: Path) -> str:
    """Return a printable name, whatever its bytes are."""
    return os.fsencode(path).decode("utf-8", errors="replace")


def _problem_of_link(path: Path, root: Path) -> str | None:
    """Return why a link is not allowed, or None.

    Links must be relative and stay within the submission.
    """
    try:
        end = path.resolve(strict=True)
    except RuntimeError:  # Python 3.11 raises this for a loop
        return "is a link to itself"
    except OSError:
        return "is a link to nothing"
    is_inside = end.is_relative_to(root.resolve()) and not path.readlink().is_absolute()
    return None if is_inside else _LED_OUT
