"""Ops of a post-norm layer as one autograd function: the same bits as one after the other."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mlbert.ops import api as ops
from mlbert.ops.attention import TILE_HEAD_SIZE, tiles_work
from unit.ops.op_inputs import dropout_rows, feed_forward_inputs, packed_qkv, randn

DTYPES = [torch.float32, torch.bfloat16]
HIDDEN = 24
INNER = 56
HEADS = 3
READERS = [(True, True), (True, False), (False, True)]  # of the two results

Layer = Callable[..., tuple[Tensor, Tensor]]


def norm_settings(tokens: int, dropout: float) -> list[Any]:
    """Return the arguments of `dropout_add_layer_norm` from the weight on."""
    vectors = [randn(HIDDEN) for _ in range(3)]
    return [*vectors[:2], 1e-12, dropout, 2**31 + 5, dropout_rows(tokens), vectors[2]]


def results(
    function: Layer, arguments: Sequence[Any], readers: tuple[bool, bool] = (True, True)
) -> list[Tensor]:
    """Return the results and the gradients of all floating-point arguments."""
    prepared = [
        value.clone().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for value in arguments
    ]
    leaves = [x for x in prepared if isinstance(x, Tensor) and x.requires_grad]
    outs = function(*prepared)
    weights = (torch.linspace(-1, 1, outs[0].numel()), torch.linspace(2, -1, outs[0].numel()))
    loss = torch.zeros(())
    for out, weight, is_read in zip(outs, weights, readers, strict=True):
        if is_read:
            loss = loss + (out.flatten().float() * weight).sum()
    loss.backward()
    gradients = [leaf.grad for leaf in leaves]
    assert all(gradient is not None for gradient in gradients)
    return [out.detach() for out in outs] + gradients


def assert_same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for ours, wanted in zip(found, expected, strict=True):
        assert ours.dtype == wanted.dtype
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("readers", READERS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_linear_and_norm(use_native, tokens, dtype, dropout, readers):
    def apart(x: Tensor, weight: Tensor, residual: Tensor, *norm: Any) -> tuple[Tensor, Tensor]:
        return ops.dropout_add_layer_norm_twice(ops.linear(x, weight), residual, *norm)

    x = randn(tokens, INNER).to(dtype)
    residual = randn(tokens, HIDDEN).to(dtype)
    arguments = [x, randn(HIDDEN, INNER), residual, *norm_settings(tokens, dropout)]
    found = results(ops.linear_norm, arguments, readers)
    assert_same_bits(found, results(apart, arguments, readers))


@pytest.mark.parametrize("readers", READERS)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_feed_forward_and_norm(use_native, tokens, dtype, exact, readers):
    def apart(
        x: Tensor, residual: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, exact: bool, *norm: Any
    ) -> tuple[Tensor, Tensor]:
        inner = ops.feed_forward(x, w1, b1, w2, exact)
        return ops.dropout_add_layer_norm_twice(inner, residual, *norm)

    x, *weights = feed_forward_inputs(tokens, HIDDEN, INNER)
    residual = randn(tokens, HIDDEN)
    norm = norm_settings(tokens, 0.1)
    arguments = [x.to(dtype), residual.to(dtype), *weights, exact, *norm]
    found = results(ops.feed_forward_norm, arguments, readers)
    assert_same_bits(found, results(apart, arguments, readers))


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_qkv_and_attention(use_native, dtype, alibi):
    qkv, bounds, longest, rows = packed_qkv([9, 1, 0, 40], HEADS, HIDDEN // HEADS, tail=3)
    slopes = torch.linspace(0.5, 0.1, HEADS) if alibi else None
    order = ops.sequence_order(bounds)
    settings = ops.AttentionArguments(bounds, longest, 0.1, 77, rows, slopes, order)

    def together(x: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        out = ops.native_qkv_attention(x, parts[:3], parts[3:], HEADS, settings)
        assert out is not None
        return out, out

    def apart(x: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        product = ops.linear_qkv(x, *parts).view(qkv.shape)
        out = ops.attention(product, bounds, longest, 0.1, 77, rows, slopes, order=order)
        return out, out

    weights = [randn(HIDDEN, HIDDEN) for _ in range(3)]
    biases = [randn(HIDDEN) for _ in range(3)]
    arguments = [randn(len(rows), HIDDEN).to(dtype), *weights, *biases]
    assert_same_bits(results(together, arguments), results(apart, arguments))


def test_without_native_kernels_the_ops_run_one_after_the_other(native_ops):
    ops.select("plain")
    arguments = ops.AttentionArguments(torch.tensor([0, 2]), 2, 0.0, 0, None, None, torch.zeros(1))
    x = randn(2, HIDDEN)
    assert ops.native_qkv_attention(x, [], [], HEADS, arguments) is None
    weight = randn(HIDDEN, HIDDEN)
    norm = norm_settings(2, 0.1)
    expected = ops.dropout_add_layer_norm(ops.linear(x, weight), x, *norm)
    assert torch.equal(ops.linear_norm(x, weight, x, *norm)[0], expected)


def test_an_evaluation_gives_the_same_bits(use_native):
    x, *weights = feed_forward_inputs(7, HIDDEN, INNER)
    arguments = [x, x, *weights, False, *norm_settings(7, 0.0)]
    trained = results(ops.feed_forward_norm, arguments)
    with torch.no_grad():
        assert torch.equal(ops.feed_forward_norm(*arguments)[0], trained[0])


def test_second_backward_raises(use_native):
    """The gradient overwrites the saved pre-activation."""
    x, *weights = feed_forward_inputs(7, HIDDEN, INNER)
    x.requires_grad_()
    out, _ = ops.feed_forward_norm(x, x, *weights, False, *norm_settings(7, 0.0))
    out.sum().backward(retain_graph=True)
    with pytest.raises(AssertionError, match="once"):
        out.sum().backward()


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_some_tokens_equals_that_of_all(use_native, dtype, dropout, alibi):
    """Also for repeated tokens, sequences without any, and tokens after the last sequence."""
    lengths = [9, 1, 0, 70, 5]
    _, bounds, longest, rows = packed_qkv(lengths, HEADS, HIDDEN // HEADS, tail=3)
    slopes = torch.linspace(0.5, 0.1, HEADS) if alibi else None
    order = ops.sequence_order(bounds)
    settings = ops.AttentionArguments(bounds, longest, dropout, 77, rows, slopes, order)
    tokens = torch.tensor([3, 9, 40, 41, 79, 79, 12, 0, 9, 86, 3, *range(20, 75)])

    def some(x: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        found = ops.native_attention_of_some(x, tokens, parts[:3], parts[3:], HEADS, settings)
        assert found is not None
        return found

    def of_all(x: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        out = ops.native_qkv_attention(x, parts[:3], parts[3:], HEADS, settings)
        assert out is not None
        return out.index_select(0, tokens), x.index_select(0, tokens)

    x = randn(len(rows), HIDDEN).to(dtype)
    weights = [randn(HIDDEN, HIDDEN) / HIDDEN**0.5 for _ in range(3)]
    biases = [randn(HIDDEN) for _ in range(3)]
    arguments = [x, *weights, *biases]
    if dtype == torch.bfloat16 and tiles_work() and HIDDEN // HEADS % TILE_HEAD_SIZE == 0:
        pytest.skip("bfloat16 attention runs on the matrix unit, for all tokens")
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for ours, wanted in zip(results(some, arguments), results(of_all, arguments), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=tolerance, atol=tolerance * 20)


def test_attention_of_no_token(use_native):
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    order = ops.sequence_order(bounds)
    settings = ops.AttentionArguments(bounds, 4, 0.0, 0, None, None, order)
    parts = [*(randn(HIDDEN, HIDDEN) for _ in range(3)), *(randn(HIDDEN) for _ in range(3))]
    nothing = torch.zeros(0, dtype=torch.int64)

    def some(x: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        found = ops.native_attention_of_some(x, nothing, parts[:3], parts[3:], HEADS, settings)
        assert found is not None
        return found

    for gradient in results(some, [randn(4, HIDDEN), *parts])[2:]:
        assert not gradient.any()
