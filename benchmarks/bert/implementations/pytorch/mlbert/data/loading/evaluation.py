"""The evaluation set: packed when it is opened, every example exactly once over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mlbert.data.formats.checks import check_rows
from mlbert.data.formats.open import check_opened, describe, open_store
from mlbert.data.formats.order import even_parts, make_units
from mlbert.data.formats.tfrecord_plain import Widths
from mlbert.data.formats.vocabulary_checks import another_vocabulary
from mlbert.data.formats.wordpiece import load_vocabulary
from mlbert.data.loading.budget import Budget
from mlbert.data.loading.host_batch import HostBatch
from mlbert.data.loading.packed import pack_slots
from mlbert.host.errors import UserError

PARTS = 8  # sizes of batches


class EvalSet:
    """This rank's share of the evaluation examples, as batches that stay the same for every evaluation.

    Args:
        data_dir: see `mlbert.data.formats.open.describe`; no sample is read before `open`.
        num_examples: the first so many sequences are used.
        packs_per_batch: most packs of one batch; no two batches differ by more than one, because they may be filled up
            to one shape.
        max_tokens: slots of a pack; None: see `mlbert.data.loading.packed.pack_slots`.
        vocab_size: entries of the model's vocabulary, compared with every token id of a set that does not know its own.
        most: what a sequence may have, see `mlbert.data.formats.open.describe`.
        vocabulary: vocab.txt of the training set, where there is one: a set that does not know its own is judged by it.
    """

    def __init__(
        self,
        data_dir: Path | str,
        num_examples: int,
        packs_per_batch: int,
        *,
        max_sequences_per_pack: int,
        rank: int = 0,
        world_size: int = 1,
        max_tokens: int | None = None,
        vocab_size: int | None = None,
        most: Widths | None = None,
        vocabulary: Path | None = None,
    ) -> None:
        assert 0 <= rank < world_size
        self.info = describe(data_dir, most)
        if self.info.num_sequences is not None or num_examples < 1:
            self._check_size(num_examples, self.info.num_sequences or 0)
        if packs_per_batch < 1:
            raise UserError(
                "config.range", "EVAL_BATCH_SIZE", f"{packs_per_batch} is not a number of packs", "Set it to 1 or more"
            )
        self.num_examples = num_examples
        self.max_tokens = pack_slots(self.info, max_sequences_per_pack, max_tokens)
        self._packs_per_batch, self._max_sequences = packs_per_batch, max_sequences_per_pack
        self._rank, self._world_size = rank, world_size
        self._vocab_size = vocab_size if self.info.vocab_size is None else self.info.vocab_size
        self._vocabulary = vocabulary if self.info.vocabulary_sha256 is None else None
        self._batches: list[HostBatch] | None = None

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """What a batch holds at most, the smallest first: how many packs a rank has is known after `open` only."""
        sizes = {-(-self._packs_per_batch * part // PARTS) for part in range(1, PARTS + 1)}
        of_pack = (self.max_tokens, self._max_sequences, self.info.max_seq_length, self.info.max_predictions)
        return tuple(Budget.of_packs(packs, *of_pack) for packs in sorted(sizes))

    def open(self) -> None:
        """Read the examples and pack them: the first touch of evaluation data. Raises UserError: a file is missing or
        damaged, or the set is smaller than asked for."""
        store = open_store(self.info.folder)
        check_opened(self.info, store.info)
        self._check_size(self.num_examples, len(store))
        units = make_units(store, self.num_examples, self.max_tokens, self._max_sequences, seed=0)
        words = load_vocabulary(self._vocabulary) if self._vocabulary else None
        self._batches = []
        for packs in even_parts(units.count, self._rank, self._world_size, self._packs_per_batch):
            rows, counts = units.gather(packs)
            check_rows(rows, self.info, self._vocab_size)
            if words and (problem := another_vocabulary(rows, words)):
                raise UserError(
                    "vocabulary.mismatch",
                    self.info.folder,
                    problem,
                    f"Prepare it with {self._vocabulary}, or another EVALDIR",
                )
            self._batches.append(HostBatch.of(rows, counts, packs, self.max_tokens))

    def _check_size(self, wanted: int, available: int) -> None:
        if not 1 <= wanted <= available:
            reason = f"it holds {available} examples, {wanted} are asked for"
            raise UserError("config.range", self.info.folder, reason, f"Set NUM_EVAL_EXAMPLES from 1 to {available}")

    def __iter__(self) -> Iterator[HostBatch]:
        """This rank's batches, always in the same order."""
        assert self._batches is not None, "open() first"
        return iter(self._batches)
