"""The evaluation set: packed when it is opened, every example exactly once over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mlbert.core.errors import UserError
from mlbert.feed.batch import Batch
from mlbert.feed.packed import check_tokens, make_batch, make_units
from mlbert.store.open import describe, open_store


class EvalSet:
    """This rank's share of the evaluation examples, as batches that stay the same for every evaluation.

    Args:
        data_dir: see `mlbert.store.open.describe`; no sample is read before `open`.
        num_examples: the first so many sequences are used.
        packs_per_batch: most packs of one batch; no two batches differ by more than one, because they may be filled up
            to one shape.
        rank, world_size: this process among all.
        max_sequences_per_pack: most sequences of one pack.
        max_tokens: slots of a pack; None: those of stored packs, or the set's max_seq_length.
        vocab_size: entries of the model's vocabulary, compared with every token id of a set that does not know its own.
    """

    def __init__(
        self,
        data_dir: Path | str,
        num_examples: int,
        packs_per_batch: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        max_sequences_per_pack: int = 3,
        max_tokens: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        assert 0 <= rank < world_size
        self.info = describe(data_dir)
        if self.info.num_sequences is not None or num_examples < 1:
            self._check_size(num_examples, self.info.num_sequences or 0)
        if packs_per_batch < 1:
            raise UserError("EVAL_BATCH_SIZE", f"{packs_per_batch} is not a number of packs", "Set it to 1 or more")
        self.num_examples = num_examples
        self.max_tokens = max_tokens or self.info.max_pack_tokens or self.info.max_seq_length
        self._packs_per_batch = packs_per_batch
        self._max_sequences = max_sequences_per_pack
        self._rank, self._world_size = rank, world_size
        self._vocab_size = vocab_size if self.info.vocab_size is None else None
        self._batches: list[Batch] | None = None

    def open(self) -> None:
        """Read the examples and pack them: the first touch of evaluation data.

        Raises:
            UserError: a file is missing or damaged, or the set is smaller than asked for.
        """
        store = open_store(self.info.folder)
        self._check_size(self.num_examples, len(store))
        units = make_units(store, self.num_examples, self.max_tokens, self._max_sequences, seed=0)
        first, end = (units.count * part // self._world_size for part in (self._rank, self._rank + 1))
        self._batches = []
        num_batches = -(-(end - first) // self._packs_per_batch)
        for packs in np.array_split(np.arange(first, end), num_batches) if num_batches else ():
            rows, counts = units.gather(packs)
            if self._vocab_size is not None:
                check_tokens(rows, self.info, self._vocab_size)
            self._batches.append(make_batch(rows, counts, int(packs[0]), self.max_tokens))

    def _check_size(self, wanted: int, available: int) -> None:
        if not 1 <= wanted <= available:
            reason = f"it holds {available} examples, {wanted} are asked for"
            raise UserError(self.info.folder, reason, f"Set NUM_EVAL_EXAMPLES from 1 to {available}")

    def __iter__(self) -> Iterator[Batch]:
        """This rank's batches, always in the same order."""
        assert self._batches is not None, "open() first"
        return iter(self._batches)

    def __len__(self) -> int:
        """Number of this rank's batches."""
        assert self._batches is not None, "open() first"
        return len(self._batches)
