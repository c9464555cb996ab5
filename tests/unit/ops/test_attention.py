"""CPU attention: error rule on awkward shapes, exact masks, no leaks between sequences, and the flash interface."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mlbert.ops import api as ops
from mlbert.ops import forms as registry
from mlbert.ops import native_library, reference
from mlbert.ops.attention import capture_obstacle, native_attention, tiles_work
from unit.ops.conftest import check_attention_mask
from unit.ops.op_inputs import packed_qkv, with_float32_slopes

SHAPES = {
    "one token": [1],
    "tiny": [1, 2, 3, 5, 7, 1],
    "around 512": [511, 512, 513],
    "around a block": [47, 48, 49, 95, 96, 97],
    "one sequence": [300],
    "130 sequences of 1": [1] * 130,
    "empty tail": [20, 33, 0, 0, 0],
    "empty between": [0, 20, 0, 33],
    "nothing": [0, 0],
}
HEADS = [(2, 64), (3, 32), (1, 12), (2, 128), (1, 7)]


def draw_inputs(
    lengths: list[int],
    num_heads: int,
    head_size: int,
    dropout: float,
    factor: float = 1.0,
    slopes: Tensor | None = None,
) -> Callable[[], list]:
    """Return a function that draws arguments of attention; `slopes` are ALiBi's."""
    generator = torch.Generator().manual_seed(len(lengths))

    def draw() -> list:
        qkv, cu_seqlens, longest, rows = packed_qkv(lengths, num_heads, head_size, generator=generator)
        return [factor * qkv, cu_seqlens, longest, dropout, 99, rows, slopes]

    return draw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_error_on_awkward_lengths(error_rule, shape: str, dtype: torch.dtype, dropout: float) -> None:
    error_rule("attention", draw_inputs(SHAPES[shape], 2, 64, dropout), dtype, [0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "head_size"), HEADS)
def test_error_on_head_sizes(error_rule, num_heads: int, head_size: int, dtype: torch.dtype) -> None:
    error_rule("attention", draw_inputs([1, 64, 130, 31], num_heads, head_size, 0.1), dtype, [0])


@with_float32_slopes
def tile_form(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *arguments: Any) -> Tensor:
    """Run the kernel for the matrix unit, which is emulated in C on a processor without one."""
    return native_attention(qkv, cu_seqlens, *arguments, tiles=True)


native_form = with_float32_slopes(ops.attention)
SLOPES = torch.tensor([0.5, 0.00390625])  # steep and gentle


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    ("form", "dtype", "slopes"),
    [
        (native_form, torch.float32, SLOPES),
        (native_form, torch.bfloat16, SLOPES),
        (tile_form, torch.bfloat16, SLOPES),
        (tile_form, torch.bfloat16, None),
    ],
    ids=["native fp32 ALiBi", "native bf16 ALiBi", "tiles ALiBi", "tiles"],
)
def test_error_of_other_forms(error_rule, shape: str, dropout: float, form, dtype, slopes) -> None:
    error_rule("attention", draw_inputs(SHAPES[shape], 2, 64, dropout, slopes=slopes), dtype, [0], form)


@pytest.mark.parametrize(("num_heads", "head_size"), [(3, 32), (1, 96), (2, 128)])
def test_tile_form_error_on_head_sizes(error_rule, num_heads: int, head_size: int) -> None:
    draw = draw_inputs([1, 64, 130, 31, 140], num_heads, head_size, 0.1)
    error_rule("attention", draw, torch.bfloat16, [0], tile_form)


def test_matrix_unit_is_used_only_if_it_works(use_native) -> None:
    qkv, cu_seqlens, longest, rows = packed_qkv([5, 70], 2, 64)
    x = qkv.bfloat16()
    want = native_attention(x, cu_seqlens, 0.1, 3, rows, None, tiles=tiles_work())
    assert torch.equal(ops.attention(x, cu_seqlens, longest, 0.1, 3, rows), want)
    if not native_library.library().attention_tiles_available():
        assert not tiles_work()


def test_large_scores_stay_finite(error_rule) -> None:
    error_rule("attention", draw_inputs([60, 7], 2, 64, 0.1, factor=30.0), torch.float32, [0])


def test_tokens_after_the_last_sequence_are_zero(use_native) -> None:
    qkv, cu_seqlens, longest, rows = packed_qkv([5, 9, 0], 2, 32, tail=6)
    for function in (ops.attention, reference.attention):
        x = qkv.clone().requires_grad_()
        out = function(x, cu_seqlens, longest, 0.1, 5, rows)
        out.backward(torch.ones_like(out))
        assert out[14:].abs().max() == 0
        assert x.grad[14:].abs().max() == 0


def test_dropout_mask_equals_the_reference(use_native) -> None:
    check_attention_mask(ops.attention, key=4242, length=130, num_heads=3, head_size=64, dtype=torch.float32)


def test_sequences_do_not_affect_each_other(use_native) -> None:
    qkv, cu_seqlens, longest, rows = packed_qkv([40, 50, 60], 2, 32)
    changed = qkv.clone()
    changed[40:90] += 1.0
    a = ops.attention(qkv, cu_seqlens, longest, 0.1, 3, rows)
    b = ops.attention(changed, cu_seqlens, longest, 0.1, 3, rows)
    assert torch.equal(a[:40], b[:40])
    assert torch.equal(a[90:], b[90:])
    assert not torch.equal(a[40:90], b[40:90])


def test_alibi_equals_pytorchs_attention_with_an_explicit_bias(use_native) -> None:
    lengths, num_heads, head_size = [7, 0, 12], 3, 8
    qkv, cu_seqlens, longest, _ = packed_qkv(lengths, num_heads, head_size)
    slopes = torch.tensor([1.0, 0.25, 0.0])
    out = ops.attention(qkv, cu_seqlens, longest, 0.0, 0, None, slopes)
    for start, stop in ((0, 7), (7, 19)):
        place = torch.arange(stop - start)
        bias = -slopes[:, None, None] * (place[:, None] - place).abs()
        q, k, v = qkv[start:stop].permute(1, 2, 0, 3)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        torch.testing.assert_close(out[start:stop], want.transpose(0, 1))


class RecordOps(TorchDispatchMode):
    """Record the names and tensor arguments of all PyTorch ops."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[Tensor]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        self.seen.append((str(function), [x for x in given if isinstance(x, Tensor)]))
        return function(*args, **(kwargs or {}))


def test_flash_form_matches_pytorchs_interface(use_native) -> None:
    """On meta tensors, PyTorch accepts the arguments, Q, K and V are read in place, and only gradients are copied.

    Values need a CUDA device.
    """
    flash = registry._implementations["attention"]["flash"]
    qkv = torch.empty(20, 3, 2, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    cu_seqlens = torch.empty(3, dtype=torch.int32, device="meta")
    with RecordOps() as calls:
        out = flash(qkv, cu_seqlens, 12, 0.1, 5, None, None)
        (gradient,) = torch.autograd.grad(out, qkv, torch.empty_like(out))
    assert (out.shape, out.dtype) == ((20, 2, 64), torch.bfloat16)
    assert gradient.shape == qkv.shape
    steps = (3 * 2 * 64, 64, 1)
    for name, first in (("forward", 0), ("backward", 1)):
        (given,) = [x for called, x in calls.seen if called.startswith(f"aten._flash_attention_{name}")]
        assert [x.stride() for x in given[first : first + 3]] == [steps] * 3
    written = [x[-1].stride() for called, x in calls.seen if called == "aten.where.self_out"]
    assert written == [steps] * 3
    assert not [called for called, _ in calls.seen if re.search("cat|stack|copy|clone|where.self$", called)]
    plain, bounds, longest, rows = packed_qkv([5, 9], 2, 32)
    arguments = (plain, bounds, longest, 0.1, 5, rows, None)
    assert torch.equal(flash(*arguments), reference.attention(*arguments))


def test_invalid_arguments_raise(use_native) -> None:
    qkv, cu_seqlens, longest, rows = packed_qkv([5, 9], 2, 32)
    with pytest.raises(AssertionError, match="needs rows"):
        ops.attention(qkv, cu_seqlens, longest, 0.1, 5, None)
    with pytest.raises(AssertionError, match="13 tokens"):
        ops.attention(qkv[:13], cu_seqlens, longest, 0.1, 5, rows[:13])
    with pytest.raises(AssertionError, match="increase"):
        ops.attention(qkv, cu_seqlens.flip(0), longest, 0.1, 5, rows)
    with pytest.raises(AssertionError, match=r"rows \(13,\)"):
        ops.attention(qkv, cu_seqlens, longest, 0.1, 5, rows[:13])


@pytest.mark.parametrize("form", ["plain", "native"])
def test_cpu_attention_cannot_be_captured(native_ops, form: str) -> None:
    ops.select(form)
    assert f"{form} attention reads" in str(capture_obstacle(torch.device("cpu"), torch.float32, 64, False, 512))


@pytest.mark.parametrize(
    ("form", "dtype", "head_size", "alibi", "max_seqlen", "capturable"),
    [
        ("triton", torch.bfloat16, 64, True, 999, True),
        ("triton", torch.bfloat16, 48, False, 9, False),
        ("triton", torch.float32, 32, False, 9, True),
        ("flash", torch.bfloat16, 64, False, 9, True),
        ("flash", torch.bfloat16, 64, True, 9, False),
        ("flash", torch.float32, 64, False, 9, False),
        ("fmha", torch.bfloat16, 64, True, 512, True),
        ("fmha", torch.bfloat16, 64, False, 513, False),
    ],
)
def test_capturable_cases(
    form: str, dtype: torch.dtype, head_size: int, alibi: bool, max_seqlen: int, capturable: bool
) -> None:
    registry.select_each({"attention": form})
    assert (capture_obstacle(torch.device("cpu"), dtype, head_size, alibi, max_seqlen) is None) == capturable
