"""Model FLOPs against the published figures of BERT-large on Wikipedia's mean length."""

import pytest

from mlbert.cli.bench import CONFIGS
from mlbert.models import BertConfig
from mlbert.models.flops import Work, forward_flops, training_flops


def test_bert_large_on_the_published_lengths():
    large = BertConfig.from_json(CONFIGS / "large.json")
    # A million sequences of mean length 254.43, E[L^2]/E[L] = 385, 38 masked tokens each.
    tokens = 254_430_000
    work = Work(tokens, int(tokens * 385), 38_000_000, 1_000_000)
    assert forward_flops(large, work) / 1e6 == pytest.approx(165.75e9, rel=0.01)
    assert training_flops(large, work) == 3 * forward_flops(large, work)
