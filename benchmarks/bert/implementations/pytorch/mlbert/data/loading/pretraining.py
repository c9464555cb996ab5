"""Training and evaluation batches of a pre-training run, built from its settings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import HostBatch, StaticShape
from mlbert.data.formats.checks import check_rows
from mlbert.data.formats.checksums import FileChecks, sharers
from mlbert.data.formats.open import check_opened, describe, open_store, widths_at_most
from mlbert.data.formats.order import Partition, by_length, contiguous, even_parts, make_units
from mlbert.data.formats.static_masking import MASKED_SHARE
from mlbert.data.formats.tfrecord_plain import Widths
from mlbert.data.formats.vocabulary_checks import another_vocabulary
from mlbert.data.formats.wordpiece import load_vocabulary
from mlbert.data.loading.config import DataConfig
from mlbert.data.loading.dali import DaliSource
from mlbert.data.loading.inputs import vocabulary_of_data
from mlbert.data.loading.packed import PackedSource, pack_slots
from mlbert.data.loading.source import EvaluationBatches
from mlbert.data.loading.synthetic import SyntheticEvalSet, SyntheticSource
from mlbert.host.errors import UserError

PARTS = 8  # number of batch sizes


class EvalSet(EvaluationBatches):
    """This rank's share of the evaluation examples, in the same batches for every evaluation.

    Examples are packed in `open`. Over all ranks, each occurs exactly once.

    Args:
        data_dir: see `mlbert.data.formats.open.describe`; no sample is read before `open`.
        num_examples: number of sequences to use, from the start of the set.
        packs_per_batch: maximum packs per batch; batches differ by at most one pack,
            because they may be padded to one shape.
        max_tokens: slots of a pack; see `mlbert.data.loading.packed.pack_slots` for the default.
        vocab_size: size of the model's vocabulary;
            token ids are checked against it if the set does not record its own.
        most: limits of a sequence, see `mlbert.data.formats.open.describe`.
        vocabulary: vocab.txt of the training set, if there is one;
            used to check a set that does not record its own.
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
            reason = f"{packs_per_batch} is not a number of packs"
            raise UserError("config.range", "EVAL_BATCH_SIZE", reason, "Set it to 1 or more")
        self.num_examples = num_examples
        self.max_tokens = pack_slots(self.info, max_sequences_per_pack, max_tokens)
        self._packs_per_batch = packs_per_batch
        self._max_sequences = max_sequences_per_pack
        self._rank = rank
        self._world_size = world_size
        self._vocab_size = vocab_size if self.info.vocab_size is None else self.info.vocab_size
        self._vocabulary = vocabulary if self.info.vocabulary_sha256 is None else None

    @property
    def static_shapes(self) -> tuple[StaticShape, ...]:
        """Maximum sizes of a batch, smallest first;
        several, because a rank's number of packs is unknown before `open`.
        """
        sizes = {-(-self._packs_per_batch * part // PARTS) for part in range(1, PARTS + 1)}
        return tuple(
            StaticShape.of_packs(
                packs,
                self.max_tokens,
                self._max_sequences,
                self.info.max_seq_length,
                self.info.max_predictions,
            )
            for packs in sorted(sizes)
        )

    def open(self) -> None:
        """Read and pack the examples.

        This is the first access to evaluation data. Raises UserError if a file is missing or
        damaged, or the set has fewer examples than requested.
        """
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
                remedy = f"Prepare it with {self._vocabulary}, or another EVALDIR"
                raise UserError("vocabulary.mismatch", self.info.folder, problem, remedy)
            self._batches.append(HostBatch.of(rows, counts, packs, self.max_tokens))

    def _check_size(self, wanted: int, available: int) -> None:
        if not 1 <= wanted <= available:
            reason = f"it contains {available} examples, but {wanted} are requested"
            raise UserError(
                "config.range",
                self.info.folder,
                reason,
                f"Set NUM_EVAL_EXAMPLES from 1 to {available}",
            )


def make_source(
    config: DataConfig,
    shape: BertConfig,
    *,
    seed: int,
    rank: int,
    world_size: int,
    group_size: int,
    local: tuple[int, int] = (0, 1),
) -> PackedSource | SyntheticSource:
    """Return this rank's share of the training set, which is not read before `open`.

    ``group_size`` is the number of ranks that EXCHANGE_PADDING names, ``local`` the rank and number
    of ranks on this machine. Raises UserError if the set does not have the bins of BIN_COUNTS.
    """
    partition = contiguous if group_size == 1 else by_length(group_size)
    if config.synthetic_data:
        return _synthetic(config, shape, seed, rank, world_size, partition)
    source = DaliSource if config.data_reader == "dali" else PackedSource
    return source(
        config.input_dir,
        bin_counts=config.counts_of_bins,
        vocab_size=shape.vocab_size,
        most=widths_at_most(config.max_seq_length, config.max_predictions_per_seq, shape),
        checks=FileChecks(*sharers(config.input_dir, rank, world_size, *local)),
        partition=partition,
        **_common(config, seed, rank, world_size),
    )


def make_evaluation_set(
    config: DataConfig,
    shape: BertConfig,
    *,
    num_examples: int | None,
    batch_size: int,
    seed: int,
    rank: int,
    world_size: int,
) -> EvalSet | SyntheticEvalSet:
    """Return this rank's share of the evaluation samples.

    Args:
        config: the settings of the data.
        shape: of the model.
        num_examples: sequences over all ranks; None for all.
        batch_size: packs of a batch.
        seed: of synthetic data.
        rank, world_size: of the run.

    Raises:
        UserError: all samples are requested, but the set does not record their number.
    """
    if config.synthetic_data:
        return SyntheticEvalSet(_synthetic(config, shape, seed, rank, world_size))
    most = widths_at_most(config.max_seq_length, config.max_predictions_per_seq, shape)
    num_examples = num_examples or describe(config.eval_dir, most).num_sequences
    if num_examples is None:
        reason = f"is not set, and {config.eval_dir} does not record its size"
        raise UserError("config.missing", "NUM_EVAL_EXAMPLES", reason, "Set it")
    return EvalSet(
        config.eval_dir,
        num_examples,
        batch_size,
        max_sequences_per_pack=config.max_sequences_per_pack,
        rank=rank,
        world_size=world_size,
        vocab_size=shape.vocab_size,
        most=most,
        vocabulary=vocabulary_of_data(config.input_dir),
    )


def budget_of(config: DataConfig, source: PackedSource | SyntheticSource) -> StaticShape:
    """Return the maximum sizes of a micro-batch."""
    if isinstance(source, SyntheticSource):
        longest = source.max_tokens
        predictions = math.ceil(MASKED_SHARE * source.max_tokens)
    else:
        longest = source.info.max_seq_length
        predictions = source.info.max_predictions
    packs = config.train_batch_size // config.gradient_accumulation_steps
    return StaticShape.of_packs(
        packs, source.max_tokens, config.max_sequences_per_pack, longest, predictions
    )


def _common(config: DataConfig, seed: int, rank: int, world_size: int) -> dict[str, Any]:
    """Return the arguments that all sources have."""
    return {
        "packs_per_step": config.train_batch_size,
        "accumulation": config.gradient_accumulation_steps,
        "max_sequences_per_pack": config.max_sequences_per_pack,
        "seed": seed,
        "rank": rank,
        "world_size": world_size,
    }


def _synthetic(
    config: DataConfig,
    shape: BertConfig,
    seed: int,
    rank: int,
    world_size: int,
    partition: Partition = contiguous,
) -> SyntheticSource:
    common = _common(config, seed, rank, world_size)
    positions = shape.max_position_embeddings
    return SyntheticSource(
        vocab_size=shape.vocab_size, max_tokens=positions, partition=partition, **common
    )
