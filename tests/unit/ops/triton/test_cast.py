"""Triton's casts to FP8: exact row-major and transposed copies, limits, maxima, bias gradients, GELU."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unit.ops.op_inputs import randn

cast = pytest.importorskip("mlbert.ops.triton.cast", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("use_triton")

SHAPES = [(1, 1), (15, 33), (64, 64), (130, 70), (0, 16)]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def scale_and_amax(scale: float) -> tuple[Tensor, Tensor]:
    return torch.tensor(scale), torch.zeros(())


def expected(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return x * scale, clamped to the range of `dtype`."""
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(dtype)


def check(copies, want: Tensor) -> None:
    assert copies.rows.dtype == copies.columns.dtype == want.dtype
    assert copies.rows.is_contiguous()
    assert copies.columns.is_contiguous()
    assert torch.equal(copies.rows.float(), want.float())
    check_columns(copies)


def check_columns(copies) -> None:
    """Assert that the transposed copy equals the rows and is padded with zeros to a multiple of 16 tokens."""
    tokens, columns = copies.rows.shape
    assert copies.columns.shape == (columns, -(-tokens // 16) * 16)
    assert torch.equal(copies.columns[:, :tokens].float(), copies.rows.float().t())
    assert not copies.columns[:, tokens:].float().any()


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_copies_maximum_and_bias_gradient(shape, source, dtype):
    x = (randn(*shape) * 30).to(source)
    scale, amax = scale_and_amax(16.0)  # some values exceed the range of e4m3
    check(cast.cast_transpose(x, scale, amax, dtype), expected(x, 16.0, dtype))
    assert amax == (x.float().abs().max() if x.numel() else 0.0)
    copies, d_bias = cast.cast_transpose_bias(x, scale, amax, dtype)
    check(copies, expected(x, 16.0, dtype))
    assert d_bias.dtype == torch.float32
    error = (d_bias - x.double().sum(0)).abs()
    assert (error <= 1e-6 * x.double().abs().sum(0)).all()


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("size", [1e-7, 1e-4, 1e-2, 1.0, 1e5])
def test_rounding_at_every_magnitude(size, dtype):
    """Sizes include subnormal values, carries into the exponent, and values above the range."""
    x = randn(40, 60) * size
    check(cast.cast_transpose(x, *scale_and_amax(1.0), dtype), expected(x, 1.0, dtype))


def test_amax_only_grows():
    x = randn(70, 3)
    scale, amax = torch.tensor(1.0), torch.tensor(1000.0)
    cast.cast_transpose(x, scale, amax, torch.float8_e5m2)
    assert amax == 1000.0


@pytest.mark.parametrize("dtype", FP8)
def test_non_finite_values(dtype):
    """NaN remains NaN. Infinity becomes the largest value and makes amax infinite."""
    x = randn(3, 4)
    x[1, 2], x[2, 3] = math.nan, -math.inf
    scale, amax = scale_and_amax(1.0)
    copies = cast.cast_transpose(x, scale, amax, dtype)
    assert copies.rows.float().isnan().nonzero().tolist() == [[1, 2]]
    assert copies.rows.float()[2, 3] == -torch.finfo(dtype).max
    assert amax.isinf()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:4])
def test_gelu(shape, exact):
    """Results equal GELU in float64, except for FP8 values whose rounding depends on float32's."""
    pre, bias = (randn(*shape) * 3).bfloat16(), randn(shape[1])
    want = F.gelu(pre.double() + bias.double(), approximate="none" if exact else "tanh")
    scale, amax = scale_and_amax(64.0)
    copies = cast.gelu_cast_transpose(pre, bias, exact, scale, amax, torch.float8_e4m3fn)
    check_columns(copies)
    torch.testing.assert_close(copies.rows.float(), (want * 64).clamp(-448, 448).float(), rtol=2**-4 + 1e-5, atol=2**-9)
    assert amax.item() == pytest.approx(want.abs().max().item(), rel=1e-5)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:4])
def test_gelu_backward(shape, exact):
    pre, d_out, bias = randn(*shape) * 3, randn(*shape).bfloat16(), randn(shape[1])
    summed = (pre.double() + bias.double()).requires_grad_()
    F.gelu(summed, approximate="none" if exact else "tanh").backward(d_out.double())
    scale, amax = scale_and_amax(512.0)
    copies, d_bias = cast.gelu_backward_cast_transpose(d_out, pre, bias, exact, scale, amax, torch.float8_e5m2)
    check_columns(copies)
    torch.testing.assert_close(copies.rows.float(), (summed.grad * 512).float(), rtol=2**-3 + 1e-5, atol=1e-4)
    torch.testing.assert_close(d_bias.double(), summed.grad.sum(0), rtol=1e-5, atol=1e-5)
    assert amax.item() == pytest.approx(summed.grad.abs().max().item(), rel=1e-5)


def test_output_buffers_are_reused():
    x = randn(33, 48)
    out = cast.quantised_buffers(x, torch.float8_e4m3fn)
    copies = cast.cast_transpose(x, *scale_and_amax(2.0), torch.float8_e4m3fn, out)
    assert copies is out
    check(out, expected(x, 2.0, torch.float8_e4m3fn))


def test_runs_are_bit_equal():
    inputs = randn(130, 70), randn(130, 70), randn(70), False
    runs = [cast.gelu_backward_cast_transpose(*inputs, *scale_and_amax(8.0), torch.float8_e5m2) for _ in range(2)]
    assert torch.equal(runs[0][0].rows.view(torch.uint8), runs[1][0].rows.view(torch.uint8))
    assert torch.equal(runs[0][1], runs[1][1])
