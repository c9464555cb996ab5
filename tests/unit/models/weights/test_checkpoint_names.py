"""Names of checkpoints: bijections for a small and a large BERT, and every spelling back to ours."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import BertForPreTraining
from mlbert.models.weights import checkpoint_names
from mlbert.models.weights.checkpoint_names import TIED, WORD_EMBEDDINGS, own_tf2_name, own_torch_names, parameter_names
from mlbert.models.weights.checkpoint_state import numpy_float32, own_state, parameter_shapes
from mlbert.models.weights.weight_files import parameter_sizes
from user_errors import user_error

VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
NAMES = Path(__file__).parents[3] / "assets" / "checkpoints" / "names.txt"
LAYERS = pytest.mark.parametrize("layers", [2, 24])


def test_ours_are_the_models_names():
    model = BertForPreTraining(BertConfig(24, 8, 3, 2, 16))
    assert sorted(parameter_names(3)) == sorted(name for name, _ in model.named_parameters())
    assert len(set(parameter_names(24))) == 398, "those of BERT-large"


@LAYERS
def test_tf1_is_a_bijection(layers):
    table = checkpoint_names.tf1_names(layers)
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
        assert not checkpoint_names.is_tf2_bookkeeping(key)


@pytest.mark.parametrize("form", ["segmented", "fused", "transformer_engine"])
def test_nvidia_names_lead_back(form):
    names = written_names("nvidia", form)
    assert [own for _, own in names] == parameter_names(2)
    for name, own in names:
        for spelling in (name, f"module.{name}"):
            assert [TIED.get(part, part) for part in own_torch_names(spelling)] == [own]


@LAYERS
@pytest.mark.parametrize("mosaic_bert", [False, True])
def test_composer_names_lead_back(layers, mosaic_bert):
    """Query, key and value of a MosaicBERT share a name, which names all three."""
    names = [*parameter_names(layers), "classifier.weight"]
    table = {own: checkpoint_names.composer_name(own, mosaic_bert) for own in names}
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
    assert checkpoint_names.tf1_names(12)[own] == tf1


@pytest.mark.parametrize(
    ("key", "own"),
    [
        ("model/layer_with_weights-0/embeddings", "bert.embeddings.word_embeddings.weight"),
        ("masked_lm/embedding_table", "bert.embeddings.word_embeddings.weight"),
        ("encoder/layer_with_weights-1/embeddings", "bert.embeddings.position_embeddings.weight"),
        ("model/layer_with_weights-16/kernel", "bert.pooler.dense.weight"),
        ("next_sentence..pooler_dense/bias", "bert.pooler.dense.bias"),
        (
            "encoder/layer_with_weights-4/_attention_output_dense/bias",
            "bert.encoder.layer.0.attention.output.dense.bias",
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


def test_slots_counters_transposed_kernels_and_old_hugging_face_gains():
    assert checkpoint_names.is_tf1_optimizer("bert/pooler/dense/kernel/LAMB_1")
    assert checkpoint_names.is_tf1_optimizer("bert/pooler/dense/kernel/adam_m")
    assert checkpoint_names.is_tf1_optimizer("global_step")
    assert not any(checkpoint_names.is_tf1_optimizer(name) for name in checkpoint_names.tf1_names(2).values())
    assert checkpoint_names.is_tf2_bookkeeping("model/a/kernel/.OPTIMIZER_SLOT/optimizer/m/.ATTRIBUTES/VARIABLE_VALUE")
    assert checkpoint_names.is_tf2_bookkeeping("save_counter/.ATTRIBUTES/VARIABLE_VALUE")
    assert own_torch_names("bert.embeddings.LayerNorm.gamma") == ("bert.embeddings.LayerNorm.weight",)
    assert checkpoint_names.is_transposed("bert/pooler/dense/kernel")
    assert checkpoint_names.is_transposed("model/layer_with_weights-16/kernel" + VALUE)
    assert not checkpoint_names.is_transposed("cls/seq_relationship/output_weights")


SHAPE = BertConfig(197, 8, 2, 2, 24, max_position_embeddings=40, type_vocab_size=3)
OPTIONS = {"position_embedding_type": "alibi", "norm_position": "pre", "gated_mlp": True, "tie_word_embeddings": False}


@pytest.mark.parametrize("options", [{}, *({name: value} for name, value in OPTIONS.items()), OPTIONS])
def test_shapes_are_those_of_the_model(options):
    shape = dataclasses.replace(SHAPE, **options)
    assert parameter_shapes(shape) == parameter_sizes(BertForPreTraining(shape))


@pytest.fixture
def arrays():
    random = np.random.default_rng(0)
    return {name: random.normal(size=size).astype(np.float32) for name, size in parameter_shapes(SHAPE).items()}


def test_arrays_come_unpadded_and_the_decoders_copy_is_dropped(arrays):
    tied = next(iter(TIED))
    state, report = own_state({**arrays, tied: arrays[WORD_EMBEDDINGS][:197]}, SHAPE, "file", numpy_float32)
    assert state[WORD_EMBEDDINGS].shape == (197, 8)
    np.testing.assert_array_equal(state[WORD_EMBEDDINGS], arrays[WORD_EMBEDDINGS][:197])
    assert report.dropped == {tied: f"tied to {WORD_EMBEDDINGS}"}
    assert report.warnings("file") == []


NOT_FINITE = np.nan, np.inf, -np.inf


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (WORD_EMBEDDINGS, np.zeros((197, 8), np.int32)),
        (next(iter(TIED)), np.zeros((197, 8))),
        *(("bert.encoder.layer.1.output.dense.weight", np.float32([[0] * 23 + [value]] * 8)) for value in NOT_FINITE),
    ],
    ids=["integers", "untied decoder", "nan", "inf", "-inf"],
)
def test_damaged_arrays_are_refused(arrays, name, value):
    with user_error("checkpoint.damaged", "file"):
        own_state({**arrays, name: value}, SHAPE, "file", numpy_float32)


def test_three_in_one_are_cut_into_rows(arrays):
    stem = "bert.encoder.layer.1.attention.self."
    parts = [arrays.pop(f"{stem}{kind}.weight") for kind in ("query", "key", "value")]
    state, _ = own_state({**arrays, f"{stem}Wqkv.weight": np.concatenate(parts)}, SHAPE, "file", numpy_float32)
    np.testing.assert_array_equal(state[f"{stem}value.weight"], parts[2])
