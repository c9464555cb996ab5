"""Models of ModernBERT's form against Hugging Face's: logits, gradients, weights that come back; its start."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers

from host_batches import made_up_batches
from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import DISTANCES, BertForMaskedLM, begin_with_frequencies
from mlbert.models.weights.export import write_weights
from mlbert.models.weights.huggingface import padded_inputs, read_config, to_huggingface
from mlbert.models.weights.load import load_weights
from mlbert.ops import api as ops
from same_weights import assert_same_tensors, randomize
from user_errors import user_error

SHAPE = BertConfig(99, 48, 3, 3, 40, max_position_embeddings=64).with_options(
    "hidden_dropout_prob=0 attention_probs_dropout_prob=0 layer_norm_eps=1e-5"
    " position_embedding_type=rotary rope_theta=500 norm_position=pre gated_mlp=true"
)
LOOK_LENGTH = 96


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


@pytest.mark.parametrize(
    ("name", "value"),
    [("global_attn_every_n_layers", 3), ("attention_bias", False), ("hidden_activation", "silu")],
)
def test_another_modernbert_is_refused(tmp_path, name, value):
    write_weights(randomize(BertForMaskedLM(SHAPE)), tmp_path, {}, None)
    config = tmp_path / "huggingface/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {name: value}))
    with user_error("model.unsupported", config) as caught:
        read_config(config)
    assert name in str(caught.value)


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
def test_heads_look_at_neighbours(head_size, theta):
    shape = dataclasses.replace(
        SHAPE, num_attention_heads=8, hidden_size=8 * head_size, rope_theta=theta
    )
    model = BertForMaskedLM(shape)
    model.initialize(1)
    part = model.bert.encoder.layers[0].attention.self
    qkv = torch.stack([part.query.bias, part.key.bias, part.value.bias]).view(1, 3, 8, head_size)
    rotations = ops.rotations(torch.arange(LOOK_LENGTH), head_size, theta)
    turned = ops.rotary(qkv.expand(LOOK_LENGTH, 3, 8, head_size), rotations)
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
