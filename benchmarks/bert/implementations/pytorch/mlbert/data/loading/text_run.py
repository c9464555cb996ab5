"""Training and evaluation batches of a masked-LM run on texts, and its masking-rate schedule,
built from its settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mlbert.config.batch_growth import Growth
from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import StaticShape
from mlbert.data.formats.streams import Stream, streams_of
from mlbert.data.formats.token_shards import TokenShards, describe_text, open_texts
from mlbert.data.formats.tokenizer import check_for_masking, check_model_vocabulary, load_tokenizer
from mlbert.data.loading.config import CorpusConfig, DataConfig, TextConfig
from mlbert.data.loading.inputs import PreTrainingInputs
from mlbert.data.loading.masked_text import TextEvalSet, TextSet, TextSource
from mlbert.host.errors import UserError

# Training progress (0 to 1) -> fraction of the way from the first rate to the last.
SHAPES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda done: 0.0,
    "linear": lambda done: done,
    "cosine": lambda done: 0.5 * (1.0 - math.cos(math.pi * done)),
    "step": lambda done: float(done >= 0.5),
}
_COUNTED_TEXTS = 4096
_GIGABYTE = 1e9


def masking_rate(
    schedule: str, first: float, last: float, max_steps: int
) -> Callable[[int], float]:
    """Return the masking rate as a function of the updates so far: ``first`` at step 0, ``last`` at
    ``max_steps`` (1 or more) and later; ``schedule`` is a name of `SHAPES`.
    """
    return lambda step: first + SHAPES[schedule](min(step / max_steps, 1.0)) * (last - first)


def inspect(
    data: DataConfig, text: TextConfig, corpus: CorpusConfig, shape: BertConfig
) -> PreTrainingInputs:
    """Check the sets' indices, the vocabulary and the model's shape without reading a text.

    Raises UserError if something is missing, or if they do not match.
    """
    tokenizer = load_tokenizer(text.tokenizer)
    check_for_masking(tokenizer)
    check_model_vocabulary(
        tokenizer,
        shape.vocab_size,
        f"TOKENIZER={text.tokenizer}",
        "Use the tokenizer of the model, or its vocab_size",
    )
    length = sequence_length(data)
    if shape.position_embedding_type == "absolute" and length > shape.max_position_embeddings:
        reason = f"is more than the model's {shape.max_position_embeddings} positions"
        remedy = "Lower it, or raise max_position_embeddings"
        raise UserError("config.conflict", f"MAX_SEQ_LENGTH={length}", reason, remedy)
    train = describe_text(_training_streams(data, corpus), tokenizer)
    evaluation = describe_text(_evaluation_streams(data, corpus), tokenizer)
    return PreTrainingInputs(
        shape, train.identity, evaluation.identity, length, 1.0, tokenizer.file
    )


def make_source(
    data: DataConfig,
    text: TextConfig,
    corpus: CorpusConfig,
    growth: Growth,
    max_steps: int,
    **ranks: Any,
) -> TextSource:
    """Return this rank's share of the training texts; ``ranks``: the seed, rank, world_size,
    sum_over_ranks, local and warn of `TextSource`.
    """
    first = corpus.masking_rate
    last = first if corpus.masking_rate_end is None else corpus.masking_rate_end
    return TextSource(
        _texts(data, text, corpus, _training_streams(data, corpus)),
        sequences_per_step=data.train_batch_size,
        growth=growth,
        packed=data.max_sequences_per_pack,
        accumulation=data.gradient_accumulation_steps,
        shuffle=text.shuffle,
        shuffle_seed=corpus.shuffle_seed or 0,
        canonical_nodes=corpus.canonical_nodes or 1,
        rate=masking_rate(corpus.masking_schedule or "constant", first, last, max_steps),
        threads=corpus.loader_threads,
        **ranks,
    )


def make_evaluation_set(
    data: DataConfig,
    text: TextConfig,
    corpus: CorpusConfig,
    *,
    num_examples: int | None,
    batch_size: int,
    rank: int,
    world_size: int,
) -> TextEvalSet:
    """Return this rank's share of the evaluation texts, with the same masks in every run.

    Args:
        data, text, corpus: the settings of the texts.
        num_examples: sequences over all ranks; None for all.
        batch_size: sequences of a batch.
        rank, world_size: of the run.
    """
    return TextEvalSet(
        _texts(data, text, corpus, _evaluation_streams(data, corpus)),
        num_examples,
        batch_size,
        rate=corpus.eval_masking_rate or corpus.masking_rate,
        seed=0,
        always_mask=corpus.eval_masking == "mask",
        rank=rank,
        world_size=world_size,
    )


def token_counts(data: DataConfig, text: TextConfig, corpus: CorpusConfig) -> np.ndarray:
    """Return int64 [V], the count of each vocabulary entry in the first texts of the training set;
    0 for special tokens. Reads the first shard. Raises UserError if it is missing or damaged.
    """
    tokenizer = load_tokenizer(text.tokenizer)
    readers = open_texts(_training_streams(data, corpus), tokenizer)
    first = range(min(int(readers[0].shard_sizes[0]), _COUNTED_TEXTS))
    texts = TokenShards(readers, tokenizer).loose([*first])
    counts = np.bincount(
        np.concatenate([np.empty(0, tokenizer.dtype), *texts]), minlength=tokenizer.vocab_size
    )
    counts[list(tokenizer.special_ids)] = 0
    return counts


def budget_of(data: DataConfig, corpus: CorpusConfig) -> StaticShape:
    """Return the maximum sizes of a micro-batch."""
    rows = data.train_batch_size // data.gradient_accumulation_steps
    rate = max(corpus.masking_rate, corpus.masking_rate_end or 0.0)
    shape = StaticShape.of_sequences(rows, sequence_length(data), rate)
    return replace(shape, sequences=rows * data.max_sequences_per_pack)


def sequence_length(data: DataConfig) -> int:
    """Return MAX_SEQ_LENGTH, which recipes on text require."""
    assert data.max_seq_length is not None
    return data.max_seq_length


def _training_streams(data: DataConfig, corpus: CorpusConfig) -> Sequence[Stream]:
    return streams_of("DATA_STREAMS", corpus.data_streams, data.input_dir, corpus.data_remote)


def _evaluation_streams(data: DataConfig, corpus: CorpusConfig) -> Sequence[Stream]:
    return streams_of("EVAL_STREAMS", corpus.eval_streams, data.eval_dir, corpus.eval_remote)


def _texts(
    data: DataConfig, text: TextConfig, corpus: CorpusConfig, streams: Sequence[Stream]
) -> TextSet:
    limit = corpus.cache_limit
    return TextSet(
        streams,
        load_tokenizer(text.tokenizer),
        sequence_length(data),
        corpus.long_texts or "split",
        None if limit is None else round(limit * _GIGABYTE),
    )
