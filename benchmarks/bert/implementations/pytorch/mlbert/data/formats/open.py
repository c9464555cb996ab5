"""Detects the format of a data set by its files, describes it and opens it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import ModuleType

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.base import Store, StoreInfo
from mlbert.data.formats.bins import BINS, BinnedStore, describe_bins, open_bins
from mlbert.data.formats.checksums import FileChecks, listed_sums
from mlbert.data.formats.manifest import (
    MANIFEST,
    SHARD_NAME,
    check_folder,
    read_manifest,
    vocabulary_sha256,
)
from mlbert.data.formats.prepared import ShardSet, info_of
from mlbert.data.formats.static_masking import MASKED_SHARE, MAX_PREDICTIONS
from mlbert.data.formats.tfrecord_plain import LIST, Widths
from mlbert.host.errors import UserError
from mlbert.host.files import reading
from mlbert.host.registry import Choice, Registry

ACCEPTED = (
    "a prepared set (manifest.json), bins (bins.json), TFRecord files, "
    "HDF5 shards in NVIDIA's fixed-length, "
    "variable-length or packed form, or an MDS set of masked samples (index.json)"
)

# Formats of other programs, in the order in which a folder is compared with them.
FOREIGN_FORMATS = Registry(
    {
        "mds": Choice("mlbert.data.formats.mds_samples"),
        "tfrecord": Choice("mlbert.data.formats.tfrecord_store"),
        "nvidia": Choice("mlbert.data.formats.nvidia"),
    }
)
# Written by the step that makes the records.
_RECORDS_NOTE = re.compile(r"\.part-\d{5}-of-\d{5}\.tfrecord\.json")

IN_MEMORY_BYTES = 4 << 30  # sets up to this size are loaded into memory


def describe(folder: Path | str, most: Widths | None = None) -> StoreInfo:
    """Describe the set in ``folder``.

    If ``most``, the limits of a sequence, is given, no record is read, not even the first one of
    TFRecords. So the call is allowed before ``run_start``, and `check_opened` compares the limits
    later.

    Raises UserError if there is no such folder, no set in it, or the set is inconsistent.
    """
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        return info_of(read_manifest(folder))
    if (folder / BINS).exists():
        return describe_bins(folder)
    module = _foreign(folder)
    can_limit = module.__name__.endswith(".tfrecord_store")
    return module.describe(folder, most) if can_limit else module.describe(folder)


def widths_at_most(
    max_seq_length: int | None, max_predictions: int | None, shape: BertConfig
) -> Widths:
    """Return the limits of a sequence: MAX_SEQ_LENGTH and MAX_PREDICTIONS_PER_SEQ if set, otherwise
    the model's positions and the benchmark's share of masked tokens.
    """
    tokens = max_seq_length or shape.max_position_embeddings
    return Widths(tokens, max_predictions or min(MAX_PREDICTIONS, math.ceil(MASKED_SHARE * tokens)))


def check_opened(known: StoreInfo, found: StoreInfo) -> None:
    """Compare an opened set (``found``) with its earlier description.

    Raises UserError if its sequences are longer or have more masked tokens.
    """
    for name, setting in (
        ("max_seq_length", "MAX_SEQ_LENGTH"),
        ("max_predictions", "MAX_PREDICTIONS_PER_SEQ"),
    ):
        expected = getattr(known, name)
        there = getattr(found, name)
        if there > expected:
            what = "tokens" if name == "max_seq_length" else "masked tokens"
            reason = f"has sequences of {there} {what}, but {expected} were expected"
            remedy = f"Set {setting}={there}; the model needs as many positions as tokens"
            raise UserError("config.conflict", known.folder, reason, remedy)


def open_store(
    folder: Path | str, verify: bool | None = None, checks: FileChecks | None = None
) -> Store:
    """Open the set in ``folder``, in any format.

    For ``verify`` and ``checks`` see `mlbert.data.formats.prepared.ShardSet.open`; files of other
    formats are compared with the list written by `mlbert prepare verify`. Raises UserError as
    `describe`, or if a file is missing or damaged.
    """
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        return ShardSet.open(folder, verify, checks)
    if (folder / BINS).exists():
        return open_bins(folder, verify, checks)
    store = _foreign(folder).open_folder(folder)
    for number, file in enumerate(listed_sums(folder)):
        if checks is not None:
            checks.add(number, file)
        elif verify is not False and (problem := file.problem()):
            raise problem
    return store


def in_memory(store: Store) -> Store:
    """Load small prepared sets into memory for faster gathering; return other stores unchanged."""
    parts = store.bins if isinstance(store, BinnedStore) else [store]
    shards = [part for part in parts if isinstance(part, ShardSet)]
    if (
        len(shards) < len(parts)
        or sum(part.manifest.num_bytes for part in shards) > IN_MEMORY_BYTES
    ):
        return store
    loaded = [part.load() for part in shards]
    return BinnedStore(store.info, loaded) if isinstance(store, BinnedStore) else loaded[0]


def _foreign(folder: Path) -> ModuleType:
    """Return the module for this folder's format, imported on demand because each needs other
    libraries.
    """
    check_folder(folder, f"Give {ACCEPTED}")
    if inside := sorted(
        path.parent.name for name in (MANIFEST, BINS) for path in folder.glob(f"*/{name}")
    ):
        reason = f"is not a finished data set, but contains {', '.join(inside)}"
        raise UserError("data.format", folder, reason, "Give one of these folders")
    with reading(folder):
        names = [path.name for path in folder.iterdir()]
    if any(SHARD_NAME.fullmatch(name) for name in names):
        reason = f"contains shards but no {MANIFEST}: it was not finished, or lost it"
        remedy = "Run the `mlbert prepare` that makes it again, or give another folder"
        raise UserError("data.format", folder, reason, remedy)
    if LIST not in names and any(_RECORDS_NOTE.fullmatch(name) for name in names):
        reason = f"contains TFRecords but no {LIST}: it was not finished"
        raise UserError(
            "data.incomplete", folder, reason, "Run the `mlbert prepare` that makes it again"
        )
    for name in FOREIGN_FORMATS:
        module: ModuleType = FOREIGN_FORMATS.load(name)
        if module.accepts(folder):
            return module
    raise UserError("data.missing", folder, "contains no data set", f"Accepted: {ACCEPTED}")


def check_vocabulary(info: StoreInfo, vocab_file: Path) -> None:
    """Check that a set was made with this vocabulary file; sets that do not record theirs pass.

    Raises UserError if the file cannot be read or is a different vocabulary.
    """
    found = vocabulary_sha256(vocab_file)
    if info.vocabulary_sha256 not in (None, found):
        reason = (
            f"is not the vocabulary that {info.folder} was prepared with (sha256 {found[:12]}...)"
        )
        remedy = f"Use the one with sha256 {info.vocabulary_sha256[:12]}..."
        raise UserError("vocabulary.mismatch", vocab_file, reason, remedy)


def check_same_vocabulary(train: StoreInfo, evaluation: StoreInfo) -> None:
    """Check that two sets have the same vocabulary, if both record theirs.

    Raises UserError if they differ.
    """
    if (
        None not in (known := {train.vocabulary_sha256, evaluation.vocabulary_sha256})
        and len(known) > 1
    ):
        reason = f"was prepared with a different vocabulary than {train.folder}"
        raise UserError(
            "vocabulary.mismatch", evaluation.folder, reason, "Prepare both with the same vocab.txt"
        )


def check_shape(data: StoreInfo, shape: BertConfig, shape_file: Path) -> None:
    """Check that a set fits the model's vocabulary size and positions.

    Raises UserError if it does not.
    """
    if data.vocab_size not in (None, shape.vocab_size):
        reason = f"has a vocabulary of {data.vocab_size}, but {shape_file} says {shape.vocab_size}"
        remedy = (
            "Set BERT_CONFIG to the configuration of this vocabulary, or prepare with --vocab-size"
        )
        raise UserError("data.model-mismatch", data.folder, reason, remedy)
    if data.max_seq_length > shape.max_position_embeddings:
        positions = shape.max_position_embeddings
        longest = data.max_seq_length
        reason = f"has sequences of {longest} tokens, but the model has {positions} positions"
        remedy = "Raise max_position_embeddings or prepare with a smaller --max-seq-length"
        raise UserError("data.model-mismatch", data.folder, reason, remedy)
