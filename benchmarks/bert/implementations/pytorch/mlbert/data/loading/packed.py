"""Training batches from stored data; `mlbert.data.formats.order` chooses the sequences
and their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from mlbert.data.batches import HostBatch
from mlbert.data.formats.base import Store, StoreInfo
from mlbert.data.formats.bins import check_counts
from mlbert.data.formats.checks import check_rows
from mlbert.data.formats.checksums import FileChecks
from mlbert.data.formats.open import check_opened, describe, in_memory, open_store
from mlbert.data.formats.order import Partition, RankSlice, StepReader
from mlbert.data.formats.tfrecord_plain import Widths
from mlbert.data.loading.source import StepSource
from mlbert.host.errors import UserError


def pack_slots(info: StoreInfo, max_sequences: int, wanted: int | None) -> int:
    """Return the slots of a pack: ``wanted`` if given, else the size of stored packs if they are
    used, else the set's max_seq_length. Raises UserError if ``wanted`` is too small for the data.
    """
    least = (info.max_pack_tokens if max_sequences > 1 else None) or info.max_seq_length
    if wanted is not None and wanted < least:
        reason = f"packs of {wanted} tokens are shorter than the data's {least}"
        raise UserError(
            "data.too-long", info.folder, reason, "Use longer packs or data with shorter sequences"
        )
    return wanted or least


class PackedSource(StepSource):
    """Endless optimizer steps over a stored data set of any format.

    Args:
        data_dir: see `mlbert.data.formats.open.describe`; no sample is read before `open`.
        packs_per_step: packs per rank, including all micro-batches.
        accumulation, rank, world_size: see `mlbert.data.formats.order.RankSlice`.
        max_sequences_per_pack, bin_counts, seed, partition: see
            `mlbert.data.formats.order.StepReader`.
        max_tokens: slots of a pack; see `pack_slots` for the default.
        vocab_size: size of the model's vocabulary;
            token ids are checked against it if the set does not record its own.
        most: limits of a sequence, see `mlbert.data.formats.open.describe`.
        checks: verifies the checksums of a large set's shards in the background.
    """

    def __init__(
        self,
        data_dir: Path | str,
        *,
        packs_per_step: int,
        accumulation: int = 1,
        max_sequences_per_pack: int,
        bin_counts: Sequence[int] | None = None,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        partition: Partition,
        max_tokens: int | None = None,
        vocab_size: int | None = None,
        most: Widths | None = None,
        checks: FileChecks | None = None,
    ) -> None:
        self.share = RankSlice(packs_per_step, accumulation, rank, world_size)
        self.info = describe(data_dir, most)
        self.max_tokens = pack_slots(self.info, max_sequences_per_pack, max_tokens)
        self.vocab_size = vocab_size if self.info.vocab_size is None else self.info.vocab_size
        self._max_sequences = max_sequences_per_pack
        self._bin_counts = None if bin_counts is None else list(bin_counts)
        self._check_counts(self.info)
        packs_are_taken = self.info.max_pack_tokens is not None and max_sequences_per_pack > 1
        self._check_size(self.info.num_packs if packs_are_taken else self.info.num_sequences)
        self._make_reader = partial(
            StepReader,
            share=self.share,
            bin_counts=self._bin_counts,
            seed=seed,
            partition=partition,
        )
        self._checks = checks or FileChecks()
        self._reader: StepReader | None = None
        identity = {
            "seed": seed,
            "global_packs": self.share.global_units,
            "max_tokens": self.max_tokens,
            "max_sequences_per_pack": max_sequences_per_pack,
            "data": self.info.identity,
            # Of all ranks together, like global_packs.
            "bin_counts": None
            if bin_counts is None
            else [count * world_size for count in bin_counts],
        }
        super().__init__(self.info.folder, identity)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch; available after `open`."""
        assert self._reader is not None, "open() first"
        return self._reader.steps_per_epoch

    def open(self) -> None:
        """Open and check the set, and pack it unless packs are stored.

        This is the first access to training data. Raises UserError if a file is missing or damaged,
        or the set is too small for one step.
        """
        store = self._open_store()
        check_opened(self.info, store.info)
        self._check_counts(store.info)
        self._reader = self._make_reader(
            store, max_tokens=self.max_tokens, max_sequences=self._max_sequences
        )
        store.expect_random_reads()  # after packing, which reads all lengths in order
        if self.steps_per_epoch == 0:
            self._raise_too_small(self._reader.units.count)

    def _check_size(self, packs: int | None) -> None:
        """Raise UserError early, before memory is allocated,
        if there are not enough packs for one step.
        """
        if packs is not None and packs < self.share.global_units:
            self._raise_too_small(packs)

    def _raise_too_small(self, packs: int) -> NoReturn:
        reason = f"has {packs} packs, but one step takes {self.share.global_units}"
        raise UserError(
            "data.too-small", self.info.folder, reason, "Lower BATCHSIZE or prepare more data"
        )

    def _check_counts(self, info: StoreInfo) -> None:
        if self._bin_counts is not None:
            assert sum(self._bin_counts) == self.share.units, (
                "bin counts must sum to each rank's share"
            )
            check_counts(info, self._bin_counts, self.share.world_size)

    def _open_store(self) -> Store:
        return in_memory(open_store(self.info.folder, checks=self._checks))

    def finish(self) -> None:
        """See `StepSource.finish`."""
        self._checks.finish()

    def close(self) -> None:
        """See `StepSource.close`."""
        super().close()
        self._checks.close()

    def batches_of(self, step: int) -> list[HostBatch]:
        """See `StepSource.batches_of`."""
        assert self._reader is not None, "open() first"
        self._checks.look()
        batches = []
        for part in self._reader(step):
            check_rows(part.rows, self.info, self.vocab_size)
            batches.append(
                HostBatch.of(
                    part.rows,
                    part.sequences_per_unit,
                    part.units,
                    self.max_tokens,
                    self.locks_pages,
                )
            )
        return batches
