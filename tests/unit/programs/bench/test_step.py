"""The step benchmark: both sides start from the same loss, the record holds what the ratio is made of."""

import dataclasses
import json

import pytest
import torch

from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import BertForPreTraining
from mlbert.programs.bench import step_time as step
from user_errors import user_error

SHAPE = BertConfig(
    vocab_size=1200,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


def test_both_sides_compute_the_same_first_loss():
    batch = step.make_batch(SHAPE, 4, None, seed=1)
    model = BertForPreTraining(SHAPE, torch.float32)
    model.initialize(seed=1)
    theirs = step.their_side(SHAPE, batch, torch.float32, model)
    assert theirs.step() == pytest.approx(step.our_side(batch, model, seed=1).step(), abs=1e-5)


def test_record_is_complete_and_consistent():
    record = step.run(SHAPE, 4, 5, torch.float32, True, None, 1, torch.device("cpu"))
    assert json.loads(json.dumps(record)) == record
    assert len(record["pair_ratios"]) == 5
    assert sorted(record["pair_ratios"])[2] == record["ratio"] > 0
    ours = record["sides"]["mlbert"]
    assert ours["sequences_per_second"] * ours["median_seconds"] == pytest.approx(record["sequences"])
    assert 0 < ours["share_of_gemm_peak"] < 1
    assert record["padded_tokens"] >= record["tokens"]


def test_data_that_does_not_fit_is_refused(tmp_path):
    with user_error("data.missing", tmp_path):
        step.make_batch(SHAPE, 4, tmp_path, seed=1)


def test_a_small_made_up_batch_has_the_published_mean_length():
    shape = dataclasses.replace(SHAPE, max_position_embeddings=512)
    batch = step.make_batch(shape, 8, None, seed=1)
    assert batch.num_samples == 8
    assert batch.num_tokens / 8 == pytest.approx(255, rel=0.05)
