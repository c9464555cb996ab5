"""LayerNorm with dropout: error rule, exact masks, bit-equal runs, keys on the device.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlbert.ops import api as ops
from mlbert.ops import reference
from mlbert.ops.dropout import dropout_key, keep_mask

GENERATOR = torch.Generator().manual_seed(0)
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 8), (37, 50), (300, 128), (0, 16), (70, 7), (33, 1027)]
# Fewer numbers, as the interpreter is slow. One; none; more tokens than the programs hold in one round (1027 columns);
# odd widths. Narrow ones take many draws.
FOR_TRITON = [
    *((shape, torch.bfloat16) for shape in ((1, 128), (5, 200), (0, 16), (37, 131), (11, 1027))),
    *((shape, torch.float32) for shape in ((5, 200), (11, 1027))),
    ((37, 131), torch.float16),
]
CASES = [
    *(("native", shape, dtype, dropout) for shape in SHAPES for dtype in DTYPES for dropout in (0.0, 0.1)),
    *(("triton", shape, dtype, 0.1) for shape, dtype in FOR_TRITON),
    ("triton", (5, 200), torch.bfloat16, 0.0),
]


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Each test draws the same numbers, whichever tests ran before it."""
    GENERATOR.manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def some_rows(tokens: int) -> Tensor:
    return torch.randint(0, 2**31 - 1, (tokens,), dtype=torch.int32, generator=GENERATOR)


@pytest.mark.parametrize(
    ("kernels", "shape", "dtype", "dropout", "with_bias"),
    [
        *((*case, with_bias) for case in CASES if case[0] == "native" for with_bias in (False, True)),
        *((*case, case[3] > 0) for case in CASES if case[0] == "triton"),
    ],
    indirect=["kernels"],
)
def test_residual_form_error(
    error_rule_of_kernels, shape: tuple[int, int], dtype: torch.dtype, dropout: float, with_bias: bool
) -> None:
    tokens, hidden = shape

    def draw() -> list:
        x, residual, weight, bias = randn(tokens, hidden), randn(tokens, hidden), randn(hidden), randn(hidden)
        settings = [1e-12, dropout, 2**31 + 5, some_rows(tokens)]
        return [x, residual, weight, bias, *settings, *([randn(hidden)] if with_bias else [])]

    wanted = [0, 1, 2, 3, *([8] if with_bias else [])]
    error_rule_of_kernels("dropout_add_layer_norm", draw, dtype, wanted)


@pytest.mark.parametrize(("kernels", "shape", "dtype", "dropout"), CASES, indirect=["kernels"])
def test_embedding_form_error(
    error_rule_of_kernels, shape: tuple[int, int], dropout: float, dtype: torch.dtype
) -> None:
    tokens, hidden = shape

    def draw() -> list:
        return [randn(tokens, hidden), randn(hidden), randn(hidden), 1e-12, dropout, 5, some_rows(tokens)]

    error_rule_of_kernels("layer_norm_dropout", draw, dtype, [0, 1, 2])


def test_large_mean_keeps_its_accuracy(error_rule_of_kernels) -> None:
    """The variance is taken around the mean, not as a difference of squares."""
    draw = lambda: [randn(20, 64) + 300, randn(64), randn(64), 1e-12, 0.0, 0, None]  # noqa: E731
    error_rule_of_kernels("layer_norm_dropout", draw, torch.float32, [0, 1, 2])


@pytest.mark.parametrize(
    ("kernels", "columns", "key"),
    [
        *(("native", columns, 31337) for columns in (3, 50, 131, 768)),
        *(("triton", columns, key) for columns in (3, 131) for key in (0, 1, 16, 2**31 - 1, 2**31, 2**32 - 1)),
    ],
    indirect=["kernels"],
)
def test_masks_equal_the_plain_twin_bit_for_bit(kernels: str, columns: int, key: int) -> None:
    tokens = 40
    rows = some_rows(tokens)
    want = keep_mask(key, rows, columns, 0.1)
    weight, bias = torch.zeros(columns), torch.ones(columns)
    assert torch.equal(ops.layer_norm_dropout(randn(tokens, columns), weight, bias, 1e-12, 0.1, key, rows) > 0, want)
    x = torch.zeros(tokens, columns).requires_grad_()
    out = ops.dropout_add_layer_norm(x, randn(tokens, columns), bias, weight, 1e-12, 0.1, key, rows)
    out.backward(randn(tokens, columns))
    assert torch.equal(x.grad != 0, want)


@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
def test_a_key_on_the_device_is_the_key(kernels: str) -> None:
    """What a captured graph reads: the key's 32 bits as int32."""
    rows, vectors = some_rows(9), (randn(24), randn(24))
    x, key = randn(9, 24), dropout_key(1, 2, 3, 4)
    results = []
    for form in (key, torch.tensor(key, dtype=torch.uint32).view(torch.int32)):
        leaf = x.clone().requires_grad_()
        out = ops.layer_norm_dropout(leaf, *vectors, 1e-12, 0.3, form, rows)
        out.backward(torch.ones_like(out))
        results.append((out.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
def test_float32_vectors_of_bfloat16_activations(kernels: str) -> None:
    """How training calls it: gradients of the vectors stay float32."""
    x, residual = (randn(21, 40).bfloat16().requires_grad_() for _ in range(2))
    vectors = [randn(40).requires_grad_() for _ in range(3)]
    gradients = []
    for function in (ops.dropout_add_layer_norm, reference.dropout_add_layer_norm):
        weight, bias, x_bias = vectors
        out = function(x, residual, weight, bias, 1e-12, 0.1, 7, some_rows(21) * 0, x_bias)
        gradients.append(torch.autograd.grad(out.float().sum(), vectors))
    for ours, twin in zip(*gradients, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, twin, rtol=2e-2, atol=2e-2)


def test_non_finite_values_are_not_hidden(kernels: str) -> None:
    x = randn(4, 16)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    out = ops.layer_norm_dropout(x, torch.ones(16), torch.zeros(16), 1e-12, 0.0, 0, None)
    assert out[[0, 3]].isfinite().all()
    assert out[1].isnan().any()
    assert out[2].isnan().any()


def test_wrong_arguments_are_refused(kernels: str) -> None:
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
