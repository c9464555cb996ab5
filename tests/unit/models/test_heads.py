"""All heads, an untied decoder and LayerNorm before the sublayers against Hugging Face's
models.
"""

import dataclasses

import pytest
import torch
import transformers
from torch import Tensor

from host_batches import filled, made_up_batches
from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import Batch, HostBatch, StaticShape
from mlbert.models.bert import BertForPreTraining, BertForSequenceClassification
from mlbert.models.weights.huggingface import huggingface_config, padded_inputs
from model_loss import loss_of
from same_weights import initialized, randomize
from user_errors import user_error

DROPPING = BertConfig(163, 48, 2, 4, 96, max_position_embeddings=64, hidden_act="gelu_erf")
SHAPE = DROPPING.with_options("hidden_dropout_prob=0 attention_probs_dropout_prob=0")


def batches(accumulation: int = 1) -> list[HostBatch]:
    return made_up_batches(6, seed=3, vocab_size=163, max_tokens=64, accumulation=accumulation)


def test_the_classifier_drops_out():
    """Only the head's key changes here."""
    model = initialized(
        BertForSequenceClassification(SHAPE.with_options("hidden_dropout_prob=0.1"), 2)
    )
    batch = batches()[0].to("cpu")
    keys = model.dropout_keys(1, 0).tolist()
    first = model(batch, keys).labels
    keys[0][1] += 1
    assert not torch.equal(model(batch, keys).labels, first)
    keys[0][1] -= 1
    assert torch.equal(model(batch, keys).labels, first)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("positions", ["absolute", "alibi"])
def test_options_do_not_depend_on_the_split_or_on_filling(gated, norm, positions):
    """With dropout: a step in one batch, in three and filled up to fixed sizes has one loss
    and one gradient.
    """
    options = {"gated_mlp": gated, "norm_position": norm, "position_embedding_type": positions}
    model = initialized(BertForPreTraining(dataclasses.replace(DROPPING, **options)))

    def step(batches: list[Batch]) -> tuple[float, list[Tensor]]:
        model.zero_grad()
        losses = [loss_of(model, b, (5, 1), counts) for b in batches]
        for loss in losses:
            loss.backward()
        return sum(float(loss.detach()) for loss in losses), [
            p.grad.clone() for p in model.parameters()
        ]

    (whole,) = batches()
    thirds = batches(accumulation=3)
    counts = whole.num_masked, whole.num_samples
    sizes = StaticShape(whole.num_tokens + 9, whole.num_samples + 2, whole.num_masked + 3, 64)
    loss, gradients = step([whole.to("cpu")])
    for other in ([third.to("cpu") for third in thirds], [filled(whole, sizes)]):
        found, others = step(other)
        assert found == pytest.approx(loss, abs=3e-6)
        torch.testing.assert_close(others, gradients, atol=3e-6, rtol=1e-4)


@pytest.mark.parametrize("sparse", [True, False])
def test_pre_layer_norm_is_that_of_roberta_prelayernorm(sparse):
    shape = dataclasses.replace(SHAPE, norm_position="pre")
    model = randomize(BertForPreTraining(shape, sparse_last_layer=sparse), 0.1)
    values = {
        k: v
        for k, v in huggingface_config(SHAPE).items()
        if k not in ("model_type", "architectures")
    }
    config = transformers.RobertaPreLayerNormConfig(**values, attn_implementation="eager")
    peer = transformers.RobertaPreLayerNormModel(config, add_pooling_layer=False).eval()
    own = {
        name.removeprefix("bert."): p.detach()
        for name, p in model.named_parameters()
        if name.startswith("bert.")
    }
    own["embeddings.word_embeddings.weight"] = own["embeddings.word_embeddings.weight"][
        : shape.vocab_size
    ]
    names = {
        name: name.replace("encoder.LayerNorm", "LayerNorm")
        for name in own
        if not name.startswith("pooler")
    }
    state = {theirs: own[name] for name, theirs in names.items()}
    missing, unexpected = peer.load_state_dict(state, strict=False)
    assert unexpected == []
    assert all("position_ids" in name or "token_type_ids" in name for name in missing)
    batch = batches()[0].to("cpu")
    inputs = padded_inputs(batch)
    inputs = {name: inputs[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
    positions = torch.arange(inputs["input_ids"].shape[1]).expand_as(inputs["input_ids"])
    hidden = peer(**inputs, position_ids=positions).last_hidden_state
    used = inputs["attention_mask"].bool()
    torch.testing.assert_close(model.bert(batch, None, None), hidden[used], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "option", ["gated_mlp=true", "norm_position=pre", "position_embedding_type=alibi"]
)
def test_shapes_that_hugging_face_lacks_are_refused(option):
    with user_error("model.unsupported", "Hugging Face"):
        huggingface_config(SHAPE.with_options(option))
