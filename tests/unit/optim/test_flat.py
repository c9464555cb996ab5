"""Parameters and gradients as views of two flat buffers."""

import pytest
import torch
from torch import nn

from mlbert.ops.weights import buffer_to_add, gradient_buffer, written
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


def overwritten(flat: FlatParameters, index: int, gradient: torch.Tensor) -> None:
    """Write a parameter's gradient as a product does."""
    parameter = flat.parameters[index]
    buffer = gradient_buffer((parameter,))
    assert buffer is not None
    buffer.keep(gradient)
    written((parameter,))


def poisoned(flat: FlatParameters) -> None:
    """Begin a step after one that left only NaN."""
    flat.padded_grad.fill_(torch.nan)
    flat.begin_gradients()


@pytest.fixture
def expecting() -> FlatParameters:
    """Two matrices and two vectors of which a product has overwritten the first matrix, with 6
    elements of padding, after a step began on gradients of NaN.
    """
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    flat = FlatParameters(model.named_parameters(), multiple=32)
    overwritten(flat, 0, torch.ones(4, 3))
    poisoned(flat)
    return flat


def test_only_gradients_that_are_overwritten_keep_old_values(expecting):
    assert expecting.parameters[0].grad.isnan().all()
    assert torch.equal(expecting.padded_grad[12:], torch.zeros(20))
    overwritten(expecting, 0, torch.full((4, 3), 2.0))
    assert torch.equal(expecting.parameters[0].grad, torch.full((4, 3), 2.0))
    overwritten(expecting, 0, torch.ones(4, 3))
    assert torch.equal(expecting.parameters[0].grad, torch.full((4, 3), 3.0)), "the second adds"
    expecting.finish_gradients()
    assert torch.equal(expecting.parameters[0].grad, torch.full((4, 3), 3.0))
    poisoned(expecting)
    assert expecting.parameters[0].grad.isnan().all(), "the first write overwrote it"


def test_gradient_that_is_not_overwritten_as_expected_is_zeroed(expecting):
    expecting.finish_gradients()
    assert torch.equal(expecting.padded_grad, torch.zeros(32))
    poisoned(expecting)
    assert torch.equal(expecting.padded_grad, torch.zeros(32)), "it is no longer expected"


def test_autograd_adds_to_zero_where_a_product_was_expected(expecting):
    weight = expecting.parameters[0]
    for total in (1.0, 2.0):
        weight.sum().backward()
        assert torch.equal(weight.grad, torch.full((4, 3), total))
    poisoned(expecting)
    assert torch.equal(weight.grad, torch.zeros(4, 3))
    overwritten(expecting, 0, torch.ones(4, 3))
    weight.sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 3), 2.0)), "as with tied weights"


def test_rows_are_added_to_zero_where_a_product_was_expected(expecting):
    buffer = buffer_to_add(expecting.parameters[0])
    buffer[1] += 1.0
    written((expecting.parameters[0],))
    assert torch.equal(expecting.parameters[0].grad.sum(1), torch.tensor([0.0, 3.0, 0.0, 0.0]))


def test_parts_of_which_only_one_is_expected_are_added_to_zero():
    """As if query had been overwritten alone, and then all three together."""
    parts = [(f"{i}.weight", nn.Parameter(torch.zeros(2, 3))) for i in range(3)]
    flat = FlatParameters(parts)
    overwritten(flat, 0, torch.ones(2, 3))
    poisoned(flat)
    buffer_to_add(flat.parameters[1]).add_(1.0)
    written(flat.parameters[1:2])
    buffer = gradient_buffer(flat.parameters)
    assert buffer.adds
    buffer.keep(torch.ones(6, 3))
    written(flat.parameters)
    expected = torch.tensor([1.0, 2.0, 1.0]).repeat_interleave(6)
    assert torch.equal(flat.grad, expected)


def test_zero_grad_expects_nothing(expecting):
    expecting.zero_grad()
    assert torch.equal(expecting.padded_grad, torch.zeros(32))
    poisoned(expecting)
    assert torch.equal(expecting.padded_grad, torch.zeros(32))


def test_frozen_parameter_is_not_expected():
    flat = FlatParameters([("a.weight", nn.Parameter(torch.zeros(2)))])
    overwritten(flat, 0, torch.ones(2))
    flat.parameters[0].requires_grad_(False)
    poisoned(flat)
    assert torch.equal(flat.grad, torch.zeros(2))
