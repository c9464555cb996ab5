"""Names of checkpoints: bijections for a small and a large BERT, and every spelling back to ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import BertForPreTraining
from mlbert.models.weights.checkpoint_names import (
    TIED,
    WORD_EMBEDDINGS,
    composer_name,
    is_tf1_optimizer,
    is_tf2_bookkeeping,
    is_transposed,
    own_tf2_name,
    own_torch_names,
    parameter_names,
    tf1_names,
)
from mlbert.models.weights.checkpoint_state import numpy_float32, own_state, parameter_shapes
from mlbert.models.weights.weight_files import parameter_sizes
from user_errors import user_error

VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
NAMES = Path(__file__).parents[3] / "assets" / "checkpoints" / "names.txt"
LAYERS = pytest.mark.parametrize("layers", [2, 24])


def test_ours_are_the_models_names():
    shape = BertConfig(24, 8, 3, 2, 16)
    model = BertForPreTraining(shape)
    assert sorted(parameter_names(3)) == sorted(name for name, _ in model.named_parameters())


def test_bert_large_has_398():
    assert len(set(parameter_names(24))) == 398


@LAYERS
def test_tf1_is_a_bijection(layers):
    table = tf1_names(layers)
    assert list(table) == parameter_names(layers)
    assert len(set(table.values())) == len(table)


def written_names(program, form):
    """(their name, our name) of all 46 parameters of a BERT with two layers."""
    rows = [line.split() for line in NAMES.read_text().splitlines()]
    return [(theirs, own) for by, of, theirs, own in rows if (by, of) == (program, form)]


@pytest.mark.parametrize("layout", ["pretrainer", "items", "variables"])
def test_tf2_keys_lead_back(layout):
    names = written_names("tf2", layout)
    assert [own for _, own in names] == parameter_names(2)
    for key, own in names:
        assert own_tf2_name(key) == own
        assert own_tf2_name(key.removesuffix(VALUE)) == own
        assert not is_tf2_bookkeeping(key)


@pytest.mark.parametrize("form", ["segmented", "fused", "transformer_engine"])
def test_nvidia_names_lead_back(form):
    names = written_names("nvidia", form)
    assert [own for _, own in names] == parameter_names(2)
    for name, own in names:
        assert [TIED.get(part, part) for part in own_torch_names(name)] == [own]
        assert [TIED.get(part, part) for part in own_torch_names(f"module.{name}")] == [own]


@LAYERS
@pytest.mark.parametrize("mosaic_bert", [False, True])
def test_composer_names_lead_back(layers, mosaic_bert):
    """Query, key and value of a MosaicBERT share a name, which names all three."""
    table = {own: composer_name(own, mosaic_bert) for own in [*parameter_names(layers), "classifier.weight"]}
    assert len(set(table.values())) == len(table) - (4 * layers if mosaic_bert else 0)
    for own, key in table.items():
        assert own in {TIED.get(part, part) for part in own_torch_names(key)}
        assert key.startswith("model.")
    assert mosaic_bert == any(".mlp.gated_layers.weight" in key for key in table.values())


@pytest.mark.parametrize(
    ("own", "tf1"),
    [
        ("bert.encoder.layer.11.attention.self.query.weight", "bert/encoder/layer_11/attention/self/query/kernel"),
        ("bert.encoder.layer.1.output.LayerNorm.bias", "bert/encoder/layer_1/output/LayerNorm/beta"),
        ("bert.embeddings.word_embeddings.weight", "bert/embeddings/word_embeddings"),
        ("cls.predictions.bias", "cls/predictions/output_bias"),
        ("cls.predictions.transform.LayerNorm.weight", "cls/predictions/transform/LayerNorm/gamma"),
        ("cls.seq_relationship.weight", "cls/seq_relationship/output_weights"),
    ],
)
def test_published_tf1_names(own, tf1):
    assert tf1_names(12)[own] == tf1


@pytest.mark.parametrize(
    ("key", "own"),
    [
        ("model/layer_with_weights-0/embeddings", "bert.embeddings.word_embeddings.weight"),
        ("masked_lm/embedding_table", "bert.embeddings.word_embeddings.weight"),
        ("encoder/layer_with_weights-1/embeddings", "bert.embeddings.position_embeddings.weight"),
        ("model/layer_with_weights-16/kernel", "bert.pooler.dense.weight"),
        ("next_sentence..pooler_dense/bias", "bert.pooler.dense.bias"),
        (
            "encoder/layer_with_weights-4/_attention_output_dense/kernel",
            "bert.encoder.layer.0.attention.output.dense.weight",
        ),
        ("encoder/layer_with_weights-15/_output_dense/bias", "bert.encoder.layer.11.output.dense.bias"),
        ("model/layer_with_weights-1/dense/kernel", "cls.predictions.transform.dense.weight"),
        ("model/layer_with_weights-2/layer_with_weights-0/kernel", "cls.seq_relationship.weight"),
    ],
)
def test_published_tf2_keys(key, own):
    assert own_tf2_name(key + VALUE) == own


@pytest.mark.parametrize("key", ["transformer/layer_3/self_attention/attention_output/kernel", "somebody/elses"])
def test_foreign_tf2_keys_are_no_parameters(key):
    assert own_tf2_name(key + VALUE) not in parameter_names(2)


def test_old_hugging_face_gains():
    assert own_torch_names("bert.embeddings.LayerNorm.gamma") == ("bert.embeddings.LayerNorm.weight",)


def test_slots_and_counters():
    assert is_tf1_optimizer("bert/pooler/dense/kernel/LAMB_1")
    assert is_tf1_optimizer("bert/pooler/dense/kernel/adam_m")
    assert is_tf1_optimizer("global_step")
    assert not any(is_tf1_optimizer(name) for name in tf1_names(2).values())
    assert is_tf2_bookkeeping("model/a/kernel/.OPTIMIZER_SLOT/optimizer/m/.ATTRIBUTES/VARIABLE_VALUE")
    assert is_tf2_bookkeeping("save_counter/.ATTRIBUTES/VARIABLE_VALUE")


def test_kernels_are_transposed():
    assert is_transposed("bert/pooler/dense/kernel")
    assert is_transposed("model/layer_with_weights-16/kernel" + VALUE)
    assert not is_transposed("cls/seq_relationship/output_weights")


# Sizes of our parameters, and what of other programs' arrays is taken for them.


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
