"""Names of checkpoints: bijections for a small and a large BERT,
and every spelling back to ours.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import BertForPreTraining
from mlbert.models.weights import checkpoint_names
from mlbert.models.weights.checkpoint_names import own_tf2_name, own_torch_names, parameter_names
from mlbert.models.weights.checkpoint_state import numpy_float32, own_state, parameter_shapes
from mlbert.models.weights.weight_files import parameter_sizes
from user_errors import user_error

VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
NAMES = Path(__file__).parents[3] / "assets" / "checkpoints" / "names.txt"
LAYER = "bert.encoder.layer."
SHAPE = BertConfig(197, 8, 2, 2, 24, max_position_embeddings=40, type_vocab_size=3)
OPTIONS = {
    "position_embedding_type": "alibi",
    "norm_position": "pre",
    "gated_mlp": True,
    "tie_word_embeddings": False,
}


def test_ours_are_the_models_names():
    model = BertForPreTraining(BertConfig(24, 8, 3, 2, 16))
    assert sorted(parameter_names(3)) == sorted(name for name, _ in model.named_parameters())
    assert len(set(parameter_names(24))) == 398, "those of BERT-large"


@pytest.mark.parametrize("layout", ["pretrainer", "items", "variables"])
def test_tf2_keys_lead_back(layout):
    rows = [line.split()[1:] for line in NAMES.read_text().splitlines()]
    names = {key: own for of, key, own in rows if of == layout}
    assert list(names.values()) == parameter_names(2)
    for key, own in names.items():
        assert own_tf2_name(key) == own
        assert own_tf2_name(key.removesuffix(VALUE)) == own
        assert not checkpoint_names.is_tf2_bookkeeping(key)


def test_published_tf1_names():
    published = {
        "bert.encoder.layer.11.attention.self.query.weight": (
            "bert/encoder/layer_11/attention/self/query/kernel"
        ),
        "bert.encoder.layer.1.output.LayerNorm.bias": "bert/encoder/layer_1/output/LayerNorm/beta",
        "bert.embeddings.word_embeddings.weight": "bert/embeddings/word_embeddings",
        "cls.predictions.bias": "cls/predictions/output_bias",
        "cls.predictions.transform.LayerNorm.weight": "cls/predictions/transform/LayerNorm/gamma",
        "cls.seq_relationship.weight": "cls/seq_relationship/output_weights",
    }
    table = checkpoint_names.tf1_names(12)
    assert published.items() <= table.items()
    assert list(table) == parameter_names(12)
    assert len(set(table.values())) == len(table)


def test_published_tf2_keys():
    published = {
        "model/layer_with_weights-0/embeddings": "bert.embeddings.word_embeddings.weight",
        "masked_lm/embedding_table": "bert.embeddings.word_embeddings.weight",
        "encoder/layer_with_weights-1/embeddings": "bert.embeddings.position_embeddings.weight",
        "model/layer_with_weights-16/kernel": "bert.pooler.dense.weight",
        "next_sentence..pooler_dense/bias": "bert.pooler.dense.bias",
        "encoder/layer_with_weights-4/_attention_output_dense/bias": (
            f"{LAYER}0.attention.output.dense.bias"
        ),
        "encoder/layer_with_weights-15/_output_dense/bias": f"{LAYER}11.output.dense.bias",
        "model/layer_with_weights-1/dense/kernel": "cls.predictions.transform.dense.weight",
        "model/layer_with_weights-2/layer_with_weights-0/kernel": "cls.seq_relationship.weight",
    }
    assert {key: own_tf2_name(key + VALUE) for key in published} == published
    for foreign in ("transformer/layer_3/self_attention/attention_output/kernel", "somebody/elses"):
        assert own_tf2_name(foreign + VALUE) not in parameter_names(2)


def test_slots_counters_transposed_kernels_and_old_hugging_face_gains():
    slots = ("bert/pooler/dense/kernel/LAMB_1", "bert/pooler/dense/kernel/adam_m", "global_step")
    assert all(map(checkpoint_names.is_tf1_optimizer, slots))
    assert not any(map(checkpoint_names.is_tf1_optimizer, checkpoint_names.tf1_names(2).values()))
    for key in ("model/a/kernel/.OPTIMIZER_SLOT/optimizer/m", "save_counter"):
        assert checkpoint_names.is_tf2_bookkeeping(key + VALUE)
    assert own_torch_names("bert.embeddings.LayerNorm.gamma") == (
        "bert.embeddings.LayerNorm.weight",
    )
    assert checkpoint_names.is_transposed("bert/pooler/dense/kernel")
    assert checkpoint_names.is_transposed("model/layer_with_weights-16/kernel" + VALUE)
    assert not checkpoint_names.is_transposed("cls/seq_relationship/output_weights")


@pytest.mark.parametrize(
    "options", [{}, *({name: value} for name, value in OPTIONS.items()), OPTIONS]
)
def test_shapes_are_those_of_the_model(options):
    shape = dataclasses.replace(SHAPE, **options)
    assert parameter_shapes(shape) == parameter_sizes(BertForPreTraining(shape))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(value):
    arrays = {name: np.zeros(size, np.float32) for name, size in parameter_shapes(SHAPE).items()}
    arrays["bert.encoder.layer.1.output.dense.weight"][3, 5] = value
    with user_error("checkpoint.damaged", "file"):
        own_state(arrays, SHAPE, "file", numpy_float32)
