"""Names of checkpoints: bijections for a small and a large BERT, and every spelling back to ours."""

from pathlib import Path

import pytest

from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import BertForPreTraining
from mlbert.models.weights.checkpoint_names import (
    TIED,
    composer_name,
    is_tf1_optimizer,
    is_tf2_bookkeeping,
    is_transposed,
    own_tf2_name,
    own_torch_names,
    parameter_names,
    tf1_names,
)

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
