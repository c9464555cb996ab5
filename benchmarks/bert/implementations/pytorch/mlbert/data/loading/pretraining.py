"""The batches of a pre-training run, as its settings ask for them."""

from __future__ import annotations

import math

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.checksums import FileChecks, sharers
from mlbert.data.formats.deals import by_length, contiguous
from mlbert.data.formats.masking import MASKED_SHARE
from mlbert.data.formats.open import describe, widths_at_most
from mlbert.data.formats.order import Deal
from mlbert.data.loading.budget import Budget
from mlbert.data.loading.config import DataConfig
from mlbert.data.loading.dali import DaliSource
from mlbert.data.loading.evaluation import EvalSet
from mlbert.data.loading.exchange import ExchangeGroup
from mlbert.data.loading.inputs import vocabulary_of
from mlbert.data.loading.packed import PackedSource
from mlbert.data.loading.synthetic import SyntheticEvalSet, SyntheticSource
from mlbert.host.errors import UserError
from mlbert.training.config import EvaluationConfig


def make_source(
    config: DataConfig,
    shape: BertConfig,
    *,
    seed: int,
    rank: int,
    world_size: int,
    exchange: ExchangeGroup,
    local: tuple[int, int] = (0, 1),
) -> PackedSource | SyntheticSource:
    """This rank's share of the training set, of which nothing is touched before `open`; ``exchange``: the ranks that
    EXCHANGE_PADDING names; ``local``: rank and number of ranks on this machine. Raises UserError: the set has not the
    bins that BIN_COUNTS asks for."""
    by_lengths = config.exchange_by == "lengths"
    deal = by_length(exchange.size) if by_lengths and exchange.size > 1 else contiguous
    gather_over = None if by_lengths or exchange.size == 1 else exchange
    if config.synthetic_data:
        return _synthetic(config, shape, seed, rank, world_size, deal=deal, gather_over=gather_over)
    source = DaliSource if config.data_reader == "dali" else PackedSource
    return source(
        config.input_dir,
        packs_per_step=config.train_batch_size,
        accumulation=config.gradient_accumulation_steps,
        max_sequences_per_pack=config.max_sequences_per_pack,
        bin_counts=config.counts_of_bins,
        seed=seed,
        rank=rank,
        world_size=world_size,
        deal=deal,
        gather_over=gather_over,
        vocab_size=shape.vocab_size,
        most=widths_at_most(config.max_seq_length, config.max_predictions_per_seq, shape),
        checks=FileChecks(*sharers(config.input_dir, rank, world_size, *local)),
    )


def make_evaluation_set(
    config: DataConfig, evaluation: EvaluationConfig, shape: BertConfig, *, seed: int, rank: int, world_size: int
) -> EvalSet | SyntheticEvalSet:
    """This rank's share of the evaluation samples. Raises UserError: all are asked for, and their number takes reading
    to know."""
    if config.synthetic_data:
        return SyntheticEvalSet(_synthetic(config, shape, seed, rank, world_size))
    most = widths_at_most(config.max_seq_length, config.max_predictions_per_seq, shape)
    num_examples = evaluation.num_eval_examples or describe(config.eval_dir, most).num_sequences
    if num_examples is None:
        raise UserError(
            "config.missing", "NUM_EVAL_EXAMPLES", f"is none, and {config.eval_dir} does not tell its size", "Set it"
        )
    return EvalSet(
        config.eval_dir,
        num_examples,
        evaluation.eval_batch_size,
        max_sequences_per_pack=config.max_sequences_per_pack,
        rank=rank,
        world_size=world_size,
        vocab_size=shape.vocab_size,
        most=most,
        vocabulary=vocabulary_of(config.input_dir),
    )


def budget_of(config: DataConfig, source: PackedSource | SyntheticSource) -> Budget:
    """What a micro-batch holds at most."""
    if isinstance(source, SyntheticSource):
        longest, predictions = source.max_tokens, math.ceil(MASKED_SHARE * source.max_tokens)
    else:
        longest, predictions = source.info.max_seq_length, source.info.max_predictions
    packs = config.train_batch_size // config.gradient_accumulation_steps
    return Budget.of_packs(packs, source.max_tokens, config.max_sequences_per_pack, longest, predictions)


def _synthetic(
    config: DataConfig,
    shape: BertConfig,
    seed: int,
    rank: int,
    world_size: int,
    deal: Deal = contiguous,
    gather_over: ExchangeGroup | None = None,
) -> SyntheticSource:
    return SyntheticSource(
        packs_per_step=config.train_batch_size,
        accumulation=config.gradient_accumulation_steps,
        max_sequences_per_pack=config.max_sequences_per_pack,
        vocab_size=shape.vocab_size,
        max_tokens=shape.max_position_embeddings,
        seed=seed,
        rank=rank,
        world_size=world_size,
        deal=deal,
        gather_over=gather_over,
    )
