"""Attention: error rule on awkward shapes, exact masks, no leaks between sequences."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mlbert.ops import api as ops
from mlbert.ops import forms as registry
from mlbert.ops import native_library, reference
from mlbert.ops.attention import capture_obstacle, native_attention, tiles_work
from unit.ops.conftest import check_attention_mask, check_errors
from unit.ops.op_inputs import packed_qkv, with_float32_slopes

NATIVE_LENGTHS = (
    [1],
    [1, 2, 3, 5, 7, 1],
    [1] * 130,
    [300],
    [511, 512, 513],
    [47, 48, 49, 95, 96, 97],
    [20, 33, 0, 0, 0],
    [0, 20, 0, 33],
    [0, 0],
)
NATIVE_HEADS = [(2, 64), (3, 32), (1, 12), (2, 128), (1, 7)]  # number, size
# Triton's blocks have 128 and 64 tokens in 16-bit types, 32 in float32.
TRITON_LENGTHS = ([1], [1, 2, 3, 5], [63, 64, 65], [0, 20, 0, 33], [0, 0])
SLOPES = torch.tensor([0.5, 0.00390625])  # of ALiBi: steep and gentle
DROPOUTS = (0.0, 0.1)


def draw_inputs(
    lengths, num_heads, head_size, dropout, factor=1.0, slopes=None
) -> Callable[[], list]:
    """Return a function that draws arguments of attention; `slopes` are ALiBi's."""
    generator = torch.Generator().manual_seed(len(lengths))

    def draw() -> list:
        qkv, cu_seqlens, longest, rows = packed_qkv(
            lengths, num_heads, head_size, generator=generator
        )
        return [factor * qkv, cu_seqlens, longest, dropout, 99, rows, slopes]

    return draw


def tiles(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *arguments: Any) -> Tensor:
    """Run the kernel for the matrix unit, which is emulated in C on a processor without one."""
    return native_attention(qkv, cu_seqlens, *arguments, tiles=True)


@pytest.mark.parametrize(
    ("kernels", "form", "lengths", "heads", "dropout"),
    [
        *(
            ("native", form, lengths, (2, 64), p)
            for form in ("fp32", "bf16", "fp32 ALiBi", "bf16 ALiBi", "tiles", "tiles ALiBi")
            for lengths in NATIVE_LENGTHS
            for p in DROPOUTS
        ),
        *(
            ("native", form, [1, 64, 130, 31], heads, 0.1)
            for form in ("fp32", "bf16")
            for heads in NATIVE_HEADS
        ),
        *(
            ("native", "tiles", [1, 64, 130, 31, 140], heads, 0.1)
            for heads in ((3, 32), (1, 96), (2, 128))
        ),
        *(("triton", "bf16", lengths, (2, 64), 0.1) for lengths in TRITON_LENGTHS),
        ("triton", "bf16", [1, 2, 3, 5], (2, 64), 0.0),
        *(("triton", "fp32", lengths, (1, 64), 0.1) for lengths in ([1, 2, 3, 5], [0, 0])),
        ("triton", "fp32 ALiBi", [1, 40], (2, 32), 0.1),
        ("triton", "bf16 ALiBi", [1, 70], (2, 32), 0.1),
        ("triton", "fp16", [1, 70], (1, 64), 0.1),
        ("triton", "bf16", [1, 70], (3, 32), 0.1),
        pytest.param("triton", "bf16", [1, 70], (1, 128), 0.1, marks=pytest.mark.slow),
        *(
            pytest.param("triton", "bf16", [130], (2, 64), p, marks=pytest.mark.slow)
            for p in DROPOUTS
        ),
        pytest.param("triton", "bf16", [513], (1, 32), 0.1, marks=pytest.mark.slow),
        pytest.param("triton", "fp16", [1, 70], (3, 32), 0.1, marks=pytest.mark.slow),
        *(
            pytest.param("triton", dtype, [1, 70], (1, 128), 0.1, marks=pytest.mark.slow)
            for dtype in ("fp16", "fp32")
        ),
    ],
    indirect=["kernels"],
)
def test_error(kernels, form, lengths, heads, dropout):
    """The interpreter is slow, so Triton's numbers are drawn once."""
    forms = {
        "fp32": (ops.attention, torch.float32, None),
        "bf16": (ops.attention, torch.bfloat16, None),
        "fp16": (ops.attention, torch.float16, None),
        "fp32 ALiBi": (ops.attention, torch.float32, SLOPES),
        "bf16 ALiBi": (ops.attention, torch.bfloat16, SLOPES),
        "tiles": (tiles, torch.bfloat16, None),
        "tiles ALiBi": (tiles, torch.bfloat16, SLOPES),
    }
    function, dtype, slopes = forms[form]
    draw = draw_inputs(lengths, *heads, dropout, slopes=slopes)
    inputs = draw if kernels == "native" else draw()
    check_errors("attention", inputs, dtype, [0], with_float32_slopes(function))


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
def test_error_with_the_blocks_of_an_older_gpu(kernels, monkeypatch):
    """Backward processes 32 keys at a time."""
    from mlbert.ops.triton import device

    monkeypatch.setattr(device, "assumed_capability", 80)
    check_errors("attention", draw_inputs([65, 130], 1, 64, 0.1)(), torch.bfloat16, [0])


def test_matrix_unit_is_used_only_if_it_works(use_native):
    qkv, cu_seqlens, longest, rows = packed_qkv([5, 70], 2, 64)
    x = qkv.bfloat16()
    want = native_attention(x, cu_seqlens, 0.1, 3, rows, None, tiles=tiles_work())
    assert torch.equal(ops.attention(x, cu_seqlens, longest, 0.1, 3, rows), want)
    if not native_library.library().attention_tiles_available():
        assert not tiles_work()


def test_large_scores_stay_finite(use_native):
    check_errors("attention", draw_inputs([60, 7], 2, 64, 0.1, factor=30.0), torch.float32, [0])


@pytest.mark.parametrize(
    ("kernels", "lengths", "tail"),  # Triton: with more tokens in the tail than the grid has blocks
    [
        ("native", [5, 9, 0], 6),
        *(("triton", *case) for case in (([7, 5], 3), ([7, 0, 0], 150), ([0, 0], 9))),
    ],
    indirect=["kernels"],
)
def test_tokens_after_the_last_sequence_are_zero(kernels, lengths, tail):
    qkv, cu_seqlens, longest, rows = packed_qkv(lengths, 2, 32, tail)
    used = sum(lengths)
    for function in (ops.attention, reference.attention):
        x = qkv.bfloat16().requires_grad_()
        out = function(x, cu_seqlens, longest, 0.1, 5, rows)
        out.backward(torch.ones_like(out))
        for result in (out, x.grad):
            assert not result[used:].any()
            assert result[:used].any() == (used > 0)


@pytest.mark.parametrize(
    ("kernels", "length", "num_heads", "head_size", "dtype"),
    [("native", 130, 3, 64, torch.float32), ("triton", 70, 2, 32, torch.bfloat16)],
    indirect=["kernels"],
)
def test_dropout_mask_of_each_head_equals_the_reference(
    kernels, length, num_heads, head_size, dtype
):
    check_attention_mask(ops.attention, length, num_heads, head_size, dtype)


def test_sequences_do_not_affect_each_other(use_native):
    qkv, cu_seqlens, longest, rows = packed_qkv([40, 50, 60], 2, 32)
    changed = qkv.clone()
    changed[40:90] += 1.0
    a = ops.attention(qkv, cu_seqlens, longest, 0.1, 3, rows)
    b = ops.attention(changed, cu_seqlens, longest, 0.1, 3, rows)
    assert torch.equal(a[:40], b[:40])
    assert torch.equal(a[90:], b[90:])
    assert not torch.equal(a[40:90], b[40:90])


def test_alibi_equals_pytorchs_attention_with_an_explicit_bias(use_native):
    lengths = [7, 0, 12]
    num_heads = 3
    head_size = 8
    qkv, cu_seqlens, longest, _ = packed_qkv(lengths, num_heads, head_size)
    slopes = torch.tensor([1.0, 0.25, 0.0])
    out = ops.attention(qkv, cu_seqlens, longest, 0.0, 0, None, slopes)
    for start, stop in ((0, 7), (7, 19)):
        place = torch.arange(stop - start)
        bias = -slopes[:, None, None] * (place[:, None] - place).abs()
        q, k, v = qkv[start:stop].permute(1, 2, 0, 3)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        torch.testing.assert_close(out[start:stop], want.transpose(0, 1))


def test_invalid_arguments_raise(use_native):
    qkv, bounds, longest, rows = packed_qkv([5, 9], 2, 32)
    for x, cu_seqlens, of_tokens, words in (
        (qkv, bounds, None, "needs rows"),
        (qkv[:13], bounds, rows[:13], "13 tokens"),
        (qkv, bounds.flip(0), rows, "increase"),
        (qkv, bounds, rows[:13], r"rows \(13,\)"),
    ):
        with pytest.raises(AssertionError, match=words):
            ops.attention(x, cu_seqlens, longest, 0.1, 5, of_tokens)


@pytest.mark.parametrize(
    ("form", "dtype", "head_size", "alibi", "max_seqlen", "capturable"),
    [
        ("triton", torch.bfloat16, 64, True, 999, True),
        ("triton", torch.bfloat16, 48, False, 9, False),
        ("triton", torch.float32, 32, False, 9, True),
        ("plain", torch.float32, 64, False, 512, False),
        ("native", torch.float32, 64, False, 512, False),
        ("fmha", torch.bfloat16, 64, True, 512, True),
        ("fmha", torch.float32, 64, False, 9, False),
        ("fmha", torch.bfloat16, 64, False, 513, False),
    ],
)
def test_capturable_cases(native_ops, form, dtype, head_size, alibi, max_seqlen, capturable):
    registry.select_each({"attention": form})
    obstacle = capture_obstacle(torch.device("cpu"), dtype, head_size, alibi, max_seqlen)
    assert (obstacle is None) == capturable
    if form in ("plain", "native"):
        assert f"{form} attention reads" in obstacle
