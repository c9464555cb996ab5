"""Our ModernBERT against that of transformers: logits, loss and all gradients from equal
weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from mlbert.models.bert import BertForMaskedLM, BertForSequenceClassification
from mlbert.models.weights.huggingface import read_config
from mlbert.models.weights.load import load_weights
from mlbert.models.weights.weight_files import own_state
from modernbert_peers import (
    SMALL,
    masked_batch,
    open_own,
    own_gradients,
    peer_outputs,
    relative,
    save_peer,
)

OF_NORM = 1e-5
BASE: dict[str, Any] = {
    "vocab_size": 50_368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_attention_heads": 12,
    "local_attention": 128,
    "max_position_embeddings": 8192,
}
LENGTHS = {
    "single": [70],
    "one token": [1],
    "packed": [9, 1, 40, 2, 17, 100, 8],
    "at the window's edge": [8, 9, 16, 17, 18],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tie_word_embeddings": False},
    "all global": {"layer_types": ["full_attention"] * 5},
    "all local": {"layer_types": ["sliding_attention"] * 5},
    "every second": {"global_attn_every_n_layers": 2},
    "odd window": {"local_attention": 7},
    "own neighborhood only": {"local_attention": 1},
    "tanh": {
        "hidden_activation": "gelu_pytorch_tanh",
        "classifier_activation": "gelu_pytorch_tanh",
    },
    "biases": {"attention_bias": True, "norm_bias": True, "classifier_bias": True},
}


def assert_equal(peer: Any, folder: Path, lengths: list[int]) -> BertForMaskedLM:
    """Compare loss, logits and all gradients; return our model."""
    model = open_own(folder)
    batch = masked_batch(lengths, model.config.vocab_size)
    peer.zero_grad()
    expected_loss, expected = peer_outputs(peer, batch)
    expected_loss.backward()
    logits = model(batch, None).masked[:, : model.config.vocab_size]
    loss = F.cross_entropy(logits, batch.masked_labels)
    loss.backward()
    assert relative(logits, expected) < OF_NORM
    assert relative(loss, expected_loss) < OF_NORM
    gradients = own_gradients(model)
    theirs = dict(peer.named_parameters())
    assert gradients.keys() == theirs.keys()
    for name, parameter in theirs.items():
        gradient = parameter.grad
        if name.endswith("Wqkv.bias"):  # that of the keys is 0, and rounding noise
            gradient = gradient.detach().clone()
            size = len(gradient) // 3
            gradient[size : 2 * size] = 0
            gradients[name][size : 2 * size] = 0
        if lengths == [1] and "attn" in name and "Wqkv" in name:
            continue  # one key: no gradient of query and key but rounding
        assert relative(gradients[name], gradient) < OF_NORM, name
    return model


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_lengths(tmp_path, chosen_ops, lengths):
    assert_equal(save_peer(tmp_path), tmp_path, lengths)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(tmp_path, options):
    assert_equal(save_peer(tmp_path, **options), tmp_path, LENGTHS["packed"])


def test_base_with_few_layers(tmp_path):
    """Three layers: both kinds of attention, and the first one's missing norm."""
    peer = save_peer(tmp_path, **BASE, num_hidden_layers=3)
    model = assert_equal(peer, tmp_path, [300, 130, 1, 129, 64])
    shape = model.config
    assert (shape.rope_theta, shape.local_rope_theta, shape.local_window) == (160_000, 10_000, 64)


def test_longest_sequence(tmp_path):
    sizes = {"max_position_embeddings": 8192, "local_attention": 128, "num_hidden_layers": 2}
    peer = save_peer(tmp_path, **sizes)
    assert_equal(peer, tmp_path, [8192])


@pytest.mark.slow
def test_whole_base(tmp_path):
    peer = save_peer(tmp_path, **BASE, num_hidden_layers=22)
    model = assert_equal(peer, tmp_path, [700, 90, 234])
    assert sum(parameter.numel() for parameter in model.parameters()) == 149_655_232


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_classifier(tmp_path, pooling, num_labels):
    peer = save_peer(
        tmp_path,
        "ModernBertForSequenceClassification",
        classifier_pooling=pooling,
        num_labels=num_labels,
    )
    model = BertForSequenceClassification(read_config(tmp_path / "config.json"), num_labels)
    report = load_weights(model, tmp_path)
    assert not report.missing
    batch = masked_batch([9, 1, 40, 100], 99)
    found = model(batch, None).labels
    width = batch.max_seqlen
    ids = torch.zeros(4, width, dtype=torch.int64)
    mask = torch.zeros(4, width, dtype=torch.int64)
    bounds = batch.cu_seqlens.tolist()
    for row in range(4):
        tokens = batch.input_ids[bounds[row] : bounds[row + 1]]
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
    expected = peer(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    target = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    F.mse_loss(found, target).backward()
    F.mse_loss(expected, target).backward()
    theirs = {name: parameter.grad for name, parameter in peer.named_parameters()}
    gradients, _ = own_state(theirs, model.config, "gradients")
    for name, parameter in model.named_parameters():
        if name.startswith("classifier"):
            expected_gradient = theirs[name]
        else:
            expected_gradient = gradients[name]
        found_gradient = parameter.grad[: len(expected_gradient)]
        assert relative(found_gradient, expected_gradient) < OF_NORM, name


def test_initialization(tmp_path):
    """Deviations and cutoffs of each kind of matrix, against transformers' draw."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4}
    values = SMALL | sizes | {"vocab_size": 2000}
    config = transformers.ModernBertConfig(**values)
    torch.manual_seed(3)
    peer = transformers.ModernBertForMaskedLM(config)
    config.save_pretrained(tmp_path)
    model = BertForMaskedLM(read_config(tmp_path / "config.json"))
    model.initialize(1)
    expected, _ = own_state(peer.state_dict(), model.config, "peer")
    for name, parameter in model.named_parameters():
        ours = parameter.detach()[: len(expected[name])]
        if parameter.ndim == 1:
            assert torch.equal(ours, expected[name]), name
            continue
        assert abs(ours.std() / expected[name].std() - 1) < 0.02, name
        assert abs(ours.abs().max() / expected[name].abs().max() - 1) < 0.02, name


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6), window=st.integers(0, 40))
@settings(max_examples=8)
def test_any_lengths(tmp_path_factory, lengths, window):
    folder = tmp_path_factory.mktemp("peer")
    assert_equal(save_peer(folder, local_attention=max(1, 2 * window)), folder, lengths)


def test_twenty_steps(tmp_path):
    """The same updates from equal weights and masks, packed here and padded there."""
    peer = save_peer(tmp_path)
    model = open_own(tmp_path)
    optimizers = [
        torch.optim.AdamW(network.parameters(), 1e-3, (0.9, 0.98), 1e-6, weight_decay=1e-2)
        for network in (model, peer)
    ]
    first = None
    for step in range(20):
        batch = masked_batch([30, 7, 64, 1, 18], 40, step)
        logits = model(batch, None).masked[:, : model.config.vocab_size]
        ours = F.cross_entropy(logits, batch.masked_labels)
        theirs, _ = peer_outputs(peer, batch)
        assert abs(float(ours.detach() - theirs.detach())) < 1e-5, step
        for optimizer, loss in zip(optimizers, (ours, theirs), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        first = float(ours.detach()) if first is None else first
    assert float(ours.detach()) < first - 0.2


def test_bfloat16_is_as_near_as_rounding_allows(tmp_path):
    """Errors against float64: ours at most a little more than those of transformers' autocast."""
    peer = save_peer(tmp_path)
    shape = read_config(tmp_path / "config.json")
    model = BertForMaskedLM(shape, torch.bfloat16)
    load_weights(model, tmp_path)
    peer.set_attn_implementation("sdpa")  # its eager form has NaN in float64
    batch = masked_batch([100], 99)
    with torch.no_grad():
        ours = model(batch, None).masked[:, :99].double()
        with torch.autocast("cpu", torch.bfloat16):
            theirs = peer_outputs(peer, batch)[1].double()
        exact = peer_outputs(peer.double(), batch)[1]
    assert relative(ours, exact) < 1.5 * relative(theirs, exact)
