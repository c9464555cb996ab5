"""TFRecords read by tf.data in the published program's order,
from any file system that TensorFlow supports.

Training: files are put in random order, divided among hosts, repeated and shuffled again. Eight are
read at a time; their records pass through a shuffle buffer of 1500 and are batched. Evaluation: the
first records of all files, sorted by name, each once. Checksums are checked, but TensorFlow does
not notice a file truncated within the first 11 bytes of a record.

Legend: B rows, L tokens per row, P predictions per row; S = 1.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from mlbert.data.formats.base import StoreInfo
from mlbert.data.formats.checksums import FileSum, listed_sums
from mlbert.data.formats.index_cache import content_of
from mlbert.data.formats.tfrecord import RESTORE, ExampleReader, read_widths
from mlbert.data.formats.tfrecord_plain import (
    FOOTER_BYTES,
    HEADER_BYTES,
    LIST,
    BadExample,
    Widths,
    parse_example,
)
from mlbert.data.formats.tfrecord_store import describe
from mlbert.host.errors import UserError
from tf2_bert.distributed import distributed
from tf2_bert.messages import plain
from tf2_bert.rows import Rows
from tf2_bert.store_rows import RowShape

FILES_AT_A_TIME = 8
SHUFFLED_RECORDS = 1500
REORDERED = "DETERMINISTIC=0: the TFRecords continue in another order"
_PER_TOKEN = ("input_ids", "input_mask", "segment_ids")
_PER_PREDICTION = ("masked_lm_positions", "masked_lm_ids")


@dataclass(frozen=True)
class Files:
    """TFRecord files that belong together."""

    patterns: str  # as given
    names: tuple[str, ...]  # sorted
    identity: (
        str  # as `mlbert.data.formats.tfrecord_store.describe` gives it for a folder of these files
    )
    content: str | None  # likewise
    widths: Widths  # of every record
    listed: tuple[StoreInfo, ...] = ()  # contents of their folders' `instances.json`, if present
    sums: tuple[FileSum, ...] = ()  # of the files in the checksum lists

    @property
    def shape(self) -> RowShape:
        """Shape of the rows, with one sequence each."""
        return RowShape(*self.widths, 1)


def match_files(patterns: str, variable: str, widths: Widths) -> Files:
    """Return the files that match comma-separated globs. Only names and sizes are read, no records.

    Args:
        patterns: globs, local or on another file system such as gs://.
        variable: the setting that they come from.
        widths: required list sizes of the records, see `check_widths`.

    Raises UserError: a glob matches nothing, a file is empty, or a folder does not match its list.
    """
    found: set[str] = set()
    for pattern in filter(None, map(str.strip, patterns.split(","))):
        matched = _query(pattern, tf.io.gfile.glob)
        if not matched:
            remedy = f"Set {variable} to comma-separated globs such as /data/part-*"
            raise UserError("file.missing", pattern, "no file matches", remedy)
        found.update(matched)
    names = sorted(found)
    if not names:
        reason = "names no files"
        raise UserError(
            "config.missing",
            variable,
            reason,
            "Set it to comma-separated globs such as /data/part-*",
        )
    sized = []
    for name in names:
        if _query(name, tf.io.gfile.isdir):
            reason = "is a folder"
            raise UserError(
                "file.wrong-kind",
                name,
                reason,
                f"Set {variable} to globs of files, such as {name}/part-*",
            )
        if (size := _query(name, tf.io.gfile.stat).length) < HEADER_BYTES + FOOTER_BYTES:
            raise UserError("data.empty", name, "contains no records", RESTORE)
        sized.append((os.path.basename(name), size))
    folders = sorted({Path(name).parent for name in names})
    content = content_of(folders[0], [Path(name) for name in names]) if len(folders) == 1 else None
    identity = hashlib.sha256(json.dumps(sized).encode()).hexdigest()
    listed = tuple(describe(folder, widths) for folder in folders if (folder / LIST).exists())
    sums = tuple(
        file for folder in folders for file in listed_sums(folder) if str(file.path) in found
    )
    return Files(patterns, tuple(names), identity, content, widths, listed, sums)


def check_widths(files: Files) -> None:
    """Check the list sizes of the first good record.

    Raises UserError if they differ or the file is not a TFRecord.
    """
    own = _first_widths(files.names[0])
    expected = files.widths
    if own != expected:
        reason = (
            f"its records have {own.max_seq_length} tokens and {own.max_predictions} predictions, "
            "but "
        )
        reason += f"{expected.max_seq_length} and {expected.max_predictions} are configured"
        remedy = "Set MAX_SEQ_LENGTH and MAX_PREDICTIONS_PER_SEQ to those of the files"
        raise UserError("config.conflict", files.names[0], reason, remedy)


def _query(name: str, function: Any) -> Any:
    """Query the file system. Raises UserError if that fails."""
    try:
        return function(name)
    except tf.errors.OpError as error:
        reason = f"cannot be read ({plain(error)})"
        raise UserError(
            "file.unreadable", name, reason, "Check the path and the access to it"
        ) from error


def _first_widths(name: str) -> Widths:
    if os.path.exists(name):
        return read_widths(Path(name), skip_bad=True)
    try:
        for record in tf.data.TFRecordDataset(name).take(1).as_numpy_iterator():
            return parse_example(record, None)[1]
    except (tf.errors.OpError, BadExample) as error:
        raise UserError(
            "data.damaged", name, f"its first record is damaged ({plain(error)})", RESTORE
        ) from error
    raise UserError("data.empty", name, "contains no records", RESTORE)


class _TFRecordData:
    """Base class of training and evaluation from TFRecords.

    Args:
        files: see `match_files`.
        rows: B, per replica's batch.
        vocab_size: token ids must be smaller.
        deterministic: read in the same order each time, at some cost in speed.
    """

    resume_note: str | None = None

    def __init__(self, files: Files, rows: int, *, vocab_size: int, deterministic: bool) -> None:
        self.files = files
        self.shape = files.shape
        self._rows = rows
        self._vocab_size = vocab_size
        self._deterministic = deterministic

    def translate_error(self, error: BaseException) -> UserError | None:
        """Return why reading failed, in one line with the file's name,
        or None if the data did not cause ``error``.
        """
        return translate_error(error, self.files, self._vocab_size)

    def _finish(self, dataset: Any) -> Any:
        options = tf.data.Options()
        options.deterministic = self._deterministic
        return dataset.prefetch(tf.data.AUTOTUNE).with_options(options)

    def _parse(self, names: Any, records: Any) -> Rows:
        return parse(names, records, self.files.widths, self._vocab_size)


class TFRecordTraining(_TFRecordData):
    """Endless training rows in the order given in the module docstring, shuffled by ``seed``."""

    def __init__(
        self, files: Files, rows: int, *, vocab_size: int, deterministic: bool, seed: int
    ) -> None:
        super().__init__(files, rows, vocab_size=vocab_size, deterministic=deterministic)
        self._seed = seed
        self.resume_note = None if deterministic else REORDERED

    def open(self) -> None:
        """Check the first record. Raises UserError if its list sizes differ."""
        check_widths(self.files)

    def dataset(self, strategy: Any, first_step: int = 0) -> Any:
        """Return a tf.distribute.DistributedDataset with B rows for each replica and step.

        A resumed run reads the records before ``first_step`` again, without parsing them. Raises
        UserError if there are fewer files than hosts.
        """
        return distributed(strategy, lambda context: self.pipeline(context, first_step))

    def pipeline(self, context: Any, first_step: int = 0) -> Any:
        """Return one host's part of `dataset`; ``context`` is a tf.distribute.InputContext."""
        hosts = context.num_input_pipelines
        host = context.input_pipeline_id
        if len(self.files.names) < hosts:
            reason = f"{len(self.files.names)} files cannot be divided among {hosts} hosts"
            raise UserError(
                "data.too-small", self.files.patterns, reason, "Split the data into more files"
            )
        # Every host must draw the same file order, so that their shares do not overlap.
        draws = np.random.default_rng(self._seed)
        order = draws.permutation(len(self.files.names))[host::hosts]
        # Op seeds for this host's files and records.
        file_seed, record_seed = (
            np.random.default_rng([self._seed, host]).integers(1, 2**31, 2).tolist()
        )
        dataset = tf.data.Dataset.from_tensor_slices([self.files.names[index] for index in order])
        dataset = dataset.repeat().shuffle(len(order), seed=file_seed)
        dataset = dataset.interleave(
            _named_records,
            cycle_length=FILES_AT_A_TIME,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=self._deterministic,
        )
        dataset = dataset.shuffle(SHUFFLED_RECORDS, seed=record_seed).batch(
            self._rows, drop_remainder=True
        )
        dataset = dataset.skip(first_step * (context.num_replicas_in_sync // hosts))
        return self._finish(dataset.map(self._parse, num_parallel_calls=tf.data.AUTOTUNE))


class TFRecordEvaluation(_TFRecordData):
    """The first ``num_examples`` records of the files in order (all if None),
    each once over all replicas.
    """

    def __init__(
        self, files: Files, rows: int, num_examples: int | None, *, vocab_size: int
    ) -> None:
        super().__init__(files, rows, vocab_size=vocab_size, deterministic=True)
        self._wanted = num_examples
        self.num_examples = num_examples or 0  # set by `open` if None

    def open(self) -> None:
        """Count the records.

        Raises UserError: too few records, other list sizes, or a damaged file.
        """
        check_widths(self.files)
        records = tf.data.TFRecordDataset(list(self.files.names)).take(self._wanted or -1)
        try:
            available = int(records.reduce(np.int64(0), lambda count, _: count + 1))
        except tf.errors.OpError as error:
            raise self.translate_error(error) or error from error
        if available < (self._wanted or 1):
            reason = f"it contains {available} examples, but {self._wanted or 1} are requested"
            remedy = f"Set NUM_EVAL_EXAMPLES from 1 to {available}"
            raise UserError("data.too-small", self.files.patterns, reason, remedy)
        self.num_examples = available

    def steps(self, num_replicas: int) -> int:
        """Return the batches per replica; call `open` first."""
        return -(-self.num_examples // (self._rows * num_replicas))

    def dataset(self, strategy: Any) -> Any:
        """See `tf2_bert.data.EvaluationData.dataset`."""
        return distributed(strategy, self.pipeline)

    def pipeline(self, context: Any) -> Any:
        """Return one host's part of `dataset`; ``context`` is a tf.distribute.InputContext."""
        hosts = context.num_input_pipelines
        host = context.input_pipeline_id
        replicas = context.num_replicas_in_sync // hosts
        block = self._rows * replicas  # rows per step of a host
        records = tf.data.Dataset.from_tensor_slices(list(self.files.names)).flat_map(
            _named_records
        )
        dataset = records.take(self.num_examples).batch(block)
        dataset = dataset.map(lambda names, records: _filled(self._parse(names, records), block))
        missing = self.steps(context.num_replicas_in_sync) * hosts - -(-self.num_examples // block)
        empty = Rows(*(tf.zeros(spec.shape, spec.dtype) for spec in dataset.element_spec))
        dataset = dataset.concatenate(tf.data.Dataset.from_tensors(empty).repeat(missing)).shard(
            hosts, host
        )
        dataset = dataset.map(
            lambda rows: Rows(*(tf.reshape(x, [replicas, self._rows, x.shape[1]]) for x in rows))
        )
        return self._finish(dataset.unbatch())


def _named_records(name: Any) -> Any:
    """Return the records of a file, each paired with the file's name."""
    return tf.data.TFRecordDataset(name).map(lambda record: (name, record))


def parse(names: Any, records: Any, widths: Widths, vocab_size: int) -> Rows:
    """Parse serialized tf.train.Examples (see `mlbert.data.formats.tfrecord_plain`) into rows of
    one sequence each.

    Slots without a token or prediction become 0.

    Args:
        names: string [B], the file of each record, for error messages.
        records: string [B].
        widths: required list sizes of each record.
        vocab_size: token ids must be smaller.

    Raises tf.errors.InvalidArgumentError when the dataset runs; see `translated`.
    """
    length, predictions = widths
    features = {name: tf.io.FixedLenFeature([length], tf.int64) for name in _PER_TOKEN}
    features |= {name: tf.io.FixedLenFeature([predictions], tf.int64) for name in _PER_PREDICTION}
    features["masked_lm_weights"] = tf.io.FixedLenFeature([predictions], tf.float32)
    features["next_sentence_labels"] = tf.io.FixedLenFeature([1], tf.int64)
    found = tf.io.parse_example(records, features, example_names=names)
    mask = found["input_mask"]
    weights = found["masked_lm_weights"]
    predicted = tf.cast(weights, tf.int64)
    ids = found["input_ids"] * mask
    segments = found["segment_ids"] * mask
    positions = found["masked_lm_positions"] * predicted
    labels = found["masked_lm_ids"] * predicted
    next_sentence = found["next_sentence_labels"]
    limits = [
        (ids, vocab_size),
        (segments, 2),
        (mask, 2),
        (positions, length),
        (labels, vocab_size),
    ]
    limits += [(predicted, 2), (next_sentence, 2)]
    bad = [tf.reduce_any((values < 0) | (values >= limit), 1) for values, limit in limits]
    outside = tf.reduce_any(
        tf.stack([*bad, tf.reduce_any(weights != tf.cast(predicted, tf.float32), 1)]), 0
    )
    message = ["a value is out of range in", tf.boolean_mask(names, outside)]
    with tf.control_dependencies(
        [tf.debugging.Assert(~tf.reduce_any(outside), message, summarize=1)]
    ):
        mask = tf.cast(mask, tf.int32)
    return Rows(
        input_ids=tf.cast(ids, tf.int32),
        segment_ids=tf.cast(segments, tf.int32),
        sequence_ids=mask,
        position_ids=tf.range(length) * mask,
        masked_positions=tf.cast(positions, tf.int32),
        masked_labels=tf.cast(labels, tf.int32),
        masked_weights=weights,
        first_positions=tf.zeros_like(next_sentence, tf.int32),
        next_sentence_labels=tf.cast(next_sentence, tf.int32),
        next_sentence_weights=tf.ones_like(next_sentence, tf.float32),
    )


def _filled(rows: Rows, num_rows: int) -> Rows:
    """Pad with empty rows to ``num_rows``."""
    filled = (tf.pad(x, [[0, num_rows - tf.shape(x)[0]], [0, 0]]) for x in rows)
    return Rows(
        *(tf.ensure_shape(x, [num_rows, y.shape[1]]) for x, y in zip(filled, rows, strict=True))
    )


def translate_error(error: BaseException, files: Files, vocab_size: int) -> UserError | None:
    """Return why reading these files failed, or None if they did not cause ``error``.

    The message is one line; for local files it names file, record and byte.
    """
    if not isinstance(error, tf.errors.OpError):
        return None
    named = [
        name
        for name in files.names
        if re.search(re.escape(name) + r"(?![\w-]|\.\w)", error.message)
    ]
    if not named and not isinstance(error, tf.errors.DataLossError):
        return None
    for name in named or files.names:
        if (problem := _problem_of(name, files.widths, vocab_size)) is not None:
            return problem
    reason = f"cannot be read ({plain(error)})"
    return UserError("file.unreadable", named[0] if named else files.patterns, reason, RESTORE)


def _problem_of(name: str, widths: Widths, vocab_size: int) -> UserError | None:
    """Read a file until its first error; return that error, or None."""
    if os.path.exists(name):
        try:
            remedy = f"{RESTORE}, or give the matching BERT_CONFIG"
            for _ in ExampleReader(Path(name), widths=widths, vocab_size=vocab_size, remedy=remedy):
                pass
        except UserError as problem:
            return problem
        return None
    try:
        for _ in tf.data.TFRecordDataset(name):
            pass
    except tf.errors.OpError as problem:
        return UserError("file.unreadable", name, f"cannot be read ({plain(problem)})", RESTORE)
    return None
