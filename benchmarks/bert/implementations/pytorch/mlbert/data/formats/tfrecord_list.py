"""The list ``instances.json`` of a folder of TFRecords made by `mlbert prepare`: files, sizes, records, vocabulary.

A record's checksums detect damage within it; only the list detects missing or duplicate records.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Field

from mlbert.data.formats.checksums import CHECKSUMS
from mlbert.data.formats.manifest import ListedFile, SetDescription
from mlbert.host.errors import UserError
from mlbert.host.files import plain_size
from mlbert.host.json_files import read_json
from mlbert.host.schema import parse_model

LIST = "instances.json"
_RESTORE = "Restore the file, or remove the folder and prepare the data again"


class RecordList(SetDescription):
    """The contents of the list."""

    files: Annotated[list[ListedFile], Field(min_length=1)]

    @cached_property
    def by_name(self) -> dict[str, ListedFile]:
        """Files by name."""
        return {file.file: file for file in self.files}

    def size_problem(self, path: Path) -> str | None:
        """Return how a file's size differs from the list, or None."""
        expected = self.by_name[path.name].bytes
        return None if (size := plain_size(path)) == expected else f"has {size} bytes, {LIST} says {expected}"

    def count_problem(self, path: Path, records: int, tokens: int | None = None) -> str | None:
        """Return how a file's counts differ from the list, or None; without ``tokens``, only records are compared."""
        for name, found in (("num_sequences", records), ("num_tokens", tokens)):
            if found not in (None, expected := getattr(self.by_name[path.name], name)):
                what = "records" if name == "num_sequences" else "tokens"
                return f"has {found} {what}, {LIST} says {expected}: some are missing or duplicated"
        return None

    def check_sizes(self, paths: Sequence[Path]) -> None:
        """Raise UserError naming the first file with a size that differs from the list."""
        for path in paths:
            if problem := self.size_problem(path):
                raise UserError("data.incomplete", path, problem, _RESTORE)

    def check_counts(self, path: Path, records: int, tokens: int) -> None:
        """Raise UserError if a file's counts differ from the list."""
        if problem := self.count_problem(path, records, tokens):
            raise UserError("data.incomplete", path, problem, _RESTORE)


def unlisted_note(folder: Path) -> str | None:
    """Return a note to log if neither a list nor checksums exist for a folder, otherwise None."""
    if (folder / LIST).exists() or (folder / CHECKSUMS).exists():
        return None
    what = "missing or duplicate records cannot be detected"
    return f"note: {folder}: neither {LIST} nor {CHECKSUMS} lists its records: {what}"


def read_list(folder: Path) -> RecordList | None:
    """Return the list of a folder, or of a file's folder, or None if there is none. Raises UserError if it is damaged
    or inconsistent."""
    path = (folder if folder.is_dir() else folder.parent) / LIST
    if not path.exists():
        return None
    found = parse_model(RecordList, {**read_json(path, _RESTORE), "path": path}, path, _RESTORE)
    found.check_files(found.files, _RESTORE)
    return found
