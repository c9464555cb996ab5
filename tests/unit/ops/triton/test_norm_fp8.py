"""The quantising LayerNorm kernels: results as the plain ones have them, up to rounding; FP8 copies are exact.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlbert.ops.fp8_scaling import padded_tokens

norm = pytest.importorskip("mlbert.ops.triton.norm", reason="Triton is not installed")
norm_fp8 = pytest.importorskip("mlbert.ops.triton.norm_fp8", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("use_triton")

GENERATOR = torch.Generator().manual_seed(0)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Each test draws the same numbers, whichever tests ran before it."""
    GENERATOR.manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def some_rows(tokens: int) -> Tensor:
    return torch.randint(0, 2**31 - 1, (tokens,), dtype=torch.int32, generator=GENERATOR)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (37, 50), (19, 1027), (0, 16)])
def test_quantised_copies(shape: tuple[int, int], dtype: torch.dtype) -> None:
    tokens, hidden = shape
    x, residual = randn(tokens, hidden).to(dtype), randn(tokens, hidden).to(dtype)
    vectors, rows = (randn(hidden), randn(hidden)), some_rows(tokens)
    scale, amax = torch.tensor(200.0), torch.tensor(0.5)
    settings = (1e-12, 0.1, 11, rows, None)
    out, copies, _ = norm_fp8.norm_forward(x, residual, *vectors, *settings, scale, amax)
    plain = norm.dropout_add_layer_norm(x, residual, *vectors, *settings)
    # Sums over a row run in another order, and a bfloat16 may round to the other side.
    torch.testing.assert_close(out, plain, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    want = (out.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(copies.rows.float(), want.float())
    assert torch.equal(copies.columns[:, :tokens].float(), want.float().t())
    assert copies.columns.shape[1] % 16 == 0
    assert not copies.columns[:, tokens:].float().any()
    assert amax.item() == (max(0.5, out.abs().max().item()) if tokens else 0.5)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(1, 16), (16, 50), (63, 24), (7, 300)])
def test_backward_equals_the_plain_kernel(shape: tuple[int, int], dropout: float) -> None:
    """Gradients as the plain backward pass has them; that of x quantised before it is rounded to bfloat16."""
    tokens, hidden = shape
    x, residual, d_out, d_twin = (randn(*shape).bfloat16() for _ in range(4))
    vectors = [randn(hidden).requires_grad_() for _ in range(3)]
    weight, bias, x_bias = vectors
    rows, scale, amax = some_rows(tokens), torch.tensor(512.0), torch.zeros(())
    leaves = [x.requires_grad_(), residual.requires_grad_(), x_bias, weight, bias]
    settings = (1e-12, dropout, 11, rows)
    names = norm.dropout_add_layer_norm_twice(x, residual, weight, bias, *settings, x_bias)
    d_x, d_residual, *wanted = torch.autograd.grad(names, leaves, [d_out, d_twin])
    _, _, saved = norm_fp8.norm_forward(x, residual, weight, bias, *settings, x_bias, scale, torch.zeros(()))
    found = norm_fp8.norm_backward(d_out, d_twin, saved, weight, dropout, 11, rows, scale, amax)
    # Sums over a row may run in another order, and a bfloat16 falls to the other side.
    torch.testing.assert_close(found.residual, d_residual, rtol=2**-7, atol=1e-6)
    limit = torch.finfo(torch.float8_e5m2)
    torch.testing.assert_close(
        found.x.rows.float(), d_x.float() * scale, rtol=2**-3 + 2**-7, atol=limit.smallest_normal
    )
    assert torch.equal(found.x.rows.float() == 0, d_x == 0)
    assert torch.equal(found.x.columns[:, :tokens].float(), found.x.rows.float().t())
    assert found.x.columns.shape == (hidden, padded_tokens(tokens))
    assert not found.x.columns[:, tokens:].float().any()
    assert amax.item() == pytest.approx(d_x.float().abs().max().item(), rel=2**-8)
    for ours, plain in zip((found.x_bias, found.weight, found.bias), wanted, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_runs_are_bit_equal() -> None:
    x, residual, d_out = (randn(37, 24).bfloat16() for _ in range(3))
    vectors, rows = (randn(24), randn(24)), some_rows(37)
    runs = []
    for _ in range(2):
        scale, amax = torch.tensor(8.0), torch.zeros(())
        out, small, saved = norm_fp8.norm_forward(x, residual, *vectors, 1e-12, 0.1, 3, rows, None, scale, amax)
        found = norm_fp8.norm_backward(d_out, None, saved, vectors[0], 0.1, 3, rows, scale, amax)
        runs.append([out, small.columns.float(), found.x.columns.float(), *found[2:], amax])
    assert all(map(torch.equal, *runs))
