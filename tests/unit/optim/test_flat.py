"""Parameters and gradients as views of two flat buffers."""

import pytest
import torch
from torch import nn

from mlbert.optim.flat import FlatParameters, is_decayed


def test_decay_depends_on_the_name():
    decayed = (
        "bert.encoder.layer.0.attention.self.query.weight",
        "bert.embeddings.word_embeddings.weight",
    )
    others = (
        "bert.encoder.layer.0.attention.self.query.bias",
        "bert.embeddings.LayerNorm.weight",
        "bert/embeddings/LayerNorm/gamma",
        "bert/encoder/layer_0/attention/output/LayerNorm/beta",
        "cls.predictions.transform.layer_norm.weight",
        "cls/predictions/output_bias",
    )
    assert all(map(is_decayed, decayed))
    assert not any(map(is_decayed, others))


def test_parameters_are_contiguous_and_keep_their_values():
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    flat = FlatParameters(model.named_parameters())
    assert [(s.offset, s.numel) for s in flat.segments] == [(0, 15), (15, 5), (20, 5), (25, 5)]
    assert flat.offsets == [0, 15, 20, 25]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert torch.equal(flat.views(flat.data)[name], before[name])
    flat.data.zero_()
    assert all(not p.any() for p in model.parameters())


def test_backward_accumulates_into_the_flat_gradient():
    model = nn.Linear(4, 2)
    flat = FlatParameters(model.named_parameters())
    address = flat.grad.data_ptr()
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
    assert torch.equal(flat.grad, torch.full((10,), 6.0))
    flat.zero_grad()
    assert not flat.grad.any()
    assert model.weight.grad.data_ptr() == address


def test_tied_parameter_is_stored_once():
    embedding = nn.Embedding(6, 3)
    decoder = nn.Linear(3, 6)
    decoder.weight = embedding.weight
    flat = FlatParameters(nn.ModuleList([embedding, decoder]).named_parameters())
    assert [s.name for s in flat.segments] == ["0.weight", "1.bias"]
    decoder(embedding(torch.tensor([2]))).sum().backward()
    assert embedding.weight.grad is decoder.weight.grad
    assert flat.grad[:18].any()


def test_duplicate_parameter_is_an_error():
    parameter = nn.Parameter(torch.zeros(2))
    with pytest.raises(AssertionError, match="twice"):
        FlatParameters([("a", parameter), ("b", parameter)])
