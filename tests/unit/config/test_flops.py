"""Model FLOPs against the published figures of BERT-large on Wikipedia's mean length,
and of the other heads.
"""

import dataclasses

import pytest

from host_batches import made_up_batches
from mlbert.cli.bench import CONFIGS
from mlbert.config.bert_config import BertConfig
from mlbert.config.flops import (
    BatchWork,
    encoder,
    forward_flops,
    masked_lm_head,
    training_flops,
)
from mlbert.models.bert import BertForMaskedLM, BertForPreTraining, BertForSequenceClassification


def dense(config: BertConfig, work: BatchWork) -> int:
    """As published figures count: the last layer on all tokens."""
    read = work.masked + work.sequences
    return (
        forward_flops(config, work)
        - encoder(config, work, read)
        + encoder(config, work, work.tokens)
    )


def test_bert_large_on_the_published_lengths():
    large = BertConfig.from_json(CONFIGS / "large.json")
    # A million sequences of mean length 254.43, E[L^2]/E[L] = 385, 38 masked tokens each.
    tokens = 254_430_000
    work = BatchWork(tokens, int(tokens * 385), 38_000_000, 1_000_000)
    assert dense(large, work) / 1e6 == pytest.approx(165.75e9, rel=0.01)
    assert training_flops(large, work) == 3 * forward_flops(large, work)


def test_last_layer_counts_only_where_the_heads_read_it():
    shape = BertConfig.from_json(CONFIGS / "demo.json")
    one_layer = dataclasses.replace(shape, num_hidden_layers=1)
    work = BatchWork(tokens=1000, squared_lengths=64_000, masked=150, sequences=16)
    d = shape.hidden_size
    unread = (1000 - 150 - 16) * 2 * (d * d + 2 * d * shape.intermediate_size)
    for config in (shape, one_layer):
        assert dense(config, work) - forward_flops(config, work) == unread
    gated = dataclasses.replace(one_layer, gated_mlp=True)
    assert (
        forward_flops(gated, work) - forward_flops(one_layer, work)
        == 166 * 2 * d * shape.intermediate_size
    )


def test_each_head_counts_what_it_reads():
    shape = BertConfig.from_json(CONFIGS / "demo.json")
    (batch,) = made_up_batches(2, seed=1, vocab_size=shape.vocab_size, max_tokens=64)
    work = BatchWork.of(batch)
    d = shape.hidden_size
    whole = BertForPreTraining(shape).training_flops(batch)
    masked = BertForMaskedLM(shape).training_flops(batch)
    labeled = BertForSequenceClassification(shape, 5).training_flops(batch)
    assert whole == training_flops(shape, work)
    layer_row = 2 * (d * d + 2 * d * shape.intermediate_size)
    pooled = 2 * d * d
    assert whole - masked == 3 * work.sequences * (layer_row + pooled + 4 * d)
    vocabulary = 2 * (d * d + d * shape.vocab_size)
    assert whole - labeled == 3 * (work.masked * (layer_row + vocabulary) - work.sequences * 6 * d)


@pytest.mark.parametrize("tokens", [1, 2, 9, 64, 1000])
def test_local_layers_count_the_keys_of_their_window(tokens):
    shape = dataclasses.replace(
        BertConfig.from_json(CONFIGS / "demo.json"),
        position_embedding_type="rotary",
        norm_position="pre",
        gated_mlp=True,
        num_hidden_layers=4,
        global_attn_every_n_layers=3,
        local_attention=tokens,
    )
    (batch,) = made_up_batches(2, seed=1, vocab_size=shape.vocab_size, max_tokens=64)
    window = tokens // 2
    pairs = 0
    for length in batch.cu_seqlens.diff().tolist():
        for query in range(length):
            pairs += sum(abs(query - key) <= window for key in range(length))
    work = BatchWork.of(batch, shape.local_window)
    assert work.local_pairs == pairs
    all_global = dataclasses.replace(shape, global_attn_every_n_layers=1, local_attention=0)
    saved = 2 * 4 * shape.hidden_size * (work.squared_lengths - pairs)
    assert encoder(all_global, work, 5) - encoder(shape, work, 5) == saved
    assert BertForMaskedLM(shape).training_flops(batch) == 3 * (
        encoder(shape, work, work.masked) + masked_lm_head(shape, work)
    )
