"""The manifest of a prepared set: what it holds, made from which vocabulary, by which options.

Reading it touches no training data, so it is allowed before ``run_start``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlbert.core.errors import UserError
from mlbert.core.files import read_plain, write_atomically
from mlbert.store.documents import SHA256, Fields, judging, parse_document, plain_size, reading

FORMAT = "mlbert-ragged"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MAX_VOCAB_SIZE = 65_536  # tokens are stored in 16 bits
MAX_TOKENS = 65_535  # of a sequence or a pack: positions are
SHARD_NAME = re.compile(r"shard-(\d{5})-of-(\d{5})\.h5")
REMAKE = "Restore the file, or remove the folder and prepare the data again"
_TOTALS = ("num_sequences", "num_tokens", "num_masked", "num_packs")


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
    raw = read_plain(path)
    with judging(path, "is not a manifest of a prepared set", remake):
        manifest = _parse(path, raw, remake)
        names = [str(shard["file"]) for shard in manifest.shards]
        if len(set(names)) != len(names):
            raise UserError(path, "lists a shard twice", remake)
        sums = {key: sum(int(shard.get(key, 0)) for shard in manifest.shards) for key in _TOTALS}
        if sums != {key: getattr(manifest, key) for key in sums}:
            raise UserError(path, f"its totals differ from the sums over its shards ({sums})", remake)
        _check_histogram(manifest)
    return manifest


def _parse(path: Path, raw: bytes, remake: str) -> Manifest:
    """Raises ValueError for a field that is missing, or of another type or size than any set has."""
    found = parse_document(raw)
    kind = f"{found.text('format')} version {found.any('version')}"
    if kind != (read := f"{FORMAT} version {FORMAT_VERSION}"):
        raise UserError(path, f"is {kind}, this program reads {read}", remake)
    vocabulary = found.part("vocabulary")
    packs = found.part("packs") if "packs" in found else None
    return Manifest(
        path=path,
        vocabulary_sha256=vocabulary.text("sha256", SHA256),
        vocab_size=vocabulary.number("size", 1, MAX_VOCAB_SIZE),
        max_seq_length=found.number("max_seq_length", 1, MAX_TOKENS),
        max_predictions=found.number("max_predictions", 0, MAX_TOKENS),
        length_histogram=found.numbers("length_histogram"),
        shards=[_shard(entry, packs is not None) for entry in found.parts("shards")],
        provenance=found.part("provenance").values(),
        sha256=hashlib.sha256(raw).hexdigest(),
        num_packs=packs.number("num_packs") if packs else 0,
        max_pack_tokens=packs.number("max_tokens", 1, MAX_TOKENS) if packs else None,
        **{key: found.number(key) for key in _TOTALS[:3]},
    )


def _shard(entry: Fields, packed: bool) -> dict[str, Any]:
    """An entry whose values are such that they can be used."""
    entry.file("file")
    for name in ("sha256", *(["content_sha256"] if "content_sha256" in entry else [])):
        entry.text(name, SHA256)
    for name in ("bytes", *_TOTALS[:3], *(["num_packs"] if packed else [])):
        entry.number(name)
    return entry.values()


def _check_histogram(manifest: Manifest) -> None:
    """Raises ValueError."""
    counts = manifest.length_histogram
    tokens = sum(length * count for length, count in enumerate(counts))
    if len(counts) != manifest.max_seq_length + 1 or (sum(counts), tokens) != (
        manifest.num_sequences,
        manifest.num_tokens,
    ):
        raise ValueError("length_histogram does not fit the totals")


def no_folder(path: Path) -> str:
    """Why a path that is no folder is refused."""
    return "is a file, not a folder" if path.exists() else "there is no such folder"


def make_folder(path: Path) -> None:
    """Make an output folder, where it is not there. Raises UserError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(path, f"cannot be made ({error.strerror})", "Choose another output folder") from None


def file_sha256(path: Path) -> str:
    """sha256 of a file, read in pieces. Raises UserError: it cannot be read."""
    plain_size(path)
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_md5(path: Path) -> str:
    """MD5 of a file, read in pieces. Raises UserError: it cannot be read."""
    plain_size(path)
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """`write_atomically` of a document that people may read."""
    write_atomically(path, json.dumps(document, indent=1) + "\n")
