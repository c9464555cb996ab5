"""The quantising LayerNorm: results with the bits of the other one, and exact FP8 copies of them.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlbert.ops.fp8_scaling import padded_tokens

norm = pytest.importorskip("mlbert.ops.triton.norm", reason="Triton is not installed")
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
    out, copies, _ = norm.quantised_norm(x, residual, *vectors, *settings, scale, amax)
    assert torch.equal(out, norm.dropout_add_layer_norm(x, residual, *vectors, *settings))
    want = (out.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(copies.rows.float(), want.float())
    assert torch.equal(copies.columns[:, :tokens].float(), want.float().t())
    assert copies.columns.shape[1] % 16 == 0
    assert not copies.columns[:, tokens:].float().any()
    assert amax.item() == (max(0.5, out.abs().max().item()) if tokens else 0.5)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(1, 16), (16, 50), (63, 24)])
def test_gradients_are_those_of_the_other_norm(shape: tuple[int, int], dropout: float) -> None:
    tokens, hidden = shape
    x, residual, d_out, d_twin = (randn(*shape).bfloat16() for _ in range(4))
    weight, bias, x_bias = [randn(hidden).requires_grad_() for _ in range(3)]
    rows, scale, amax = some_rows(tokens), torch.tensor(512.0), torch.zeros(())
    leaves = [x.requires_grad_(), residual.requires_grad_(), x_bias, weight, bias]
    settings = (1e-12, dropout, 11, rows)
    names = norm.dropout_add_layer_norm_twice(x, residual, weight, bias, *settings, x_bias)
    d_x, *wanted = torch.autograd.grad(names, leaves, [d_out, d_twin])
    *_, saved = norm.quantised_norm(*(x.detach() for x in (x, residual, weight, bias)), *settings, x_bias, scale, amax)
    amax.zero_()
    found = norm.quantised_norm_gradients(d_out, d_twin, saved, weight.detach(), *settings[1:], scale, amax)
    others = found.residual, found.x_bias, found.weight, found.bias
    assert all(torch.equal(*pair) for pair in zip(others, wanted, strict=True))
    small = (d_x.float() * scale).to(torch.float8_e5m2)
    assert torch.equal(found.x.rows.float(), small.float())
    assert torch.equal(found.x.columns[:, :tokens].float(), small.float().t())
    assert found.x.columns.shape == (hidden, padded_tokens(tokens))
    assert not found.x.columns[:, tokens:].float().any()
    assert amax.item() == d_x.abs().max().item()
