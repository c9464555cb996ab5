"""Model FLOPs against the published figures of BERT-large on Wikipedia's mean length."""

import dataclasses

import pytest

from mlbert.cli.bench import CONFIGS
from mlbert.models import BertConfig
from mlbert.models.flops import Work, forward_flops, training_flops


def test_bert_large_on_the_published_lengths():
    large = BertConfig.from_json(CONFIGS / "large.json")
    # A million sequences of mean length 254.43, E[L^2]/E[L] = 385, 38 masked tokens each.
    tokens = 254_430_000
    work = Work(tokens, int(tokens * 385), 38_000_000, 1_000_000)
    assert forward_flops(large, work, dense=True) / 1e6 == pytest.approx(165.75e9, rel=0.01)
    assert training_flops(large, work) == 3 * forward_flops(large, work)


def test_last_layer_counts_only_where_the_heads_read_it():
    shape = BertConfig.from_json(CONFIGS / "demo.json")
    one_layer = dataclasses.replace(shape, num_hidden_layers=1)
    work = Work(tokens=1000, squared_lengths=64_000, masked=150, sequences=16)
    d = shape.hidden_size
    unread = (1000 - 150 - 16) * 2 * (d * d + 2 * d * shape.intermediate_size)
    for config in (shape, one_layer):
        assert forward_flops(config, work, dense=True) - forward_flops(config, work) == unread
