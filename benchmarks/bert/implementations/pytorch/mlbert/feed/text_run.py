"""The batches of a masked-LM run on texts, as its settings ask for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mlbert.core.bert_config import BertConfig
from mlbert.core.errors import UserError
from mlbert.core.masking_rates import MaskingRate
from mlbert.core.settings import TrainConfig
from mlbert.feed.budget import Budget
from mlbert.feed.inputs import PreTrainingInputs
from mlbert.feed.text import TextEvalSet, TextSet, TextSource, count_sequences, describe_text
from mlbert.store.token_shards import TokenShards, open_texts
from mlbert.store.tokenizer import Tokenizer, load_tokenizer

_COUNTED_TEXTS = 4096


def inspect(config: TrainConfig) -> PreTrainingInputs:
    """Looks at the sets' indices, the vocabulary and the model's shape; reads no text. Raises UserError: something is
    missing, or they do not fit each other."""
    shape = BertConfig.from_json(config.bert_config_file).with_options(config.model_options)
    tokenizer = _tokenizer(config)
    if len(tokenizer.vocabulary) != shape.vocab_size:
        reason = f"has {len(tokenizer.vocabulary)} entries, the model's shape says vocab_size {shape.vocab_size}"
        raise UserError(f"TOKENIZER={config.tokenizer}", reason, "Use the tokenizer of the model, or its vocab_size")
    length = _max_seq_length(config)
    if shape.position_embedding_type == "absolute" and length > shape.max_position_embeddings:
        reason = f"is more than the model's {shape.max_position_embeddings} positions"
        raise UserError(f"MAX_SEQ_LENGTH={length}", reason, "Lower it, or raise max_position_embeddings")
    train = describe_text(config.input_dir, config.data_remote, tokenizer)
    evaluation = describe_text(config.eval_dir, config.eval_remote, tokenizer)
    return PreTrainingInputs(shape, train.identity, evaluation.identity, length, 1.0, tokenizer.file)


def make_source(config: TrainConfig, *, seed: int, rank: int, world_size: int) -> TextSource:
    """This rank's share of the training texts."""
    first = _rate(config)
    last = first if config.masking_rate_end is None else config.masking_rate_end
    return TextSource(
        _texts(config, config.input_dir, config.data_remote),
        sequences_per_step=config.train_batch_size,
        accumulation=config.gradient_accumulation_steps,
        shuffle=config.shuffle,
        shuffle_seed=config.shuffle_seed or 0,
        canonical_nodes=config.canonical_nodes or 1,
        rate=MaskingRate(config.masking_schedule or "constant", first, last, config.max_steps),
        seed=seed,
        rank=rank,
        world_size=world_size,
    )


def make_evaluation_set(config: TrainConfig, *, rank: int, world_size: int) -> TextEvalSet:
    """This rank's share of the evaluation texts; their masks are the same in every run."""
    return TextEvalSet(
        _texts(config, config.eval_dir, config.eval_remote),
        config.num_eval_examples,
        config.eval_batch_size,
        rate=config.eval_masking_rate or _rate(config),
        seed=0,
        rank=rank,
        world_size=world_size,
    )


def token_counts(config: TrainConfig) -> np.ndarray:
    """int64 [V], how often each entry of the vocabulary is in the beginning of the training set, special ones never.
    Reads its first shard. Raises UserError: it is missing or damaged."""
    tokenizer = _tokenizer(config)
    reader = open_texts(config.input_dir, config.data_remote)
    first = range(min(int(reader.shard_sizes[0]), _COUNTED_TEXTS))
    texts = TokenShards(reader, tokenizer, config.input_dir).loose([*first])
    counts = np.bincount(np.concatenate([np.empty(0, np.uint16), *texts]), minlength=len(tokenizer.vocabulary))
    counts[list(tokenizer.special_ids)] = 0
    return counts


def budget_of(config: TrainConfig) -> Budget:
    """What a micro-batch holds at most."""
    sequences = config.train_batch_size // config.gradient_accumulation_steps
    return Budget.of_sequences(sequences, _max_seq_length(config), max(_rate(config), config.masking_rate_end or 0.0))


def count(local: Path, remote: str | None, tokenizer: str, max_seq_length: int, long_texts: str) -> int:
    """Sequences that a set of texts makes; where they are split, all are tokenised for it."""
    return count_sequences(TextSet(local, remote, load_tokenizer(tokenizer), max_seq_length, long_texts))


def _texts(config: TrainConfig, local: Path, remote: str | None) -> TextSet:
    return TextSet(local, remote, _tokenizer(config), _max_seq_length(config), config.long_texts or "split")


def _tokenizer(config: TrainConfig) -> Tokenizer:
    if config.tokenizer is None:
        raise UserError("TOKENIZER", "is not set, and the data is text", "Set it to a vocab.txt or a model's name")
    return load_tokenizer(config.tokenizer)


def _max_seq_length(config: TrainConfig) -> int:
    if config.max_seq_length is None:
        raise UserError("MAX_SEQ_LENGTH", "is not set, and the data is text", "Set it, for example to 128")
    return config.max_seq_length


def _rate(config: TrainConfig) -> float:
    if config.masking_rate is None:
        raise UserError("MASKING_RATE", "is not set, and the data is text", "Set it, for example to 0.15")
    return config.masking_rate
