"""Rows of a stored set for every replica, read in a background thread in the order of
`mlbert.data.formats.order`.

Legend: B rows per replica's batch, L tokens per row, P predictions per row, S sequences per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from mlbert.data.formats.base import Store, StoreInfo
from mlbert.data.formats.bins import check_counts
from mlbert.data.formats.checks import check_rows
from mlbert.data.formats.open import in_memory
from mlbert.data.formats.order import Packs, RankSlice, StepReader, contiguous, make_units
from mlbert.data.formats.ragged import Ragged
from mlbert.host.errors import UserError
from tf2_bert.distributed import distributed
from tf2_bert.rows import Rows
from tf2_bert.store_rows import RowShape, rows_of

PREFETCHED_STEPS = 4


def specs(num_rows: int, shape: RowShape) -> Rows:
    """Return the tf.TensorSpec of each field of ``num_rows`` rows."""
    length, predictions, sequences = shape
    widths = Rows(*[length] * 4, *[predictions] * 3, *[sequences] * 3)
    kinds = {name: tf.float32 if name.endswith("weights") else tf.int32 for name in Rows._fields}
    return Rows(
        **{
            name: tf.TensorSpec([num_rows, width], kinds[name], name)
            for name, width in widths._asdict().items()
        }
    )


class _StoreData:
    """Base class of training and evaluation from a store.

    Args:
        info: description of the set.
        rows: B.
        shape: L, P, S.
        vocab_size: the model's; token ids are checked against it
            if the set does not state its vocabulary size.
        opened: opens the set.

    Attributes:
        failure: the exception that ended the reading thread;
            TensorFlow raises its own error instead.
    """

    resume_note: str | None = None

    def __init__(
        self,
        info: StoreInfo,
        rows: int,
        shape: RowShape,
        *,
        vocab_size: int,
        opened: Callable[[], Store],
    ) -> None:
        self.info = info
        self.shape = shape
        self.failure: Exception | None = None
        self._rows = rows
        self._opened = opened
        self._vocab_size = vocab_size if info.vocab_size is None else info.vocab_size

    def translate_error(self, error: BaseException) -> Exception | None:
        """Return `failure` if ``error`` is a TensorFlow error."""
        return self.failure if isinstance(error, tf.errors.OpError) else None

    def _as_rows(self, ragged: Ragged, per_row: np.ndarray) -> Rows:
        check_rows(ragged, self.info, self._vocab_size)
        return rows_of(ragged, per_row, self._rows, self.shape)

    def _dataset(self, batches: Iterator[Rows], ahead: int) -> Any:
        """Return one host's batches as a tf.data.Dataset;
        a background thread prepares ``ahead`` batches.
        """

        def recording_failure() -> Iterator[Rows]:
            try:
                yield from batches
            except Exception as error:
                self.failure = error
                raise

        return tf.data.Dataset.from_generator(
            recording_failure, output_signature=specs(self._rows, self.shape)
        ).prefetch(ahead)


class StoreTraining(_StoreData):
    """Endless steps over a stored set; step n is a pure function of the settings and n.

    ``bin_counts`` gives the sequences of each length bin in each replica's B rows; by default they
    are proportional. ``seed`` determines packing and order. Other arguments are those of
    `_StoreData`.
    """

    def __init__(
        self,
        info: StoreInfo,
        rows: int,
        shape: RowShape,
        *,
        seed: int,
        vocab_size: int,
        bin_counts: tuple[int, ...] | None = None,
        opened: Callable[[], Store],
    ) -> None:
        super().__init__(info, rows, shape, vocab_size=vocab_size, opened=opened)
        self._seed = seed
        self._bin_counts = bin_counts
        if bin_counts is not None:
            check_counts(info, bin_counts, 1)
        self._store: Store | None = None

    def open(self) -> None:
        """See `tf2_bert.data.TrainingData.open`."""
        self._store = in_memory(self._opened())

    def dataset(self, strategy: Any, first_step: int = 0) -> Any:
        """See `tf2_bert.data.TrainingData.dataset`.

        Raises UserError if the set is too small for one step.
        """
        return distributed(strategy, lambda context: self.pipeline(context, first_step))

    def pipeline(self, context: Any, first_step: int = 0) -> Any:
        """Return one host's part of `dataset`: each step's batches, one replica after another.

        ``context`` is a tf.distribute.InputContext.
        """
        assert self._store is not None, "open() first"
        hosts = context.num_input_pipelines
        replicas = context.num_replicas_in_sync
        local = replicas // hosts
        if self._bin_counts is not None:
            check_counts(self._store.info, self._bin_counts, replicas)
        reader = StepReader(
            self._store,
            # A host's share, split into one part per replica as by `contiguous`.
            RankSlice(self._rows * local, local, context.input_pipeline_id, hosts),
            max_tokens=self.shape.tokens,
            max_sequences=self.shape.sequences,
            bin_counts=self._bin_counts,
            seed=self._seed,
            partition=contiguous,
        )
        if reader.steps_per_epoch == 0:
            reason = f"has {reader.units.count} packs, but one step takes {self._rows * replicas}"
            raise UserError(
                "data.too-small", self.info.folder, reason, "Lower BATCHSIZE or prepare more data"
            )
        return self._dataset(self._batches(reader, first_step), PREFETCHED_STEPS * local)

    def _batches(self, reader: StepReader, step: int) -> Iterator[Rows]:
        while True:
            for part in reader(step):
                yield self._as_rows(part.rows, part.sequences_per_unit)
            step += 1


class StoreEvaluation(_StoreData):
    """The first ``num_examples`` sequences of a stored set (all if None), packed when it is opened.

    Other arguments are those of `_StoreData`. Raises UserError if the set is smaller.
    """

    def __init__(
        self,
        info: StoreInfo,
        rows: int,
        shape: RowShape,
        num_examples: int | None,
        *,
        vocab_size: int,
        opened: Callable[[], Store],
    ) -> None:
        super().__init__(info, rows, shape, vocab_size=vocab_size, opened=opened)
        self._wanted = num_examples
        self.num_examples = num_examples or 0
        if info.num_sequences is not None:
            self._count(info.num_sequences)
        self._units: Packs | None = None

    def open(self) -> None:
        """See `tf2_bert.data.EvaluationData.open`."""
        store = self._opened()
        self._count(len(store))
        self._units = make_units(
            store, self.num_examples, self.shape.tokens, self.shape.sequences, seed=0
        )

    def _count(self, available: int) -> None:
        wanted = available if self._wanted is None else self._wanted
        if not 1 <= wanted <= available:
            reason = f"it contains {available} examples, but {wanted} are requested"
            raise UserError(
                "data.too-small",
                self.info.folder,
                reason,
                f"Set NUM_EVAL_EXAMPLES from 1 to {available}",
            )
        self.num_examples = wanted

    def steps(self, num_replicas: int) -> int:
        """See `tf2_bert.data.EvaluationData.steps`."""
        assert self._units is not None, "open() first"
        return -(-self._units.count // (self._rows * num_replicas))

    def dataset(self, strategy: Any) -> Any:
        """See `tf2_bert.data.EvaluationData.dataset`."""
        return distributed(strategy, self.pipeline)

    def pipeline(self, context: Any) -> Any:
        """Return one host's part of `dataset`; ``context`` is a tf.distribute.InputContext."""
        local = context.num_replicas_in_sync // context.num_input_pipelines
        first = local * context.input_pipeline_id
        replicas = range(first, first + local)
        return self._dataset(
            self._batches(replicas, context.num_replicas_in_sync), PREFETCHED_STEPS * local
        )

    def _batches(self, replicas: range, num_replicas: int) -> Iterator[Rows]:
        assert self._units is not None, "open() first"
        count = self._units.count
        for step in range(self.steps(num_replicas)):
            for replica in replicas:
                start = (step * num_replicas + replica) * self._rows
                chosen = np.arange(min(start, count), min(start + self._rows, count))
                ragged = Ragged.from_rows([])
                per_row = chosen
                if len(chosen):
                    ragged, per_row = self._units.gather(chosen)
                yield self._as_rows(ragged, per_row)
