"""What ``instances.json`` says of a folder of TFRecords that `mlbert prepare` made: files, sizes, records, vocabulary.

A checksum of its own in every record tells damage within it, but not a record that is missing, or there twice: the list
does.
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
    """What the list says."""

    files: Annotated[list[ListedFile], Field(min_length=1)]

    @cached_property
    def by_name(self) -> dict[str, ListedFile]:
        """The files by their names."""
        return {file.file: file for file in self.files}

    def size_problem(self, path: Path) -> str | None:
        """Why a file is not the listed one, by its size."""
        expected = self.by_name[path.name].bytes
        return None if (size := plain_size(path)) == expected else f"has {size} bytes, {LIST} says {expected}"

    def count_problem(self, path: Path, records: int, tokens: int | None = None) -> str | None:
        """The same by what was read of it; without ``tokens`` by the records alone."""
        for name, found in (("num_sequences", records), ("num_tokens", tokens)):
            if found not in (None, expected := getattr(self.by_name[path.name], name)):
                what = "records" if name == "num_sequences" else "tokens"
                return f"has {found} {what}, {LIST} says {expected}: some are missing, or there twice"
        return None

    def check_sizes(self, paths: Sequence[Path]) -> None:
        """Raises UserError naming the first file of another size."""
        for path in paths:
            if problem := self.size_problem(path):
                raise UserError("data.incomplete", path, problem, _RESTORE)

    def check_counts(self, path: Path, records: int, tokens: int) -> None:
        """Raises UserError for a file that has other records."""
        if problem := self.count_problem(path, records, tokens):
            raise UserError("data.incomplete", path, problem, _RESTORE)


def unlisted_note(folder: Path) -> str | None:
    """What is to be said of TFRecords of which nothing says how many there must be."""
    if (folder / LIST).exists() or (folder / CHECKSUMS).exists():
        return None
    what = "one that is missing, or there twice, cannot be known"
    return f"note: {folder}: neither {LIST} nor {CHECKSUMS} lists its records: {what}"


def read_list(folder: Path) -> RecordList | None:
    """The list of a folder, or of the folder of a file that it lists; None where there is none. Raises UserError: it is
    damaged, or contradicts itself."""
    path = (folder if folder.is_dir() else folder.parent) / LIST
    if not path.exists():
        return None
    found = parse_model(RecordList, {**read_json(path, _RESTORE), "path": path}, path, _RESTORE)
    found.check_files(found.files, _RESTORE)
    return found
