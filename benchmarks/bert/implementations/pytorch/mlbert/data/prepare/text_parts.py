"""The text parts that a step is given: files and folders, checked before any work begins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from mlbert.data.formats.manifest import file_sha256, reading
from mlbert.data.formats.tfrecord import missing_numbers, missing_text
from mlbert.data.prepare.instances import REMEDY, without_text
from mlbert.data.prepare.jobs import SILENT, Progress
from mlbert.host.errors import UserError

_IN_FOLDER = re.compile(r"part-\d+(-of-\d+)?|(?!eval).*\.txt")


@dataclass(frozen=True)
class TextPart:
    """One text part."""

    path: Path
    num_bytes: int  # 0 when it cannot be read
    sha256: str  # of its bytes; empty when it cannot be read
    problem: UserError | None = None  # why it cannot be used


def expand_inputs(inputs: Iterable[Path], *, skip_bad: bool = False) -> list[Path]:
    """The text parts that the given files and folders mean.

    A folder gives its ``part-*`` and ``*.txt`` files, sorted, without ``eval*.txt``; files are taken as named.

    Raises UserError: a folder holds no part, or not all of its ``part-00000-of-00500``; with ``skip_bad`` the missing
    ones are in the list, as files that cannot be read.
    """
    return [part for given in inputs for part in (_parts_of_folder(given, skip_bad) if given.is_dir() else [given])]


def _parts_of_folder(folder: Path, skip_bad: bool) -> list[Path]:
    with reading(folder):
        found = sorted(path for path in folder.iterdir() if _IN_FOLDER.fullmatch(path.name) and path.is_file())
    if not found:
        raise UserError(
            "data.missing",
            folder,
            "holds no text part (part-* or *.txt)",
            "Give the folder of the text, or files by name",
        )
    missing = missing_numbers([path.name for path in found])
    if missing and not skip_bad:
        remedy = "Restore what is missing, name the files that you want, or use --skip-bad"
        raise UserError("data.incomplete", folder, missing_text(missing), remedy)
    return sorted([*found, *(folder / name for name in missing)])


def inspect_parts(
    paths: Sequence[Path], *, skip_bad: bool = False, workers: int = 1, progress: Progress = SILENT
) -> list[TextPart]:
    """Read all parts once: sizes and checksums. Raises UserError: a part cannot be read, is empty, or has the same
    content as another (both are named). With ``skip_bad`` these are in `TextPart.problem` instead, and it is an error
    when no part is good."""
    if not paths:
        raise UserError("data.missing", "--input", "there is no text part", "Give text files or their folder")
    parts: list[TextPart] = []
    first: dict[str, Path] = {}
    total = sum(path.stat().st_size for path in paths if path.is_file())
    with ThreadPoolExecutor(max(1, workers)) as pool, progress.task("checksums", total, "bytes") as advance:
        for part in pool.map(_inspect, paths):
            if not part.problem and part.sha256 in first:
                reason = f"has the same content as {first[part.sha256]}"
                part = replace(part, problem=UserError("data.duplicate", part.path, reason, "Give every part once"))
            if not part.problem:
                first[part.sha256] = part.path
            elif not skip_bad:
                raise part.problem
            parts.append(part)
            advance(part.num_bytes)
    if all(part.problem for part in parts):
        raise UserError("data.damaged", "--input", f"none of {len(parts)} parts can be used; {parts[0].problem}")
    return parts


def _inspect(path: Path) -> TextPart:
    try:
        with reading(path, REMEDY):
            size = path.stat().st_size
        return TextPart(path, size, file_sha256(path)) if size else TextPart(path, 0, "", without_text(path))
    except UserError as error:
        return TextPart(path, 0, "", error)
