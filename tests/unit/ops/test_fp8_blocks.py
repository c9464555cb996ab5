"""A linear layer, or two, with the LayerNorm behind it as one function in FP8: against its plain twin and float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlbert.ops import api as ops
from mlbert.ops import forms as registry
from mlbert.ops import fp8, fp8_scaling, reference

BOUND = 2 * (2**-4 + 2**-3)  # half a step of the mantissa of both formats, twice
ROWS = 4  # of a block's scales; the block's are 1 and 2, its reader's 3


def block_arguments(tokens: int, width: int, columns: int = 0, size: float = 1.0) -> list[Tensor]:
    """Input, residual, weights of one or two linear layers, gain, shift and bias; the gradient of the output."""
    generator = torch.Generator().manual_seed(tokens + columns)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    weights = (
        [draw(columns, 32) * 0.2, draw(columns) * 0.1, draw(width, columns) * 0.05] if columns else [draw(width, 32)]
    )
    activations = [draw(tokens, 32).bfloat16(), draw(tokens, width).bfloat16()]
    return [
        *activations,
        *weights,
        draw(width) + 2.0,
        draw(width),
        draw(width),
        (draw(tokens, width) * size).bfloat16(),
    ]


def norm_arguments(tokens: int, vectors: list[Tensor]) -> tuple[object, ...]:
    gain, shift, bias = vectors
    return gain, shift, 1e-12, 0.1, 5, torch.arange(tokens, dtype=torch.int32), bias


def run_block(arguments: list[Tensor], table: fp8_scaling.FP8Scaling, exact: bool = False) -> list[Tensor]:
    """The output, its FP8 copy and the gradients of all arguments, with a gradient for each of the two names."""
    *tensors, d_out = arguments
    x, residual, *rest = leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    norm = norm_arguments(len(x), rest[-3:])
    if len(rest) == 4:
        out, twin, small = fp8.attention_output(x, residual, rest[0], norm, table, 1, 3)
    else:
        small = fp8.quantise(x.detach(), table, 1, fp8_scaling.INPUT)
        out, twin, small = fp8.feed_forward(x, residual, small, rest[:3], exact, norm, table, 1, 3)
    torch.autograd.backward([out, twin], [d_out / 2, d_out / 2])
    assert small is not None
    return [out.detach().float(), small.rows.float(), *(leaf.grad.float() for leaf in leaves)]


def float_block(arguments: list[Tensor], exact: bool = False) -> list[Tensor]:
    """The same in float32, without the FP8 copy."""
    *tensors, d_out = arguments
    x, residual, *rest = leaves = [tensor.detach().float().clone().requires_grad_() for tensor in tensors]
    inner = x @ rest[0].t() if len(rest) == 4 else reference.feed_forward(x, *rest[:3], exact)
    out = reference.dropout_add_layer_norm(inner, residual, *norm_arguments(len(x), rest[-3:]))
    out.backward(d_out.float())
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def block_outcome(arguments: list[Tensor], exact: bool = False) -> list[Tensor]:
    """`run_block` of the second of two steps, and the scales' state."""
    table, found = fp8_scaling.FP8Scaling(ROWS, fp8_scaling.Products()), []
    for _ in range(2):
        found = run_block(arguments, table, exact)
        table.end_step(lambda amax: amax)
    return [*found, *table.derived_state().values()]


BLOCKS = [(48, 0, False), (48, 64, False), (48, 64, True)]  # width, feed-forward's columns, GELU's form
TWINS = [(0, *BLOCKS[0]), (0, *BLOCKS[1]), (1, *BLOCKS[1]), (1, *BLOCKS[2]), (37, *BLOCKS[0]), (37, *BLOCKS[2])]


@pytest.mark.parametrize(("tokens", "width", "columns", "exact"), TWINS)
def test_block_equals_its_plain_twin(choice: str, tokens: int, width: int, columns: int, exact: bool) -> None:
    """Same points of rounding, so a few numbers fall to the other side of a step and no more."""
    arguments = block_arguments(tokens, width, columns, size=1e-6)
    found = block_outcome(arguments, exact)
    if tokens == 1:
        assert all(map(torch.equal, found, block_outcome(arguments, exact))), "the same bits each time"
    ops.select("plain")
    for ours, plain in zip(found, block_outcome(arguments, exact), strict=True):
        assert float((ours - plain).norm()) <= 0.01 * float(plain.norm())


@pytest.mark.parametrize(("width", "columns", "exact"), BLOCKS)
@pytest.mark.parametrize("calibrated", [False, True])
def test_block_is_within_the_formats_rounding(
    choice: str, width: int, columns: int, exact: bool, calibrated: bool
) -> None:
    """Against float32, with each tensor's own scale and with those of a step before; both readers' gradients arrive."""
    arguments = block_arguments(33, width, columns)
    table = fp8_scaling.FP8Scaling(ROWS, fp8_scaling.Products())
    if calibrated:
        run_block(arguments, table, exact)
        table.end_step(lambda amax: amax)
    out, small, *gradients = run_block(arguments, table, exact)
    assert torch.equal(small, (out * table.scale[3, fp8_scaling.INPUT]).to(torch.float8_e4m3fn).float())
    for ours, right in zip([out, *gradients], float_block(arguments, exact), strict=True):
        assert float((ours - right).norm()) <= BOUND * float(right.norm())


@pytest.mark.parametrize("fast", [False, True])
def test_fast_accumulation_is_a_choice(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    """Forward products have it always, those of gradients where it is asked for."""
    forms, seen = registry._implementations["fp8_product"], []
    name = ops.select("auto")["fp8_product"]
    form = forms[name]

    def watched(*arguments: object) -> Tensor:
        seen.append(arguments[4])
        return form(*arguments)

    monkeypatch.setitem(forms, name, watched)
    table = fp8_scaling.FP8Scaling(ROWS, fp8_scaling.Products(fast=fast))
    table.is_calibrated = True
    run_block(block_arguments(16, 48, 64), table)
    assert seen == [True] * 2 + [fast] * 4


@pytest.mark.parametrize("tokens", [1, 17])
def test_the_bytes_of_a_norm_are_those_the_layer_would_compute(choice: str, tokens: int) -> None:
    arguments = block_arguments(tokens, 48)
    weight = torch.randn(32, 48, generator=torch.Generator().manual_seed(3))
    results = []
    for handed_over in (True, False):
        table = fp8_scaling.FP8Scaling(ROWS, fp8_scaling.Products())
        norm = norm_arguments(tokens, arguments[3:6])
        out, twin, small = fp8.attention_output(*arguments[:3], norm, table, 1, 3)
        assert torch.equal(out, twin)
        results.append([fp8.linear(twin, (weight,), (), table, 3, small if handed_over else None), table.amax])
    assert all(map(torch.equal, *results))
