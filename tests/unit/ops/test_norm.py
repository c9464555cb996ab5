"""LayerNorm with dropout: error rule, exact masks, keys on the device."""

import itertools

import pytest
import torch

from mlbert.ops import api as ops
from mlbert.ops import reference
from mlbert.ops.dropout import dropout_key, keep_mask
from unit.ops.conftest import check_errors
from unit.ops.op_inputs import dropout_rows, randn

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 8), (37, 50), (300, 128), (0, 16), (70, 7), (33, 1027)]  # tokens, hidden
# Small shapes, because the interpreter is slow: one token, none, odd widths, more tokens than the
# programs process in one round (1027 columns). Narrower shapes would need more draws.
FOR_TRITON = [
    *((shape, torch.bfloat16) for shape in ((1, 128), (5, 200), (0, 16), (37, 131), (11, 1027))),
    *((shape, torch.float32) for shape in ((5, 200), (11, 1027))),
    ((37, 131), torch.float16),
]
CASES = [
    *itertools.product(["native"], SHAPES, DTYPES, (0.0, 0.1), (False, True)),
    *(("triton", shape, dtype, 0.1, True) for shape, dtype in FOR_TRITON),
    ("triton", (5, 200), torch.bfloat16, 0.0, False),
]


@pytest.mark.parametrize(
    ("kernels", "shape", "dtype", "dropout", "with_bias"), CASES, indirect=["kernels"]
)
def test_error(kernels, shape, dtype, dropout, with_bias):
    tokens, hidden = shape

    def draw(with_residual: bool) -> list:
        x = [randn(tokens, hidden) for _ in range(1 + with_residual)]
        settings = [1e-12, dropout, 2**31 + 5, dropout_rows(tokens)]
        return [
            *x,
            randn(hidden),
            randn(hidden),
            *settings,
            *([randn(hidden)] if with_residual and with_bias else []),
        ]

    check_errors("layer_norm_dropout", lambda: draw(False), dtype, [0, 1, 2])
    places = [0, 1, 2, 3, *([8] if with_bias else [])]
    check_errors("dropout_add_layer_norm", lambda: draw(True), dtype, places)


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [*itertools.product(["native"], DTYPES), ("triton", torch.bfloat16)],
    indirect=["kernels"],
)
def test_error_without_bias(kernels, dtype):
    def draw() -> list:
        return [randn(37, 50), randn(50), None, 1e-5, 0.1, 7, dropout_rows(37)]

    check_errors("layer_norm_dropout", draw, dtype, [0, 1])
    check_errors("dropout_add_layer_norm", lambda: [randn(37, 50), *draw()], dtype, [0, 1, 2])


def test_error_with_a_large_mean(kernels):
    """The variance must not be computed as a difference of squares."""
    draw = lambda: [randn(20, 64) + 300, randn(64), randn(64), 1e-12, 0.0, 0, None]  # noqa: E731
    check_errors("layer_norm_dropout", draw, torch.float32, [0, 1, 2])


@pytest.mark.parametrize(
    ("kernels", "columns", "key"),
    [
        *(("native", columns, 31337) for columns in (3, 50, 131, 768)),
        *(
            ("triton", columns, key)
            for columns in (3, 131)
            for key in (0, 1, 16, 2**31 - 1, 2**31, 2**32 - 1)
        ),
    ],
    indirect=["kernels"],
)
def test_dropout_masks_equal_the_reference(kernels, columns, key):
    tokens = 40
    rows = dropout_rows(tokens)
    want = keep_mask(key, rows, columns, 0.1)
    weight = torch.zeros(columns)
    bias = torch.ones(columns)
    assert torch.equal(
        ops.layer_norm_dropout(randn(tokens, columns), weight, bias, 1e-12, 0.1, key, rows) > 0,
        want,
    )
    x = torch.zeros(tokens, columns).requires_grad_()
    out = ops.dropout_add_layer_norm(x, randn(tokens, columns), bias, weight, 1e-12, 0.1, key, rows)
    out.backward(randn(tokens, columns))
    assert torch.equal(x.grad != 0, want)


@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
def test_key_on_the_device_gives_the_same_bits(kernels):
    """Captured graphs read the key's 32 bits from an int32 tensor."""
    rows = dropout_rows(9)
    weight = randn(24)
    bias = randn(24)
    x = randn(9, 24)
    key = dropout_key(1, 2, 3, 4)
    results = []
    for form in (key, torch.tensor(key, dtype=torch.uint32).view(torch.int32)):
        leaf = x.clone().requires_grad_()
        out = ops.layer_norm_dropout(leaf, weight, bias, 1e-12, 0.3, form, rows)
        out.backward(torch.ones_like(out))
        results.append((out.detach(), leaf.grad))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
def test_gradients_of_float32_vectors_are_float32(kernels):
    """In training, activations are bfloat16."""
    x, residual = (randn(21, 40).bfloat16().requires_grad_() for _ in range(2))
    vectors = [randn(40).requires_grad_() for _ in range(3)]
    gradients = []
    for function in (ops.dropout_add_layer_norm, reference.dropout_add_layer_norm):
        weight, bias, x_bias = vectors
        out = function(
            x, residual, weight, bias, 1e-12, 0.1, 7, torch.zeros(21, dtype=torch.int32), x_bias
        )
        gradients.append(torch.autograd.grad(out.float().sum(), vectors))
    for ours, expected in zip(*gradients, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)


def test_non_finite_inputs_give_nan(kernels):
    x = randn(4, 16)
    x[1, 3] = float("nan")
    x[2, 5] = float("inf")
    out = ops.layer_norm_dropout(x, torch.ones(16), torch.zeros(16), 1e-12, 0.0, 0, None)
    assert out[[0, 3]].isfinite().all()
    assert out[[1, 2]].isnan().any(1).all()


def test_invalid_arguments_raise(kernels):
    x = randn(5, 6)
    vector = randn(6)
    rows = dropout_rows(5)
    for arguments in (
        (x, randn(4, 6), vector, vector, 1e-12, 0.1, 9, rows),
        (x, x, randn(5), vector, 1e-12, 0.1, 9, rows),
        (x, x, vector, vector, 1e-12, 0.1, 9, rows[:3]),
        (x, x, vector, vector, 1e-12, 0.1, 9, None),
        (x, x.bfloat16(), vector, vector, 1e-12, 0.1, 9, rows),
    ):
        with pytest.raises(AssertionError):
            ops.dropout_add_layer_norm(*arguments)


@pytest.mark.parametrize(
    ("kernels", "shape", "dtype"),
    [
        ("native", (37, 50), torch.float32),
        *(("triton", shape, torch.bfloat16) for shape in ((1, 128), (37, 131), (70, 300), (0, 16))),
        ("triton", (37, 131), torch.float32),
    ],
    indirect=["kernels"],
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_residual_sum_with_dropout(kernels, shape, dtype, dropout):
    """The mask is the plain one, bit for bit, in both passes."""
    tokens, hidden = shape
    key = 2**31 + 5
    rows = dropout_rows(tokens)
    check_errors(
        "add_dropout",
        lambda: [randn(*shape), randn(*shape), dropout, key, rows],
        dtype,
        [0, 1],
    )
    residual = torch.zeros(shape, dtype=dtype)
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    out = ops.add_dropout(residual, x, dropout, key, rows)
    kept = keep_mask(key, rows, hidden, dropout)
    assert torch.equal(out.detach() != 0, kept)
    out.sum().backward()
    assert torch.equal(x.grad != 0, kept)
