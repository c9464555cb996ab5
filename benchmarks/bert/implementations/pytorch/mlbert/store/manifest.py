"""The manifest of a prepared set: what it holds, made from which vocabulary, by which options.

Reading it touches no training data, so it is allowed before ``run_start``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from mlbert.core.errors import UserError

FORMAT = "mlbert-ragged"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MAX_VOCAB_SIZE = 65_536  # tokens are stored in 16 bits
REMAKE = "Restore the file, or remove the folder and prepare the data again"


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` says; the last two are of a packed set (0 and None otherwise)."""

    path: Path
    vocabulary_sha256: str
    vocab_size: int
    num_sequences: int
    num_tokens: int
    num_masked: int
    max_seq_length: int
    max_predictions: int
    length_histogram: list[int]
    shards: list[dict[str, Any]]
    provenance: dict[str, Any] = field(default_factory=dict)
    sha256: str = ""
    num_packs: int = 0
    max_pack_tokens: int | None = None

    @property
    def num_bytes(self) -> int:
        """Size of all shards."""
        return sum(int(shard["bytes"]) for shard in self.shards)


def read_manifest(folder: Path | str) -> Manifest:
    """Read the manifest of a prepared set: counts and vocabulary, no training data (allowed before run_start).
    Raises UserError: no manifest, unreadable, another format, or fields that contradict each other."""
    folder = Path(folder)
    path = folder / MANIFEST
    remake = "Prepare the data again with `mlbert prepare`"
    with reading(path):
        if not path.exists():
            reason = "the folder has no manifest.json" if folder.is_dir() else no_folder(folder)
            raise UserError(folder, reason, "Give a folder that `mlbert prepare` finished")
        raw = path.read_bytes()
    try:
        document = json.loads(raw)
        if document["format"] != FORMAT or document["version"] != FORMAT_VERSION:
            found = f"{document['format']} version {document['version']}"
            raise UserError(path, f"is {found}, this program reads {FORMAT} version {FORMAT_VERSION}", remake)
        packs = document.get("packs")
        manifest = Manifest(
            path=path,
            vocabulary_sha256=str(document["vocabulary"]["sha256"]),
            vocab_size=int(document["vocabulary"]["size"]),
            num_sequences=int(document["num_sequences"]),
            num_tokens=int(document["num_tokens"]),
            num_masked=int(document["num_masked"]),
            max_seq_length=int(document["max_seq_length"]),
            max_predictions=int(document["max_predictions"]),
            length_histogram=[int(count) for count in document["length_histogram"]],
            shards=[dict(shard) for shard in document["shards"]],
            provenance=dict(document["provenance"]),
            sha256=hashlib.sha256(raw).hexdigest(),
            num_packs=int(packs["num_packs"]) if packs else 0,
            max_pack_tokens=int(packs["max_tokens"]) if packs else None,
        )
        sums = {key: sum(int(shard[key]) for shard in manifest.shards) for key in ("num_sequences", "num_tokens")}
        sums["num_packs"] = sum(int(shard.get("num_packs", 0)) for shard in manifest.shards)
        names = [str(shard["file"]) for shard in manifest.shards]
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(path, f"is not a manifest of a prepared set ({error!r})", remake) from None
    if len(set(names)) != len(names):
        raise UserError(path, "lists a shard twice", remake)
    if sums != {key: getattr(manifest, key) for key in sums}:
        raise UserError(path, f"its totals differ from the sums over its shards ({sums})", remake)
    return manifest


def no_folder(path: Path) -> str:
    """Why a path that is no folder is refused."""
    return "is a file, not a folder" if path.exists() else "there is no such folder"


@contextmanager
def reading(path: Path | str, remedy: str = "Check the path and its permissions") -> Iterator[None]:
    """Makes a UserError of the block's OSError: the system does not let us read this file or folder."""
    try:
        yield
    except OSError as error:
        raise UserError(path, f"cannot be read ({error.strerror})", remedy) from None


def make_folder(path: Path) -> None:
    """Make an output folder, where it is not there. Raises UserError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(path, f"cannot be made ({error.strerror})", "Choose another output folder") from None


def file_size(path: Path) -> int:
    """Bytes of a file. Raises UserError."""
    with reading(path):
        return path.stat().st_size


def file_sha256(path: Path) -> str:
    """sha256 of a file, read in pieces. Raises UserError: it cannot be read."""
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_md5(path: Path) -> str:
    """MD5 of a file, read in pieces. Raises UserError: it cannot be read."""
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that gets its name when it is finished and on disk. When the block raises, nothing stays; a
    killed process leaves a file of another name, which ends in ``.tmp``. Raises UserError: it cannot be written; also
    for any OSError of the block."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise UserError(path, reason, "Free some space or choose another folder") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that it is there as a whole or not at all; see `whole_file`."""
    with whole_file(path) as file:
        file.write(data)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """`write_atomically` of a document that people may read."""
    write_atomically(path, (json.dumps(document, indent=1) + "\n").encode())
