"""The evaluation set: packed when it is opened, every example exactly once over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mlbert.core.errors import UserError
from mlbert.core.packing import pack_lengths
from mlbert.data.batch import Batch
from mlbert.data.packed import gather_batch
from mlbert.data.shards import ShardSet, read_manifest


class EvalSet:
    """This rank's share of the evaluation examples, as batches that stay the same for every evaluation.

    Args:
        data_dir: a prepared set; only its manifest is read before `open`.
        num_examples: the first so many sequences are used.
        packs_per_batch: packs of one batch; the last one may be smaller.
        rank, world_size: this process among all.
        max_sequences_per_pack: most sequences of one pack.
        max_tokens: slots of a pack; None: the set's max_seq_length.
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
    ) -> None:
        assert 0 <= rank < world_size
        self.data_dir = Path(data_dir)
        self.manifest = read_manifest(self.data_dir)
        available = self.manifest.num_sequences
        if not 1 <= num_examples <= available:
            reason = f"it holds {available} examples, {num_examples} are asked for"
            raise UserError(self.data_dir, reason, f"Set NUM_EVAL_EXAMPLES from 1 to {available}")
        if packs_per_batch < 1:
            raise UserError("EVAL_BATCH_SIZE", f"{packs_per_batch} is not a number of packs", "Set it to 1 or more")
        self.num_examples = num_examples
        self.max_tokens = max_tokens or self.manifest.max_seq_length
        self._packs_per_batch = packs_per_batch
        self._max_sequences = max_sequences_per_pack
        self._rank, self._world_size = rank, world_size
        self._batches: list[Batch] | None = None

    def open(self) -> None:
        """Read the examples and pack them: the first touch of evaluation data.

        Raises:
            UserError: a shard is missing or damaged.
        """
        rows = ShardSet.open(self.data_dir)
        packs = pack_lengths(rows.lengths[: self.num_examples], self.max_tokens, self._max_sequences, seed=0)
        first, end = (packs.num_packs * part // self._world_size for part in (self._rank, self._rank + 1))
        self._batches = [
            gather_batch(rows, packs, np.arange(start, min(start + self._packs_per_batch, end)), start, self.max_tokens)
            for start in range(first, end, self._packs_per_batch)
        ]

    def __iter__(self) -> Iterator[Batch]:
        """This rank's batches, always in the same order."""
        assert self._batches is not None, "open() first"
        return iter(self._batches)

    def __len__(self) -> int:
        """Number of this rank's batches."""
        assert self._batches is not None, "open() first"
        return len(self._batches)
