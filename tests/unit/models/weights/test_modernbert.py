"""Models of ModernBERT's form against Hugging Face's:
logits, gradients, weights read back; initialization.
"""

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from host_batches import made_up_batches
from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import (
    DISTANCES,
    BertForMaskedLM,
    BertForPreTraining,
    begin_with_frequencies,
)
from mlbert.models.weights.checkpoint_state import parameter_shapes
from mlbert.models.weights.export import write_weights
from mlbert.models.weights.huggingface import (
    config_from_huggingface,
    exported_config,
    padded_inputs,
    read_config,
    to_huggingface,
)
from mlbert.models.weights.load import load_weights
from mlbert.models.weights.modernbert import FULL, SLIDING
from mlbert.models.weights.weight_files import parameter_sizes
from mlbert.ops import api as ops
from mlbert.ops import reference
from same_weights import assert_same_tensors, randomize
from user_errors import user_error

SHAPE = BertConfig(99, 48, 3, 3, 40, max_position_embeddings=64).with_options(
    "hidden_dropout_prob=0 attention_probs_dropout_prob=0 layer_norm_eps=1e-5"
    " position_embedding_type=rotary rope_theta=500 norm_position=pre gated_mlp=true"
)
LOOK_LENGTH = 96
# The published base's config.json in both dialects, as far as it has a shape.
PUBLISHED = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "classifier_bias": False,
    "classifier_pooling": "mean",
    "decoder_bias": True,
    "embedding_dropout": 0.0,
    "gradient_checkpointing": False,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "intermediate_size": 1152,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "pad_token_id": 50283,
    "position_embedding_type": "absolute",
    "vocab_size": 50368,
}
VERSION_4 = {
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
}
VERSION_5 = {
    "layer_types": [SLIDING if layer % 3 else FULL for layer in range(22)],
    "rope_parameters": {
        FULL: {"rope_theta": 160000.0, "rope_type": "default"},
        SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
    },
}
BASE = BertConfig(
    vocab_size=50368,
    hidden_size=768,
    num_hidden_layers=22,
    num_attention_heads=12,
    intermediate_size=1152,
    max_position_embeddings=8192,
    hidden_act="gelu_erf",
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    layer_norm_eps=1e-5,
    position_embedding_type="rotary",
    rope_theta=160000.0,
    norm_position="pre",
    gated_mlp=True,
    attention_bias=False,
    mlp_bias=False,
    norm_bias=False,
    classifier_bias=False,
    local_attention=128,
    global_attn_every_n_layers=3,
    rope_frequencies="product",
    initializer="megatron",
    classifier_pooling="mean",
)
SHAPES = {
    "attention_bias": st.booleans(),
    "mlp_bias": st.booleans(),
    "norm_bias": st.booleans(),
    "classifier_bias": st.booleans(),
    "tie_word_embeddings": st.booleans(),
    "hidden_act": st.sampled_from(["gelu", "gelu_erf"]),
    "rope_theta": st.sampled_from([10_000.0, 160_000.0]),
    "local_rope_theta": st.sampled_from([10_000.0, 160_000.0]),
    "rope_frequencies": st.sampled_from(["quotient", "product"]),
    "hidden_dropout_prob": st.sampled_from([0.0, 0.1]),
    "attention_probs_dropout_prob": st.sampled_from([0.0, 0.1]),
    "embedding_dropout_prob": st.sampled_from([None, 0.0, 0.1]),
    "attention_output_dropout_prob": st.sampled_from([None, 0.0, 0.1]),
    "initializer": st.sampled_from(["flat", "megatron"]),
    "initializer_cutoff_factor": st.sampled_from([2.0, 3.0]),
    "classifier_pooling": st.sampled_from(["tanh", "cls", "mean"]),
    "vocab_size_multiple": st.sampled_from([8, 64]),
}


@pytest.mark.parametrize(
    "options", ["", "hidden_act=gelu_erf rope_theta=160000", "tie_word_embeddings=false"]
)
def test_hugging_face_reads_its_copy(tmp_path, chosen_ops, options):
    model = randomize(BertForMaskedLM(SHAPE.with_options(options)))
    write_weights(model, tmp_path, {}, None)
    found, loading = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "huggingface", output_loading_info=True, attn_implementation="eager"
    )
    assert type(found).__name__ == "ModernBertForMaskedLM"
    assert not any(loading.values())
    batch = made_up_batches(3, seed=1, vocab_size=99, max_tokens=32)[0].to("cpu")
    inputs = padded_inputs(batch)
    ours = model(batch, None).masked[:, :99]
    theirs = found.eval()(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
    ).logits
    theirs = theirs[inputs["labels"] != -100]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    # The same loss gives the same gradient of the embeddings, through every layer.
    weights = (
        model.bert.embeddings.word_embeddings.weight,
        found.model.embeddings.tok_embeddings.weight,
    )
    gradients = [
        torch.autograd.grad(torch.nn.functional.cross_entropy(logits, batch.masked_labels), weight)[
            0
        ][:99]
        for logits, weight in zip((ours, theirs), weights, strict=True)
    ]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)
    assert read_config(tmp_path / "huggingface/config.json") == model.config
    again = BertForMaskedLM(model.config)
    assert not load_weights(again, tmp_path / "huggingface").missing
    assert_same_tensors(to_huggingface(again), to_huggingface(model))


@pytest.mark.parametrize("dialect", [VERSION_4, VERSION_5, {}, VERSION_4 | VERSION_5])
def test_both_dialects_are_read(dialect):
    assert config_from_huggingface({**PUBLISHED, **dialect}) == BASE


def test_bases_of_mmbert_and_stage_one():
    same = VERSION_4 | {"local_rope_theta": None}  # as the global one
    assert config_from_huggingface({**PUBLISHED, **same}).local_rope_theta == 160_000
    stage_1 = VERSION_4 | {"global_rope_theta": 10_000.0}
    assert config_from_huggingface({**PUBLISHED, **stage_1}).rope_theta == 10_000


def test_spelled_layers_count_more_than_a_stale_number():
    """transformers 5 keeps a number that it has read next to layer_types."""
    values = {**PUBLISHED, **VERSION_5, "global_attn_every_n_layers": 1}
    assert config_from_huggingface(values) == BASE


@given(options=st.fixed_dictionaries(SHAPES), every=st.integers(0, 4), tokens=st.integers(1, 200))
@settings(max_examples=60)
def test_any_shape_comes_back(tmp_path_factory, options, every, tokens):
    local = 0 if every == 1 else tokens
    shape = dataclasses.replace(
        SHAPE, **options, global_attn_every_n_layers=every, local_attention=local
    )
    with torch.device("meta"):
        model = BertForPreTraining(shape)
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert parameter_shapes(shape) == parameter_sizes(model)
    values = exported_config(shape, "BertForMaskedLM")
    assert config_from_huggingface(values) == shape
    # transformers reads the file, keeps what it does not know, and saves the other dialect.
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(values))
    transformers.AutoConfig.from_pretrained(folder).save_pretrained(folder / "again")
    saved = json.loads((folder / "again/config.json").read_text())
    assert "global_rope_theta" not in saved
    assert read_config(folder / "again/config.json") == shape


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decoder_bias", False),
        ("causal_mask", True),
        ("hidden_activation", "silu"),
        ("layer_types", ["sliding_attention", "full_attention", "full_attention"]),
        ("rope_parameters", {FULL: {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ],
)
def test_another_modernbert_is_refused(tmp_path, name, value):
    write_weights(randomize(BertForMaskedLM(SHAPE)), tmp_path, {}, None)
    config = tmp_path / "huggingface/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {name: value}))
    with user_error("model.unsupported", config) as caught:
        read_config(config)
    assert ("rope_type" if name.startswith("rope") else name) in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"local_attention": 8},
        {"global_attn_every_n_layers": 2},
        {"position_embedding_type": "alibi", "norm_bias": False},
        {"position_embedding_type": "absolute", "classifier_pooling": "mean"},
    ],
)
def test_options_that_contradict_each_other(options):
    with user_error("model.shape", "bert_config"):
        dataclasses.replace(SHAPE, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"norm_position": "post"},
        {"gated_mlp": False},
        {"num_attention_heads": 16},
        {"rope_theta": 1.0},
    ],
)
def test_a_shape_that_is_not_of_the_form(options):
    with user_error("model.shape", "bert_config"):
        dataclasses.replace(SHAPE, **options)


@pytest.mark.parametrize(
    ("head_size", "theta"), [(16, 10_000.0), (32, 10_000.0), (64, 10_000.0), (64, 160_000.0)]
)
def test_heads_look_at_neighbors(head_size, theta):
    shape = dataclasses.replace(
        SHAPE, num_attention_heads=8, hidden_size=8 * head_size, rope_theta=theta
    )
    model = BertForMaskedLM(shape)
    model.initialize(1)
    part = model.bert.encoder.layers[0].attention.self
    qkv = torch.stack([part.query.bias, part.key.bias, part.value.bias]).view(1, 3, 8, head_size)
    rotations = ops.rotations(torch.arange(LOOK_LENGTH), head_size, theta)
    turned = reference.rotary(qkv.expand(LOOK_LENGTH, 3, 8, head_size), rotations)
    scores = torch.einsum("inh,jnh->nij", turned[:, 0], turned[:, 1]) * head_size**-0.5
    weights = scores.softmax(-1).detach()
    for head, distance in enumerate(DISTANCES):
        inside = torch.arange(3, LOOK_LENGTH - 3)
        there = weights[head, inside, inside + distance]
        assert there.min() > 0.5, (distance, there.min())
    torch.testing.assert_close(
        weights[len(DISTANCES) :], torch.full_like(weights[len(DISTANCES) :], 1 / LOOK_LENGTH)
    )


@pytest.mark.parametrize("tied", [True, False])
def test_words_are_as_likely_as_they_are_frequent(tied):
    model = BertForMaskedLM(dataclasses.replace(SHAPE, tie_word_embeddings=tied))
    model.initialize(1)
    counts = np.arange(99) ** 2
    begin_with_frequencies(model, counts)
    bias = model.cls.predictions.bias if tied else model.cls.predictions.decoder.bias
    expected = torch.from_numpy((counts + 1) / (counts + 1).sum()).float()
    torch.testing.assert_close(bias[:99].softmax(0).detach(), expected)
    assert not bias[99:].any()
