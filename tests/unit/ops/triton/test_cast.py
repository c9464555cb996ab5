"""Triton's casts to FP8: exact row-major and transposed copies, limits, maxima,
bias gradients, GELU.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from mlbert.ops import forms as registry
from mlbert.ops.fp8_scaling import Quantized
from unit.ops.op_inputs import randn

cast = pytest.importorskip("mlbert.ops.triton.cast", reason="Triton is not installed")
fp8_copies = pytest.importorskip("mlbert.ops.triton.fp8_copies")
pytestmark = pytest.mark.usefixtures("use_triton")

SHAPES = [(1, 1), (15, 33), (64, 64), (130, 70), (0, 16)]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
# Some values exceed the range; the last are subnormal, carry into the exponent, or are above it.
VALUES = [(shape, 30, 16.0) for shape in SHAPES] + [
    ((40, 60), size, 1.0) for size in (1e-7, 1e-4, 1e-2, 1.0, 1e5)
]


def results(
    op: str, arguments: tuple, scale: float, dtype: torch.dtype, name: str = "triton"
) -> tuple:
    """Return the copies by rows and columns in float32, the maximum,
    and the sums over tokens if there are any.
    """
    amax = torch.zeros(())
    found = registry.form(op, name)(*arguments, torch.tensor(scale), amax, dtype)
    copies, *sums = [found] if isinstance(found, Quantized) else found
    assert copies.rows.dtype == copies.columns.dtype == dtype
    assert copies.rows.is_contiguous()
    assert copies.columns.is_contiguous()
    return (copies.rows.float(), copies.columns.float(), amax, *sums)


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "size", "scale"), VALUES)
def test_copies_maximum_and_bias_gradient_equal_plain(shape, size, scale, source, dtype):
    x = (randn(*shape) * size).to(source)
    plain = results("fp8_quantize", (x,), scale, dtype, "plain")
    *found, sums = results("fp8_quantize_sum", (x,), scale, dtype)
    assert all(map(torch.equal, found, plain))
    assert all(map(torch.equal, results("fp8_quantize", (x,), scale, dtype), plain))
    assert sums.dtype == torch.float32
    assert ((sums - x.double().sum(0)).abs() <= 1e-6 * x.double().abs().sum(0)).all()


@pytest.mark.parametrize("dtype", FP8)
def test_non_finite_values(dtype):
    """NaN remains NaN. Infinity becomes the largest value and makes amax infinite."""
    x = randn(3, 4)
    x[1, 2] = math.nan
    x[2, 3] = -math.inf
    rows, _, amax = results("fp8_quantize", (x,), 1.0, dtype)
    assert rows.isnan().nonzero().tolist() == [[1, 2]]
    assert rows[2, 3] == -torch.finfo(dtype).max
    assert amax.isinf()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:4])
def test_gelu(shape, exact):
    """Results equal GELU in float64, except for FP8 values whose rounding depends on float32's.

    Runs are bit-equal.
    """
    pre = randn(*shape) * 3
    d_out = randn(*shape).bfloat16()
    bias = randn(shape[1])
    narrow = pre.bfloat16()
    kind = "none" if exact else "tanh"
    summed = (pre.double() + bias.double()).requires_grad_()
    F.gelu(summed, approximate=kind).backward(d_out.double())
    forward = F.gelu(narrow.double() + bias.double(), approximate=kind)
    for op, arguments, scale, dtype, want, atol in (
        ("fp8_gelu", (narrow, bias, exact), 64.0, torch.float8_e4m3fn, forward, 2**-9),
        (
            "fp8_gelu_backward",
            (d_out, pre, bias, exact),
            512.0,
            torch.float8_e5m2,
            summed.grad,
            1e-4,
        ),
    ):
        rows, columns, amax, *sums = found = results(op, arguments, scale, dtype)
        assert all(map(torch.equal, found, results(op, arguments, scale, dtype)))
        limit = torch.finfo(dtype).max
        rtol = torch.finfo(dtype).eps / 2 + 1e-5
        torch.testing.assert_close(
            rows, (want * scale).clamp(-limit, limit).float(), rtol=rtol, atol=atol
        )
        assert torch.equal(columns, F.pad(rows.t(), (0, -shape[0] % 16)))
        assert amax.item() == pytest.approx(want.abs().max().item(), rel=1e-5)
        for of_bias in sums:
            torch.testing.assert_close(of_bias.double(), want.sum(0), rtol=1e-5, atol=1e-5)


def test_output_buffers_are_reused():
    x = randn(33, 48)
    out = fp8_copies.quantized_buffers(x, torch.float8_e4m3fn)
    copies = cast.cast_transpose(x, torch.tensor(2.0), torch.zeros(()), torch.float8_e4m3fn, out)
    assert copies is out
    assert torch.equal(out.rows.float(), (x * 2).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_transposed_and_padded(shape):
    rows = randn(*shape).to(torch.float8_e5m2)
    copies = cast.transposed_copy(rows)
    assert copies.rows is rows
    padding = copies.columns.shape[1] - shape[0]
    assert 0 <= padding < 16
    expected = F.pad(rows.float().t(), (0, padding))
    assert torch.equal(copies.columns.float(), expected)
