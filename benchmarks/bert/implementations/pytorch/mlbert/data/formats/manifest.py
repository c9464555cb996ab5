"""The manifest of a prepared set: its contents, vocabulary and options.

Reading it does not access training data, so it is allowed before ``run_start``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasPath, Field

from mlbert.host.errors import UserError
from mlbert.host.files import plain_size, read_plain, reading, write_atomically
from mlbert.host.json_files import parse_object, shown
from mlbert.host.schema import Count, Document, FileName, Sha256, parse_model

FORMAT = "mlbert-ragged"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MAX_VOCAB_SIZE = 65_536  # tokens are stored in 16 bits
MAX_VOCAB_BYTES = 64 << 20  # of a vocabulary file: 1 KiB for each of the most entries
MAX_TOKENS = 65_535  # of a sequence or a pack: positions are stored in 16 bits
SHARD_NAME = re.compile(r"shard-\d{5}-of-(?P<count>\d{5})\.h5")
REMAKE = "Restore the file, or remove the folder and prepare the data again"
_REMAKE_ALL = "Prepare the data again with `mlbert prepare`"
_TOTALS = ("num_sequences", "num_tokens", "num_masked", "num_packs")
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]  # of a sequence or a pack


class ListedFile(Document):
    """A file of a prepared set and its contents."""

    file: FileName
    bytes: Count
    num_sequences: Count
    num_tokens: Count
    num_masked: Count
    num_packs: Count = 0

    def size_problem(self, path: Path, listed_in: str) -> str | None:
        """Return how the size of the file at ``path`` differs, or None.

        Compared before a file is hashed.
        """
        size = plain_size(path)
        return (
            None if size == self.bytes else f"has {size} bytes, but {listed_in} says {self.bytes}"
        )


class ListedShard(ListedFile):
    """A shard as listed in the manifest."""

    sha256: Sha256
    content_sha256: Sha256 | None = None


class PackEntry(Document):
    """Manifest fields of a packed set."""

    num_packs: Count
    max_tokens: Tokens


class SetDescription(Document):
    """The common description of prepared sets of all formats."""

    path: Path  # of this document
    vocabulary_sha256: Sha256 = Field(validation_alias=AliasPath("vocabulary", "sha256"))
    vocab_size: Annotated[
        int, Field(ge=1, le=MAX_VOCAB_SIZE, validation_alias=AliasPath("vocabulary", "size"))
    ]
    max_seq_length: Tokens
    max_predictions: Annotated[int, Field(ge=0, le=MAX_TOKENS)]
    num_sequences: Count
    num_tokens: Count
    num_masked: Count
    packs: PackEntry | None = None
    provenance: dict[str, Any]

    @property
    def num_packs(self) -> int:
        """Number of packs; 0 if the set is not packed."""
        return self.packs.num_packs if self.packs else 0

    @property
    def max_pack_tokens(self) -> int | None:
        """Slots of a pack; None if the set is not packed."""
        return self.packs.max_tokens if self.packs else None

    @property
    def lower_case(self) -> bool | None:
        """Whether the texts were lowercased, as recorded by this set
        or the one that it was made from; None if unknown.
        """
        made: Any = self.provenance
        while isinstance(made, dict):
            for place in (made.get("options"), made):
                if isinstance(place, dict) and isinstance(found := place.get("lower_case"), bool):
                    return found
            made = made.get("input")
        return None

    def check_files(self, files: Sequence[ListedFile], remedy: str) -> None:
        """Raise UserError if a file is listed twice,
        or the totals are not the sums over the files.
        """
        if len({entry.file for entry in files}) < len(files):
            raise UserError("data.damaged", self.path, "lists a file twice", remedy)
        sums = {key: sum(getattr(entry, key) for entry in files) for key in _TOTALS}
        if sums != {key: getattr(self, key) for key in _TOTALS}:
            problem = f"its totals differ from the sums over its files ({sums})"
            raise UserError("data.damaged", self.path, problem, remedy)


class Manifest(SetDescription):
    """The contents of ``manifest.json``."""

    sha256: Sha256  # of the manifest itself
    length_histogram: list[Count]
    shards: Annotated[list[ListedShard], Field(min_length=1)]

    @property
    def num_bytes(self) -> int:
        """Total size of all shards."""
        return sum(shard.bytes for shard in self.shards)


def read_manifest(folder: Path | str) -> Manifest:
    """Read the manifest of a prepared set, which is allowed before run_start.

    Raises UserError if it is missing, unreadable, inconsistent, or has another format.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    with reading(path):
        if not path.exists():
            remedy = "Give a folder that `mlbert prepare` finished"
            check_folder(folder, remedy)
            raise UserError("data.incomplete", folder, "the folder has no manifest.json", remedy)
    raw = read_plain(path)
    document = parse_object(path, raw, _REMAKE_ALL)
    check_format(path, document, FORMAT, FORMAT_VERSION, _REMAKE_ALL)
    document |= {"path": path, "sha256": hashlib.sha256(raw).hexdigest()}
    manifest = parse_model(Manifest, document, path, _REMAKE_ALL)
    manifest.check_files(manifest.shards, _REMAKE_ALL)
    counts = manifest.length_histogram
    found = len(counts) - 1, sum(counts), sum(length * count for length, count in enumerate(counts))
    if found != (manifest.max_seq_length, manifest.num_sequences, manifest.num_tokens):
        raise UserError(
            "data.damaged", path, "length_histogram does not fit the totals", _REMAKE_ALL
        )
    return manifest


def check_format(
    path: Path, document: Mapping[str, Any], name: str, version: int, remedy: str
) -> None:
    """Raise UserError if a document has another format, or another version of it."""
    found = {key: document.get(key) for key in ("format", "version")}
    if found != (expected := {"format": name, "version": version}):
        raise UserError(
            "data.format", path, f"has {shown(found)}; this program reads {expected}", remedy
        )


def check_folder(path: Path, remedy: str, subject: Path | str | None = None) -> None:
    """Raise UserError unless ``path`` is a folder.

    The error is about ``subject``, by default the path.
    """
    if not path.is_dir():
        reason = "is a file, not a folder" if path.exists() else "there is no such folder"
        raise UserError("file.missing", subject or path, reason, remedy)


def make_folder(path: Path) -> None:
    """Create an output folder if it does not exist. Raises UserError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot be created ({error.strerror})"
        raise UserError("file.unwritable", path, reason, "Choose another output folder") from None


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file, read in pieces. Raises UserError if it cannot be read."""
    plain_size(path)
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def vocabulary_sha256(path: Path) -> str:
    """Return the sha256 of a vocabulary file. Raises UserError if it is unreadable or too large."""
    return hashlib.sha256(
        read_plain(path, "Give a BERT WordPiece vocab.txt", MAX_VOCAB_BYTES)
    ).hexdigest()


def file_md5(path: Path) -> str:
    """Return the MD5 of a file, read in pieces. Raises UserError if it cannot be read."""
    plain_size(path)
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def json_sha256(value: object) -> str:
    """Return the sha256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document atomically as indented JSON."""
    write_atomically(path, json.dumps(document, indent=1) + "\n")
