"""Find the text parts of a preparation in files and folders, and inspect them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from mlbert.data.formats.manifest import file_sha256, reading
from mlbert.data.formats.tfrecord import missing_numbers, missing_text
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.instances import REMEDY, without_text
from mlbert.host.errors import UserError
from mlbert.host.files import plain_size

_IN_FOLDER = re.compile(r"part-\d+(-of-\d+)?|(?!eval).*\.txt")  # text parts of a folder


@dataclass(frozen=True)
class TextPart:
    """One text part."""

    path: Path
    num_bytes: int  # 0 if it cannot be read
    sha256: str  # of its bytes; empty if it cannot be read
    problem: UserError | None = None  # why it cannot be used


def expand_inputs(inputs: Iterable[Path], *, skip_bad: bool = False) -> list[Path]:
    """Return the text parts of the given files and folders.

    A folder contributes its sorted ``part-*`` and ``*.txt`` files, except ``eval*.txt``;
    files are used as named.

    Raises UserError: a folder holds no part, or not all of its ``part-00000-of-00500``. With
    ``skip_bad``, the missing ones are listed as files that cannot be read.
    """
    parts: list[Path] = []
    for given in inputs:
        if given.is_dir():
            parts += _parts_of_folder(given, skip_bad)
        else:
            parts.append(given)
    return parts


def _parts_of_folder(folder: Path, skip_bad: bool) -> list[Path]:
    with reading(folder):
        found = sorted(
            path
            for path in folder.iterdir()
            if _IN_FOLDER.fullmatch(path.name) and not path.is_dir()
        )
    if not found:
        reason = "contains no text part (part-* or *.txt)"
        raise UserError(
            "data.missing", folder, reason, "Give the folder of the text, or files by name"
        )
    missing = missing_numbers([path.name for path in found])
    if missing and not skip_bad:
        remedy = "Restore what is missing, name the files to use, or use --skip-bad"
        raise UserError("data.incomplete", folder, missing_text(missing), remedy)
    return sorted([*found, *(folder / name for name in missing)])


def inspect_parts(
    paths: Sequence[Path], *, skip_bad: bool = False, executor: Executor = Executor()
) -> list[TextPart]:
    """Read all parts once for sizes and checksums.

    Raises UserError: a part cannot be read, is empty, or duplicates another (both are named). With
    ``skip_bad`` such errors go into `TextPart.problem` instead, and only having no good part is an
    error.
    """
    if not paths:
        raise UserError(
            "data.missing", "--input", "there is no text part", "Give text files or their folder"
        )
    parts: list[TextPart] = []
    first: dict[str, Path] = {}
    total = sum(path.stat().st_size for path in paths if path.is_file())
    advancing = executor.progress.task("checksums", total, "bytes")
    with ThreadPoolExecutor(max(1, executor.workers)) as pool, advancing as advance:
        for part in pool.map(inspect_part, paths):
            if not part.problem and part.sha256 in first:
                reason = f"has the same content as {first[part.sha256]}"
                part = replace(
                    part,
                    problem=UserError("data.duplicate", part.path, reason, "Give each part once"),
                )
            if not part.problem:
                first[part.sha256] = part.path
            elif not skip_bad:
                raise part.problem
            parts.append(part)
            advance(part.num_bytes)
    if all(part.problem for part in parts):
        raise UserError(
            "data.damaged", "--input", f"none of {len(parts)} parts can be used; {parts[0].problem}"
        )
    return parts


def inspect_part(path: Path) -> TextPart:
    """Read a part once for its size and checksum."""
    try:
        size = plain_size(path, REMEDY)
        return (
            TextPart(path, size, file_sha256(path))
            if size
            else TextPart(path, 0, "", without_text(path))
        )
    except UserError as error:
        return TextPart(path, 0, "", error)
