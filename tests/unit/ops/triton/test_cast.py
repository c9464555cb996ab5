"""Casts to FP8: exact copies by rows and transposed, limits, maxima, bias gradients, GELU forward and backward.

Legend: T tokens, F columns.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

cast = pytest.importorskip("mlbert.ops.triton.cast", reason="Triton is not installed")
quantise = pytest.importorskip("mlbert.ops.triton.cast", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("use_triton")

GENERATOR = torch.Generator().manual_seed(0)
SHAPES = [(1, 1), (15, 33), (64, 64), (130, 70), (0, 16)]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Each test draws the same numbers, whichever tests ran before it."""
    GENERATOR.manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def scalars(scale: float) -> tuple[Tensor, Tensor]:
    return torch.tensor(scale), torch.zeros(())


def quantised(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """The plain twin: x * scale within the type's range."""
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(dtype)


def check(copies, want: Tensor) -> None:
    assert copies.rows.dtype == copies.columns.dtype == want.dtype
    assert copies.rows.is_contiguous()
    assert copies.columns.is_contiguous()
    assert torch.equal(copies.rows.float(), want.float())
    check_columns(copies)


def check_columns(copies) -> None:
    """The transposed copy, and zeros up to a multiple of 16 tokens."""
    tokens, columns = copies.rows.shape
    assert copies.columns.shape == (columns, -(-tokens // 16) * 16)
    assert torch.equal(copies.columns[:, :tokens].float(), copies.rows.float().t())
    assert not copies.columns[:, tokens:].float().any()


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_copies_maximum_and_bias_gradient(shape: tuple[int, int], source: torch.dtype, dtype: torch.dtype) -> None:
    x = (randn(*shape) * 30).to(source)
    scale, amax = scalars(16.0)  # some values go beyond the range of e4m3
    check(cast.cast_transpose(x, scale, amax, dtype), quantised(x, 16.0, dtype))
    assert amax == (x.float().abs().max() if x.numel() else 0.0)
    copies, d_bias = cast.cast_transpose_bias(x, scale, amax, dtype)
    check(copies, quantised(x, 16.0, dtype))
    assert d_bias.dtype == torch.float32
    error = (d_bias - x.double().sum(0)).abs()
    assert (error <= 1e-6 * x.double().abs().sum(0)).all()


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("size", [1e-7, 1e-4, 1e-2, 1.0, 1e5])
def test_rounding_at_every_magnitude(size: float, dtype: torch.dtype) -> None:
    """Subnormal values, carries into the exponent, values beyond the range."""
    x = randn(40, 60) * size
    check(cast.cast_transpose(x, *scalars(1.0), dtype), quantised(x, 1.0, dtype))


def test_maximum_only_grows() -> None:
    x = randn(70, 3)
    scale, amax = torch.tensor(1.0), torch.tensor(1000.0)
    cast.cast_transpose(x, scale, amax, torch.float8_e5m2)
    assert amax == 1000.0


@pytest.mark.parametrize("dtype", FP8)
def test_non_finite_values(dtype: torch.dtype) -> None:
    """NaN stays NaN; infinity becomes the largest value and shows in the maximum."""
    x = randn(3, 4)
    x[1, 2], x[2, 3] = math.nan, -math.inf
    scale, amax = scalars(1.0)
    copies = cast.cast_transpose(x, scale, amax, dtype)
    assert copies.rows.float().isnan().nonzero().tolist() == [[1, 2]]
    assert copies.rows.float()[2, 3] == -torch.finfo(dtype).max
    assert amax.isinf()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:4])
def test_gelu(shape: tuple[int, int], exact: bool) -> None:
    """Against GELU in float64; FP8 values may differ by one step where float32 rounding decides."""
    pre, bias = (randn(*shape) * 3).bfloat16(), randn(shape[1])
    want = F.gelu(pre.double() + bias.double(), approximate="none" if exact else "tanh")
    scale, amax = scalars(64.0)
    copies = cast.gelu_cast_transpose(pre, bias, exact, scale, amax, torch.float8_e4m3fn)
    check_columns(copies)
    torch.testing.assert_close(copies.rows.float(), (want * 64).clamp(-448, 448).float(), rtol=2**-4 + 1e-5, atol=2**-9)
    assert amax.item() == pytest.approx(want.abs().max().item(), rel=1e-5)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:4])
def test_gelu_backward(shape: tuple[int, int], exact: bool) -> None:
    pre, d_out, bias = randn(*shape) * 3, randn(*shape).bfloat16(), randn(shape[1])
    summed = (pre.double() + bias.double()).requires_grad_()
    F.gelu(summed, approximate="none" if exact else "tanh").backward(d_out.double())
    scale, amax = scalars(512.0)
    copies, d_bias = cast.gelu_backward_cast_transpose(d_out, pre, bias, exact, scale, amax, torch.float8_e5m2)
    check_columns(copies)
    torch.testing.assert_close(copies.rows.float(), (summed.grad * 512).float(), rtol=2**-3 + 1e-5, atol=1e-4)
    torch.testing.assert_close(d_bias.double(), summed.grad.sum(0), rtol=1e-5, atol=1e-5)
    assert amax.item() == pytest.approx(summed.grad.abs().max().item(), rel=1e-5)


def test_given_memory_is_used() -> None:
    x = randn(33, 48)
    out = quantise.quantised_buffers(x, torch.float8_e4m3fn)
    copies = cast.cast_transpose(x, *scalars(2.0), torch.float8_e4m3fn, out)
    assert copies is out
    check(out, quantised(x, 2.0, torch.float8_e4m3fn))


def test_runs_are_bit_equal() -> None:
    pre, d_out, bias = randn(130, 70), randn(130, 70), randn(70)
    runs = [
        cast.gelu_backward_cast_transpose(d_out, pre, bias, False, *scalars(8.0), torch.float8_e5m2) for _ in range(2)
    ]
    assert torch.equal(runs[0][0].rows.view(torch.uint8), runs[1][0].rows.view(torch.uint8))
    assert torch.equal(runs[0][1], runs[1][1])
