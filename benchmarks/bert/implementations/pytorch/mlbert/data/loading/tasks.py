"""Batches of task rows: [CLS] text [SEP], or [CLS] first [SEP] second [SEP] as segments 0
and 1, unpadded; with the special tokens and segments of the tokenizer.

A list of labels is stored as a batch's ``masked_labels``: for a set of classes at position 0, for
tags of words at each word's first piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from mlbert.data.batches import HostBatch, StaticShape
from mlbert.data.formats.order import RankSlice, even_parts
from mlbert.data.formats.permutation import Permutation
from mlbert.data.formats.ragged import Ragged, Row, ids_dtype
from mlbert.data.formats.tasks import TaskRows
from mlbert.data.formats.tokenizer import Tokenizer
from mlbert.data.loading.source import EvaluationBatches, StepSource
from mlbert.host.errors import UserError


def truncated(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the lengths of a pair after truncation to ``room`` tokens.

    As in BERT's published code, tokens are removed from the end of the longer text,
    or of the second if both are equal.
    """
    second = min(second, max(room - first, room // 2))
    return min(first, room - second), second


def encode(
    rows: TaskRows,
    tokenizer: Tokenizer,
    max_seq_length: int,
    warn: Callable[[str], None] | None = None,
) -> Ragged:
    """Return the sequences of all rows, truncated to ``max_seq_length`` tokens,
    with labels (0 if the rows have none).

    ``warn`` is called once with the number of rows that were truncated, if there are any.
    """
    if rows.words is not None:
        return encode_words(rows, tokenizer, max_seq_length, warn)[0]
    label_lists = rows.label_lists or [[]] * len(rows)
    cls = [tokenizer.cls_id]
    sep = [tokenizer.sep_id]
    between = tokenizer.special.frame.between
    encoded = [tokenizer.encode_all(texts) for texts in rows.texts]

    def text(column: int, row: int) -> list[int]:
        ids, offsets = encoded[column]
        return ids[offsets[row] : offsets[row + 1]].tolist()

    def sequences() -> Iterator[Row]:
        for row in range(len(rows)):
            first = text(0, row)
            if len(encoded) == 1:
                tokens = [*cls, *first[: max_seq_length - 2], *sep]
                yield tokens, len(tokens), False, [0] * len(label_lists[row]), label_lists[row]
            else:
                second = text(1, row)
                most = max_seq_length - 2 - len(between)  # tokens of both texts
                a, b = truncated(len(first), len(second), most)
                tokens = [*cls, *first[:a], *between, *second[:b], *sep]
                has_segments = tokenizer.special.frame.has_segments
                end_of_first = 1 + a + len(between) if has_segments else len(tokens)
                labels = label_lists[row]
                yield tokens, end_of_first, False, [0] * len(labels), labels

    special_tokens = 2 + (len(between) if len(encoded) == 2 else 0)
    whole_lengths = special_tokens + sum(np.diff(offsets) for _, offsets in encoded)
    num_cut = int(np.count_nonzero(whole_lengths > max_seq_length))
    if num_cut and warn is not None:
        what = f"{num_cut:,} of {len(rows):,} rows are longer than {max_seq_length} tokens"
        warn(f"warning: {rows.path}: {what} and are cut")
    labels = np.zeros(len(rows), np.float32) if rows.labels is None else rows.labels
    return replace(Ragged.from_rows(sequences(), _dtype(rows, tokenizer)), labels=labels)


def encode_words(
    rows: TaskRows,
    tokenizer: Tokenizer,
    max_seq_length: int,
    warn: Callable[[str], None] | None = None,
) -> tuple[Ragged, list[list[int]]]:
    """Return the sequences of rows of words, and the words of each row that have a label.

    Words are tokenized one by one, each with the white space before it. One has no label if it has
    no piece, or if its first piece is beyond ``max_seq_length``; ``warn`` is called once with the
    number of rows with such words. Without labels, label 0 marks the words.
    """
    assert rows.words is not None
    counts = [len(words) for words in rows.words]
    ids, starts = tokenizer.encode_all([word for words in rows.words for word in words])
    most = max_seq_length - 2
    sequences: list[Row] = []
    kept: list[list[int]] = []
    first_word = 0
    num_cut = 0
    for row, count in enumerate(counts):
        bounds = starts[first_word : first_word + count + 1] - starts[first_word]
        pieces = ids[starts[first_word] : starts[first_word + count]][:most].tolist()
        first_word += count
        places = bounds[:-1]
        chosen = np.flatnonzero((np.diff(bounds) > 0) & (places < most)).tolist()
        num_cut += int(bounds[-1]) > most
        labels = [0] * len(chosen)
        if rows.label_lists is not None:
            labels = [rows.label_lists[row][word] for word in chosen]
        tokens = [tokenizer.cls_id, *pieces, tokenizer.sep_id]
        positions = [1 + int(places[word]) for word in chosen]
        sequences.append((tokens, len(tokens), False, positions, labels))
        kept.append(chosen)
    if num_cut and warn is not None:
        what = f"{num_cut:,} of {len(rows):,} rows are longer than {max_seq_length} tokens"
        warn(f"warning: {rows.path}: {what} and are cut")
    no_labels = np.zeros(len(rows), np.float32)
    return replace(Ragged.from_rows(sequences, _dtype(rows, tokenizer)), labels=no_labels), kept


def _dtype(rows: TaskRows, tokenizer: Tokenizer) -> np.dtype:
    """Return the type of ids, which lists of labels are stored in, too."""
    classes = 1 + max((max(labels, default=0) for labels in rows.label_lists or ()), default=0)
    return ids_dtype(max(tokenizer.vocab_size, classes))


def most_labels(parts: Sequence[TaskRows]) -> int:
    """Return the most labels of a row that has a list of them, 0 without lists."""
    return max((len(labels) for rows in parts for labels in rows.label_lists or ()), default=0)


def budget_of(sequences: int, max_seq_length: int, labels: int = 0) -> StaticShape:
    """Return the maximum sizes of a micro-batch; ``labels``: most of a list of labels."""
    return replace(
        StaticShape.rounded(
            sequences * max_seq_length, sequences, sequences * labels, max_seq_length
        ),
        has_labels=True,
    )


class TaskSource(StepSource):
    """Endless optimizer steps over a task's training rows; each epoch uses each row once.

    Args:
        rows: must have labels; texts are tokenized in `open`.
        tokenizer, max_seq_length: see `encode`.
        share: this rank's slice of a full step. An epoch's last step may be smaller; it is dropped
            if it has fewer rows than there are micro-batches.
        drop_last: drop every step that is not full.
        seed: of the shuffling of each epoch; None keeps the order of the rows.
        warn: see `encode`.
    """

    def __init__(
        self,
        rows: TaskRows,
        tokenizer: Tokenizer,
        *,
        max_seq_length: int,
        share: RankSlice,
        drop_last: bool,
        seed: int | None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._warn = warn
        self._rows = rows
        self._tokenizer = tokenizer
        self._max_tokens = max_seq_length
        self._share = share
        self._seed = seed
        self._encoded: Ragged | None = None
        self.steps_per_epoch = steps_per_epoch(len(rows), share, drop_last)
        if self.steps_per_epoch == 0:
            reason = f"has {len(rows)} rows, but one step takes {share.global_units}"
            raise UserError(
                "data.too-small", rows.path, reason, "Lower BATCHSIZE or give more rows"
            )
        identity = {
            "seed": seed,
            "global_batch": share.global_units,
            "data": rows.identity,
            "drop_last": drop_last,
        }
        super().__init__(rows.path, identity)

    def open(self) -> None:
        """Tokenize all texts."""
        self._encoded = encode(self._rows, self._tokenizer, self._max_tokens, self._warn)

    def batches_of(self, step: int) -> list[HostBatch]:
        """See `StepSource.batches_of`."""
        assert self._encoded is not None, "open() first"
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        share = self._share
        first = step_in_epoch * self._share.global_units
        count = min(share.global_units, len(self._rows) - first)
        mine = np.array_split(np.arange(count), share.world_size)[share.rank]
        batches = []
        for units in np.array_split(mine, share.accumulation):
            chosen = self._order(epoch, first + units)
            batches.append(
                HostBatch.of_sequences(
                    self._encoded.take(chosen), units, self._max_tokens, self.locks_pages
                )
            )
        return batches

    def _order(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return (
            positions
            if self._seed is None
            else Permutation(len(self._rows), (self._seed, epoch))(positions)
        )


def steps_per_epoch(num_rows: int, share: RankSlice, drop_last: bool) -> int:
    """Return the optimizer steps per epoch, see `TaskSource`."""
    full, rest = divmod(num_rows, share.global_units)
    return full + (not drop_last and rest >= share.world_size * share.accumulation)


class TaskEvalSet(EvaluationBatches):
    """This rank's share of the rows of one or more files;
    concatenating the ranks gives all rows in order, each once.

    Args:
        parts: rows of each file.
        tokenizer, max_seq_length: see `encode`.
        batch_size: maximum rows per batch.
        rank, world_size: of this process.
        warn: see `encode`.
    """

    def __init__(
        self,
        parts: Sequence[TaskRows],
        tokenizer: Tokenizer,
        *,
        max_seq_length: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._warn = warn
        self._parts = parts
        self._tokenizer = tokenizer
        self._max_tokens = max_seq_length
        self._batch_size = batch_size
        self.num_examples = sum(len(part) for part in parts)
        self._mine = even_parts(self.num_examples, rank, world_size, batch_size)

    @property
    def static_shapes(self) -> tuple[StaticShape, ...]:
        """See `mlbert.data.loading.pretraining.EvalSet`."""
        whole = budget_of(self._batch_size, self._max_tokens, most_labels(self._parts))
        return (*whole.smaller_ones(), whole)

    def open(self) -> None:
        """Tokenize the texts and build this rank's batches."""
        encoded = Ragged.concatenate(
            [encode(part, self._tokenizer, self._max_tokens, self._warn) for part in self._parts]
        )
        self._batches = [
            HostBatch.of_sequences(encoded.take(chosen), chosen, self._max_tokens)
            for chosen in self._mine
        ]
