"""What ``instances.json`` says of a folder of TFRecords that `mlbert prepare` made: files, sizes, records, vocabulary.

A checksum of its own in every record tells damage within it, but not a record that is missing, or there twice: the list
does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlbert.core.errors import UserError
from mlbert.core.files import read_plain
from mlbert.store.checksums import CHECKSUMS
from mlbert.store.documents import SHA256, judging, parse_document, plain_size
from mlbert.store.manifest import MAX_TOKENS, MAX_VOCAB_SIZE

LIST = "instances.json"
_RESTORE = "Restore the file, or remove the folder and prepare the data again"
_COUNTS = ("num_sequences", "num_tokens", "num_masked")


@dataclass(frozen=True)
class RecordList:
    """What the list says."""

    path: Path
    vocabulary_sha256: str
    vocab_size: int
    max_seq_length: int
    max_predictions: int
    num_sequences: int
    num_tokens: int
    files: Mapping[str, Mapping[str, int]]  # by name: bytes, num_sequences, num_tokens, num_masked
    provenance: Mapping[str, Any]

    def size_problem(self, path: Path) -> str | None:
        """Why a file is not the listed one, by its size."""
        expected = self.files[path.name]["bytes"]
        return None if (size := plain_size(path)) == expected else f"has {size} bytes, {LIST} says {expected}"

    def count_problem(self, path: Path, records: int, tokens: int | None = None) -> str | None:
        """The same by what was read of it; without ``tokens`` by the records alone."""
        for name, found in (("num_sequences", records), ("num_tokens", tokens)):
            if found not in (None, expected := self.files[path.name][name]):
                what = "records" if name == "num_sequences" else "tokens"
                return f"has {found} {what}, {LIST} says {expected}: some are missing, or there twice"
        return None

    def check_sizes(self, paths: Sequence[Path]) -> None:
        """Raises UserError naming the first file of another size."""
        for path in paths:
            if problem := self.size_problem(path):
                raise UserError(path, problem, _RESTORE)

    def check_counts(self, path: Path, records: int, tokens: int) -> None:
        """Raises UserError for a file that has other records."""
        if problem := self.count_problem(path, records, tokens):
            raise UserError(path, problem, _RESTORE)


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
    with judging(path, "is damaged", _RESTORE):
        found = parse_document(read_plain(path))
        vocabulary, entries = found.part("vocabulary"), found.parts("files")
        files = {entry.file("file"): {key: entry.number(key) for key in ("bytes", *_COUNTS)} for entry in entries}
        totals = {key: found.number(key) for key in _COUNTS}
        if len(files) < len(entries):
            raise ValueError("it lists a file twice")
        if totals != {key: sum(file[key] for file in files.values()) for key in _COUNTS}:
            raise ValueError("its totals differ from the sums over its files")
        return RecordList(
            path=path,
            vocabulary_sha256=vocabulary.text("sha256", SHA256),
            vocab_size=vocabulary.number("size", 1, MAX_VOCAB_SIZE),
            max_seq_length=found.number("max_seq_length", 1, MAX_TOKENS),
            max_predictions=found.number("max_predictions", 0, MAX_TOKENS),
            num_sequences=totals["num_sequences"],
            num_tokens=totals["num_tokens"],
            files=files,
            provenance=found.part("provenance").values(),
        )
