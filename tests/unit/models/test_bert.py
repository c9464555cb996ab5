"""The flat model against Hugging Face's padded one, against itself in other splits, and its dropout."""

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
from same_weights import randomize

SHAPE = BertConfig(163, 48, 3, 4, 96, max_position_embeddings=64)
NO_DROPOUT = SHAPE.with_options("hidden_dropout_prob=0 attention_probs_dropout_prob=0")


def made(shape=SHAPE, dtype=torch.float32, seed=1, **options):
    model = BertForPreTraining(shape, dtype, **options)
    model.initialize(seed)
    return model


def micro_batches(accumulation=1, packs=8, seed=3):
    return [batch.to("cpu") for batch in made_up_batches(packs, seed, 163, 64, accumulation=accumulation)]


def step_loss(model, batches, dropout=None):
    """The loss of one optimizer step and its gradients, however the step is split."""
    model.zero_grad()
    masked, samples = sum(b.num_masked for b in batches), sum(b.num_samples for b in batches)
    losses = []
    for batch in batches:
        loss = loss_of(model, batch, dropout, (masked, samples))
        loss.backward()
        losses.append(float(loss.detach()))
    return sum(losses), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("activation", ["gelu", "gelu_erf"])
@pytest.mark.parametrize("sparse", [True, False])
def test_equals_hugging_face(activation, sparse):
    shape = dataclasses.replace(NO_DROPOUT, hidden_act=activation)
    values = {k: v for k, v in huggingface_config(shape).items() if k not in ("model_type", "architectures")}
    peer = randomize(PeerModel(PeerConfig(**values)), 0.1).eval()
    model = made(shape, sparse_last_layer=sparse)
    report = load_state(model, peer.state_dict(), "peer")
    assert report.missing == {}
    assert "no such parameter" not in report.dropped.values()

    batch = micro_batches()[0]
    inputs = padded_inputs(batch)
    expected = peer(**inputs)
    expected.loss.backward()
    logits = model(batch, None)
    peer_logits = expected.prediction_logits[inputs["labels"] != -100]
    torch.testing.assert_close(logits.masked[:, : shape.vocab_size], peer_logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits.next_sentence, expected.seq_relationship_logits, atol=1e-5, rtol=0)
    loss, gradients = step_loss(model, [batch])
    assert loss == pytest.approx(float(expected.loss.detach()), abs=1e-5)
    for name, parameter in peer.named_parameters():
        torch.testing.assert_close(gradients[name][: len(parameter)], parameter.grad, atol=1e-5, rtol=0, msg=name)


def test_last_layer_at_the_heads_only_is_the_same_with_dropout():
    found, expected = (step_loss(made(sparse_last_layer=sparse), micro_batches(), (1, 1)) for sparse in (True, False))
    assert found[0] == pytest.approx(expected[0], abs=2e-6)
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, expected[1][name], atol=2e-6, rtol=1e-4, msg=name)


def test_dropout_depends_on_seed_and_step_only():
    model = made()
    losses = {state: step_loss(model, micro_batches(), state)[0] for state in [(1, 0), (1, 1), (2, 0)]}
    assert len(set(losses.values())) == 3
    assert step_loss(model, micro_batches(), (1, 1))[0] == losses[1, 1]


def test_other_sequences_do_not_leak_into_a_sequence():
    model = made(NO_DROPOUT)
    batch = micro_batches()[0]
    end = int(batch.cu_seqlens[1])
    tampered = batch.input_ids.clone()
    tampered[end:] = (tampered[end:] + 17) % SHAPE.vocab_size
    with torch.no_grad():
        before = model.bert(batch, None, None)[:end]
        after = model.bert(dataclasses.replace(batch, input_ids=tampered), None, None)[:end]
    torch.testing.assert_close(after, before, atol=1e-6, rtol=0)


def test_vocabulary_padding_is_never_predicted_nor_trained():
    model = made(NO_DROPOUT)
    assert model.bert.embeddings.word_embeddings.weight.shape[0] == 168
    _, gradients = step_loss(model, micro_batches())
    assert gradients["bert.embeddings.word_embeddings.weight"][163:].abs().max() == 0
    assert gradients["cls.predictions.bias"][163:].abs().max() == 0


def test_bfloat16_stays_near_float32():
    dtypes = (torch.float32, torch.bfloat16)
    exact, found = (step_loss(made(dtype=dtype), micro_batches(), (3, 3))[0] for dtype in dtypes)
    assert found == pytest.approx(exact, rel=5e-3)


def test_query_key_and_value_are_contiguous():
    model = made()
    FlatParameters(model.ordered_parameters())
    part = model.bert.encoder.layer[1].attention.self
    size = SHAPE.hidden_size**2 * 4
    assert part.key.weight.data_ptr() - part.query.weight.data_ptr() == size
    assert part.value.weight.data_ptr() - part.key.weight.data_ptr() == size
    assert len(model.ordered_parameters()) == len(list(model.parameters()))


def test_initialisation_is_the_reference_one():
    model, again = made(seed=9), made(seed=9)
    weight = model.bert.encoder.layer[0].intermediate.dense.weight
    assert torch.equal(weight, again.bert.encoder.layer[0].intermediate.dense.weight)
    assert weight.abs().max() <= 2 * SHAPE.initializer_range
    assert float(weight.detach().std()) == pytest.approx(0.88 * SHAPE.initializer_range, rel=0.03)
    assert float(model.bert.embeddings.LayerNorm.weight.detach().min()) == 1.0
    assert float(model.bert.pooler.dense.bias.detach().abs().max()) == 0.0
