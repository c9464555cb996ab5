"""Sizes of our parameters, and what of other programs' arrays is taken for them."""

from __future__ import annotations

import numpy as np
import pytest

from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import BertForPreTraining
from mlbert.models.weights.checkpoint_names import TIED, WORD_EMBEDDINGS
from mlbert.models.weights.checkpoint_state import numpy_float32, own_state, parameter_shapes
from mlbert.models.weights.weight_files import parameter_sizes
from user_errors import user_error

SIZES = {
    "vocab_size": 197,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "type_vocab_size": 3,
}
OPTIONS = {
    "position_embedding_type": "alibi",
    "norm_position": "pre",
    "gated_mlp": True,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("options", [{}, *({name: value} for name, value in OPTIONS.items()), OPTIONS])
def test_shapes_are_those_of_the_model(options):
    shape = BertConfig(**SIZES, **options)
    assert parameter_shapes(shape) == parameter_sizes(BertForPreTraining(shape))


def dummy(shape):
    random = np.random.default_rng(0)
    return {name: random.normal(size=size).astype(np.float32) for name, size in parameter_shapes(shape).items()}


def test_arrays_come_unpadded_and_the_decoders_copy_is_dropped():
    shape = BertConfig(**SIZES)
    arrays = dummy(shape)
    tied = next(iter(TIED))
    state, report = own_state({**arrays, tied: arrays[WORD_EMBEDDINGS][:197]}, shape, "file", numpy_float32)
    assert state[WORD_EMBEDDINGS].shape == (197, 8)
    np.testing.assert_array_equal(state[WORD_EMBEDDINGS], arrays[WORD_EMBEDDINGS][:197])
    assert report.dropped == {tied: f"tied to {WORD_EMBEDDINGS}"}
    assert report.warnings("file") == []


def test_integers_and_a_decoder_of_its_own_are_refused():
    shape = BertConfig(**SIZES)
    arrays = dummy(shape)
    with user_error("checkpoint.damaged", "file"):
        own_state({**arrays, WORD_EMBEDDINGS: np.zeros((197, 8), np.int32)}, shape, "file", numpy_float32)
    with user_error("checkpoint.damaged", "file"):
        own_state({**arrays, next(iter(TIED)): np.zeros((197, 8))}, shape, "file", numpy_float32)


def test_three_in_one_are_cut_into_rows():
    shape = BertConfig(**SIZES)
    arrays = dummy(shape)
    stem = "bert.encoder.layer.1.attention.self."
    parts = [arrays.pop(f"{stem}{kind}.weight") for kind in ("query", "key", "value")]
    state, _ = own_state({**arrays, f"{stem}Wqkv.weight": np.concatenate(parts)}, shape, "file", numpy_float32)
    np.testing.assert_array_equal(state[f"{stem}value.weight"], parts[2])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(value):
    shape = BertConfig(**SIZES)
    arrays = dummy(shape)
    name = "bert.encoder.layer.1.output.dense.weight"
    arrays[name][1, 2] = value
    with user_error("checkpoint.damaged", "file"):
        own_state(arrays, shape, "file", numpy_float32)
