"""The flat model against Hugging Face's padded one, against itself in other splits,
and its dropout.
"""

import dataclasses

import pytest
import torch
from transformers import BertConfig as PeerConfig
from transformers import BertForPreTraining as PeerModel

from host_batches import made_up_batches
from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import BertForPreTraining
from mlbert.models.weights.huggingface import huggingface_config, padded_inputs
from mlbert.models.weights.weight_files import load_state
from mlbert.optim.flat import FlatParameters
from model_loss import loss_of
from same_weights import initialized, randomize

SHAPE = BertConfig(163, 48, 3, 4, 96, max_position_embeddings=64)
NO_DROPOUT = SHAPE.with_options("hidden_dropout_prob=0 attention_probs_dropout_prob=0")


def made(shape=SHAPE, seed=1, **options):
    return initialized(BertForPreTraining(shape, **options), seed)


def made_batch():
    return made_up_batches(8, 3, 163, 64)[0].to("cpu")


def step_loss(model, batch, dropout=None):
    """The loss of one step and its gradients."""
    model.zero_grad()
    loss = loss_of(model, batch, dropout)
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("activation", ["gelu", "gelu_erf"])
@pytest.mark.parametrize("sparse", [True, False])
def test_equals_hugging_face(activation, sparse):
    shape = dataclasses.replace(NO_DROPOUT, hidden_act=activation)
    peer = randomize(PeerModel(PeerConfig.from_dict(huggingface_config(shape))), 0.1).eval()
    model = made(shape, sparse_last_layer=sparse)
    report = load_state(model, peer.state_dict(), "peer")
    assert report.missing == {}
    assert "no such parameter" not in report.dropped.values()

    batch = made_batch()
    inputs = padded_inputs(batch)
    expected = peer(**inputs)
    expected.loss.backward()
    logits = model(batch, None)
    peer_logits = expected.prediction_logits[inputs["labels"] != -100]
    torch.testing.assert_close(logits.masked[:, : shape.vocab_size], peer_logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        logits.next_sentence, expected.seq_relationship_logits, atol=1e-5, rtol=0
    )
    loss, gradients = step_loss(model, batch)
    assert loss == pytest.approx(float(expected.loss.detach()), abs=1e-5)
    for name, parameter in peer.named_parameters():
        torch.testing.assert_close(
            gradients[name][: len(parameter)], parameter.grad, atol=1e-5, rtol=0, msg=name
        )


def test_last_layer_at_the_heads_only_is_the_same_with_dropout():
    found, expected = (
        step_loss(made(sparse_last_layer=sparse), made_batch(), (1, 1)) for sparse in (True, False)
    )
    assert found[0] == pytest.approx(expected[0], abs=2e-6)
    torch.testing.assert_close(found[1], expected[1], atol=2e-6, rtol=1e-4)


def test_dropout_depends_on_seed_and_step_only():
    model = made()
    losses = {state: step_loss(model, made_batch(), state)[0] for state in [(1, 0), (1, 1), (2, 0)]}
    assert len(set(losses.values())) == 3
    assert step_loss(model, made_batch(), (1, 1))[0] == losses[1, 1]


def test_vocabulary_padding_is_never_predicted_nor_trained():
    model = made(NO_DROPOUT)
    assert model.bert.embeddings.word_embeddings.weight.shape[0] == 168
    _, gradients = step_loss(model, made_batch())
    assert gradients["bert.embeddings.word_embeddings.weight"][163:].abs().max() == 0
    assert gradients["cls.predictions.bias"][163:].abs().max() == 0


def test_query_key_and_value_are_contiguous():
    model = made()
    FlatParameters(model.ordered_parameters())
    part = model.bert.encoder.layer[1].attention.self
    places = [linear.weight.data_ptr() for linear in (part.query, part.key, part.value)]
    assert [place - places[0] for place in places] == [
        n * SHAPE.hidden_size**2 * 4 for n in range(3)
    ]
    assert len(model.ordered_parameters()) == len(list(model.parameters()))


def test_initialization_is_the_reference_one():
    model = made(seed=9)
    again = made(seed=9)
    weight = model.bert.encoder.layer[0].intermediate.dense.weight
    assert torch.equal(weight, again.bert.encoder.layer[0].intermediate.dense.weight)
    assert weight.abs().max() <= 2 * SHAPE.initializer_range
    assert float(weight.detach().std()) == pytest.approx(0.88 * SHAPE.initializer_range, rel=0.03)
    assert float(model.bert.embeddings.LayerNorm.weight.detach().min()) == 1.0
    assert float(model.bert.pooler.dense.bias.detach().abs().max()) == 0.0
