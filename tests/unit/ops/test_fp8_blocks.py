"""One or two FP8 linear layers followed by LayerNorm, as one function,
against plain and float32.
"""

import importlib

import pytest
import torch
from torch import Tensor

from mlbert.ops import api as ops
from mlbert.ops import forms as registry
from mlbert.ops import fp8, fp8_casts, fp8_scaling, reference
from unit.ops.op_inputs import randn

BOUND = 2 * (2**-4 + 2**-3)  # twice half a rounding step of both formats
ROWS = 4  # of scales: 1 and 2 are the block's, 3 is the next layer's
# Width, columns of the feed-forward (0: only one linear layer), exact GELU.
BLOCKS = [
    (48, 0, False),
    (48, 64, False),
    (48, 64, True),
]
# Tokens, then a block.
CASES = [
    (0, *BLOCKS[0]),
    (0, *BLOCKS[1]),
    (1, *BLOCKS[1]),
    (1, *BLOCKS[2]),
    (37, *BLOCKS[0]),
    (37, *BLOCKS[2]),
]


def block_arguments(tokens: int, width: int, columns: int = 0, size: float = 1.0) -> list[Tensor]:
    """Return input, residual, weights of one or two linear layers, gain, shift, bias,
    and the output's gradient.
    """
    two = [randn(columns, 32) * 0.2, randn(columns) * 0.1, randn(width, columns) * 0.05]
    weights = two if columns else [randn(width, 32)]
    activations = [randn(tokens, 32).bfloat16(), randn(tokens, width).bfloat16()]
    d_out = (randn(tokens, width) * size).bfloat16()
    return [*activations, *weights, randn(width) + 2.0, randn(width), randn(width), d_out]


def norm_arguments(tokens: int, vectors: list[Tensor]) -> tuple[object, ...]:
    gain, shift, bias = vectors
    return gain, shift, 1e-12, 0.1, 5, torch.arange(tokens, dtype=torch.int32), bias


def run_block(
    arguments: list[Tensor], table: fp8_scaling.FP8Scaling, exact: bool = False
) -> list[Tensor]:
    """Return the output, its FP8 copy and the gradients of all arguments.

    The block returns its output twice, and each of the two gets half of the gradient.
    """
    *tensors, d_out = arguments
    x, residual, *rest = leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    norm = norm_arguments(len(x), rest[-3:])
    if len(rest) == 4:
        out, copy, small = fp8.attention_output(x, residual, rest[0], norm, table, 1, 3)
    else:
        small = fp8.quantize(x.detach(), table, 1, fp8_scaling.INPUT)
        out, copy, small = fp8.feed_forward(x, residual, small, rest[:3], exact, norm, table, 1, 3)
    torch.autograd.backward([out, copy], [d_out / 2, d_out / 2])
    assert small is not None
    return [out.detach().float(), small.rows.float(), *(leaf.grad.float() for leaf in leaves)]


def run_float_block(arguments: list[Tensor], exact: bool = False) -> list[Tensor]:
    """Do the same in float32, without the FP8 copy."""
    *tensors, d_out = arguments
    x, residual, *rest = leaves = [
        tensor.detach().float().clone().requires_grad_() for tensor in tensors
    ]
    inner = x @ rest[0].t() if len(rest) == 4 else reference.feed_forward(x, *rest[:3], exact)
    out = reference.dropout_add_layer_norm(inner, residual, *norm_arguments(len(x), rest[-3:]))
    out.backward(d_out.float())
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def run_two_steps(arguments: list[Tensor], exact: bool = False, fast: bool = False) -> list[Tensor]:
    """Return the results of `run_block` in the second of two steps, and the state of the scales."""
    table = fp8_scaling.FP8Scaling(ROWS, fp8_scaling.Products(fast=fast))
    found = []
    for _ in range(2):
        found = run_block(arguments, table, exact)
        table.end_step(lambda amax: amax)
    return [*found, *table.derived_state().values()]


@pytest.mark.parametrize(("tokens", "width", "columns", "exact"), CASES)
def test_block_equals_plain(choice, tokens, width, columns, exact):
    """Both round at the same points, so only few numbers may round the other way.

    Runs are bit-equal.
    """
    arguments = block_arguments(tokens, width, columns, size=1e-6)
    found = run_two_steps(arguments, exact)
    if tokens == 1:
        assert all(map(torch.equal, found, run_two_steps(arguments, exact)))
    ops.select("plain")
    for ours, plain in zip(found, run_two_steps(arguments, exact), strict=True):
        assert float((ours - plain).norm()) <= 0.01 * float(plain.norm())


@pytest.mark.parametrize(
    ("tokens", "fast", "exact", "directions"),
    [
        (150, True, False, {"forward", "backward"}),
        (1, False, False, {"forward"}),
        (0, True, True, set()),
    ],
)
def test_fused_products_equal_separate_ones(
    use_triton, monkeypatch, tokens, fast, exact, directions
):
    """Only one of the two rounds the pre-activation before GELU. Runs are bit-equal."""
    product = importlib.import_module("mlbert.ops.triton.product")
    fused = product._product
    seen = set()

    def noted(*arguments):
        seen.add("forward" if arguments[-1] is None else "backward")
        return fused(*arguments)

    monkeypatch.setattr(product, "_product", noted)
    arguments = block_arguments(tokens, 48, 144, size=1e-6)
    assert ops.select("fused")["fp8_product_gelu"] == "fused"
    found = run_two_steps(arguments, exact, fast)
    assert seen == directions
    if tokens == 1:
        assert all(map(torch.equal, found, run_two_steps(arguments, exact, fast)))
    ops.select("triton")
    for ours, separate in zip(found, run_two_steps(arguments, exact, fast), strict=True):
        assert float((ours - separate).norm()) <= 0.03 * float(separate.norm())


def plain_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select the reference of products that keep GELU's derivative in a byte."""
    for op in ("fp8_product_slope", "fp8_product_slope_backward"):
        monkeypatch.setitem(registry._implementations[op], "reference", registry.form(op, "plain"))
    names = dict.fromkeys(("fp8_product_slope", "fp8_product_slope_backward"), "reference")
    registry.select_each(names)


@pytest.mark.parametrize("tokens", [150, 1])
def test_products_that_keep_slopes_equal_their_reference(use_triton, monkeypatch, tokens):
    arguments = block_arguments(tokens, 48, 144, size=1e-6)
    assert ops.select("slopes")["fp8_product_slope"] == "slopes"
    found = run_two_steps(arguments, fast=True)
    assert all(map(torch.equal, found, run_two_steps(arguments, fast=True)))
    plain_slopes(monkeypatch)
    for ours, plain in zip(found, run_two_steps(arguments, fast=True), strict=True):
        assert float((ours - plain).norm()) <= 0.03 * float(plain.norm())


@pytest.mark.parametrize(
    ("exact", "fast", "is_used"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_slopes_are_kept_for_the_tanh_form_and_fast_accumulation_only(
    monkeypatch, exact, fast, is_used
):
    """Elsewhere the product's bfloat16 numbers are kept, and the results are the same."""
    arguments = block_arguments(33, 48, 144, size=1e-6)
    ops.select("plain")
    usual = run_two_steps(arguments, exact, fast)
    plain_slopes(monkeypatch)
    found = run_two_steps(arguments, exact, fast)
    assert all(map(torch.equal, found, usual)) != is_used
    for ours, plain in zip(found, usual, strict=True):
        assert float((ours - plain).norm()) <= 0.03 * float(plain.norm())


def test_error_of_a_slope_in_a_byte():
    """Far below the rounding of gradients to e5m2, whose relative RMS error is 5e-2."""
    y = torch.linspace(-8, 8, 100_001)
    zero = torch.zeros(())
    codes, _ = fp8_casts.plain_gelu_and_slope(
        y[:, None], torch.zeros(1), False, torch.ones(()), zero, torch.float8_e4m3fn
    )
    slope = torch.ops.aten.gelu_backward(torch.ones_like(y), y, approximate="tanh")
    kept = (codes[:, 0].float() - fp8_casts.SLOPE_ZERO) / fp8_casts.SLOPE_SCALE
    assert (codes.min(), codes.max()) == (0, 252)
    assert float((kept - slope).abs().max()) <= 0.5 / fp8_casts.SLOPE_SCALE + 1e-6
    normal = y.abs() < 3
    assert float((kept - slope)[normal].square().mean().sqrt()) < 1.5e-3
    assert torch.equal(kept[[0, -1]], torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize(("width", "columns", "exact"), BLOCKS)
@pytest.mark.parametrize("calibrated", [False, True])
def test_block_error_is_within_rounding(choice, width, columns, exact, calibrated):
    """With the scales of the same step and of the previous one,
    outputs and gradients are close to float32's.
    """
    arguments = block_arguments(33, width, columns)
    table = fp8_scaling.FP8Scaling(ROWS, fp8_scaling.Products())
    if calibrated:
        run_block(arguments, table, exact)
        table.end_step(lambda amax: amax)
    out, small, *gradients = run_block(arguments, table, exact)
    assert torch.equal(
        small, (out * table.scale[3, fp8_scaling.INPUT]).to(torch.float8_e4m3fn).float()
    )
    for ours, right in zip([out, *gradients], run_float_block(arguments, exact), strict=True):
        assert float((ours - right).norm()) <= BOUND * float(right.norm())


@pytest.mark.parametrize("fast", [False, True])
def test_fast_accumulation_of_gradients_is_optional(monkeypatch, fast):
    """Forward products always use it."""
    forms = registry._implementations["fp8_product"]
    name = ops.select("auto")["fp8_product"]
    seen = []
    form = forms[name]
    monkeypatch.setitem(
        forms, name, lambda *arguments: seen.append(arguments[4]) or form(*arguments)
    )
    table = fp8_scaling.FP8Scaling(ROWS, fp8_scaling.Products(fast=fast))
    table.is_calibrated = True
    run_block(block_arguments(16, 48, 64), table)
    assert seen == [True] * 2 + [fast] * 4


@pytest.mark.parametrize("tokens", [1, 17])
def test_fp8_copy_of_the_norm_equals_the_next_layers_own(choice, tokens):
    arguments = block_arguments(tokens, 48)
    weight = randn(32, 48)
    results = []
    for uses_copy in (True, False):
        table = fp8_scaling.FP8Scaling(ROWS, fp8_scaling.Products())
        norm = norm_arguments(tokens, arguments[3:6])
        out, copy, small = fp8.attention_output(*arguments[:3], norm, table, 1, 3)
        assert torch.equal(out, copy)
        results.append(
            [fp8.linear(copy, (weight,), (), table, 3, small if uses_copy else None), table.amax]
        )
    assert all(map(torch.equal, *results))
