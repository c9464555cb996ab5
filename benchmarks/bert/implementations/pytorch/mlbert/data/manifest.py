"""The manifest of a prepared set: what it holds, made from which vocabulary, by which options.

Reading it touches no training data, so it is allowed before ``run_start``.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlbert.core.errors import UserError

FORMAT = "mlbert-ragged"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MAX_VOCAB_SIZE = 65_536  # tokens are stored in 16 bits
NO_ROOM = "Free some space or choose another folder"


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` says."""

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


def read_manifest(folder: Path | str) -> Manifest:
    """Read the manifest of a prepared set: counts and vocabulary, no training data (allowed before run_start).

    Raises:
        UserError: no manifest, unreadable, another format, or fields that contradict each other.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    remake = "Prepare the data again with `mlbert prepare`"
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        reason = "the folder has no manifest.json" if folder.is_dir() else "there is no such folder"
        raise UserError(folder, reason, "Give a folder that `mlbert prepare` finished") from None
    except OSError as error:
        raise UserError(path, f"cannot be read ({error.strerror})", "Check its permissions") from None
    try:
        document = json.loads(raw)
        if document["format"] != FORMAT or document["version"] != FORMAT_VERSION:
            found = f"{document['format']} version {document['version']}"
            raise UserError(path, f"is {found}, this program reads {FORMAT} version {FORMAT_VERSION}", remake)
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
        )
        sums = {key: sum(int(shard[key]) for shard in manifest.shards) for key in ("num_sequences", "num_tokens")}
        names = [str(shard["file"]) for shard in manifest.shards]
    except UserError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(path, f"is not a manifest of a prepared set ({error!r})", remake) from None
    if len(set(names)) != len(names):
        raise UserError(path, "lists a shard twice", remake)
    if sums != {"num_sequences": manifest.num_sequences, "num_tokens": manifest.num_tokens}:
        raise UserError(path, f"its totals differ from the sums over its shards ({sums})", remake)
    return manifest


def file_sha256(path: Path) -> str:
    """sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that it is there as a whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(
            path, f"cannot be written ({error.strerror})", "Free some space or choose another folder"
        ) from None


def check_vocabulary(manifest: Manifest, vocab_file: Path) -> None:
    """Make sure that a prepared set was made with this vocabulary file.

    Raises:
        UserError: the file cannot be read, or it is another vocabulary.
    """
    try:
        found = file_sha256(vocab_file)
    except OSError as error:
        raise UserError(vocab_file, f"cannot be read ({error.strerror})", "Give the vocabulary's vocab.txt") from None
    if found != manifest.vocabulary_sha256:
        reason = f"is not the vocabulary that {manifest.path.parent} was prepared with (sha256 {found[:12]}...)"
        raise UserError(vocab_file, reason, f"Use the one with sha256 {manifest.vocabulary_sha256[:12]}...")


def check_same_vocabulary(train: Manifest, evaluation: Manifest) -> None:
    """Make sure that two prepared sets share one vocabulary.

    Raises:
        UserError: they do not.
    """
    if train.vocabulary_sha256 != evaluation.vocabulary_sha256:
        reason = f"was prepared with another vocabulary than {train.path.parent}"
        raise UserError(evaluation.path.parent, reason, "Prepare both with the same vocab.txt")
