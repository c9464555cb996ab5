"""LayerNorm with dropout: error rule, exact masks, bit-equal runs.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlbert.ops import api as ops
from mlbert.ops import reference
from mlbert.ops.dropout import keep_mask

GENERATOR = torch.Generator().manual_seed(0)
SHAPES = [(1, 8), (37, 50), (300, 128), (0, 16), (70, 7), (33, 1027)]
DTYPES = [torch.float32, torch.bfloat16]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def some_rows(tokens: int) -> Tensor:
    return torch.randint(0, 2**31 - 1, (tokens,), dtype=torch.int32, generator=GENERATOR)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_residual_form_error(
    error_rule, shape: tuple[int, int], with_bias: bool, dropout: float, dtype: torch.dtype
) -> None:
    tokens, hidden = shape

    def draw() -> list:
        x, residual, weight, bias = randn(tokens, hidden), randn(tokens, hidden), randn(hidden), randn(hidden)
        settings = [1e-12, dropout, 5, some_rows(tokens)]
        return [x, residual, weight, bias, *settings, *([randn(hidden)] if with_bias else [])]

    wanted = [0, 1, 2, 3, *([8] if with_bias else [])]
    error_rule("dropout_add_layer_norm", draw, dtype, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES)
def test_embedding_form_error(error_rule, shape: tuple[int, int], dropout: float, dtype: torch.dtype) -> None:
    tokens, hidden = shape

    def draw() -> list:
        return [randn(tokens, hidden), randn(hidden), randn(hidden), 1e-12, dropout, 5, some_rows(tokens)]

    error_rule("layer_norm_dropout", draw, dtype, [0, 1, 2])


def test_large_mean_keeps_its_accuracy(error_rule) -> None:
    """The variance is taken around the mean, not as a difference of squares."""
    draw = lambda: [randn(20, 64) + 300, randn(64), randn(64), 1e-12, 0.0, 0, None]  # noqa: E731
    error_rule("layer_norm_dropout", draw, torch.float32, [0, 1, 2])


@pytest.mark.parametrize("columns", [3, 50, 131, 768])
def test_masks_equal_the_plain_twin_bit_for_bit(use_native, columns: int) -> None:
    tokens, key = 40, 31337
    rows = some_rows(tokens)
    want = keep_mask(key, rows, columns, 0.1)
    out = ops.layer_norm_dropout(
        randn(tokens, columns), torch.zeros(columns), torch.ones(columns), 1e-12, 0.1, key, rows
    )
    assert torch.equal(out > 0, want)
    x = torch.zeros(tokens, columns).requires_grad_()
    residual = randn(tokens, columns)
    out = ops.dropout_add_layer_norm(x, residual, torch.ones(columns), torch.zeros(columns), 1e-12, 0.1, key, rows)
    out.backward(randn(tokens, columns))
    assert torch.equal(x.grad != 0, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_are_bit_equal_for_any_thread_count(use_native, dtype: torch.dtype) -> None:
    tokens, hidden = 333, 96
    tensors = [randn(tokens, hidden), randn(tokens, hidden), randn(hidden), randn(hidden)]
    rows, results = some_rows(tokens), []
    for threads in (2, 2, 1):
        torch.set_num_threads(threads)
        inputs = [x.to(dtype).requires_grad_() for x in tensors]
        out = ops.dropout_add_layer_norm(*inputs, 1e-12, 0.1, 3, rows)
        out.backward(torch.ones_like(out))
        results.append([out.detach(), *(x.grad for x in inputs)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_non_finite_values_are_not_hidden(use_native) -> None:
    x = randn(4, 16)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    out = ops.layer_norm_dropout(x, torch.ones(16), torch.zeros(16), 1e-12, 0.0, 0, None)
    assert out[[0, 3]].isfinite().all()
    assert out[1].isnan().any()
    assert out[2].isnan().any()


def test_twin_gradients() -> None:
    rows = some_rows(5)
    inputs = [x.double().requires_grad_() for x in (randn(5, 6), randn(5, 6), randn(6), randn(6), randn(6))]
    assert torch.autograd.gradcheck(
        lambda x, r, w, b, xb: reference.dropout_add_layer_norm(x, r, w, b, 1e-3, 0.3, 9, rows, xb), inputs
    )
    assert torch.autograd.gradcheck(
        lambda x, w, b: reference.layer_norm_dropout(x, w, b, 1e-3, 0.3, 9, rows), [inputs[0], *inputs[2:4]]
    )


def test_wrong_arguments_are_refused(use_native) -> None:
    x, vector, rows = randn(5, 6), randn(6), some_rows(5)
    for arguments in (
        (x, randn(4, 6), vector, vector, 1e-12, 0.1, 9, rows),
        (x, x, randn(5), vector, 1e-12, 0.1, 9, rows),
        (x, x, vector, vector, 1e-12, 0.1, 9, rows[:3]),
        (x, x, vector, vector, 1e-12, 0.1, 9, None),
        (x, x.bfloat16(), vector, vector, 1e-12, 0.1, 9, rows),
    ):
        with pytest.raises(AssertionError):
            ops.dropout_add_layer_norm(*arguments)
