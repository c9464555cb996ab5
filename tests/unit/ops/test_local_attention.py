"""Local attention, and rotations where queries and keys are read."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mlbert.ops import api as ops
from mlbert.ops import reference
from mlbert.ops.attention import native_attention
from mlbert.ops.dropout import attention_keep_mask, dropout_scale, dropout_threshold
from unit.ops.conftest import check_attention_mask, check_errors
from unit.ops.op_inputs import packed_qkv

# Around the sizes of blocks and panels, and of LENGTHS: the longest sequence has 101 tokens.
WINDOWS = (0, 1, 3, 23, 31, 32, 33, 64, 99, 100, 101, 5000)
LENGTHS = [1, 0, 2, 33, 64, 101]
DROPOUTS = (0.0, 0.1)
# Number and size of heads: usual ones, an odd number of heads, and an odd half of a head.
HEADS = [(2, 64), (3, 32), (1, 10)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "tiles": torch.bfloat16}
BASE = 10_000.0
LONG = 8192


def square_attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    dropout: float,
    key: int,
    rows: Tensor,
    slopes: Tensor | None,
    window: int,
) -> Tensor:
    """Compute local attention from the scores of all pairs of tokens:
    a slow reference for the plain form.
    """
    outputs = []
    for start, stop in itertools.pairwise(cu_seqlens.tolist()):
        q, k, v = qkv[start:stop].permute(1, 2, 0, 3)
        place = torch.arange(stop - start)
        distance = (place[:, None] - place).abs()
        scores = q @ k.transpose(1, 2) * qkv.shape[3] ** -0.5
        if slopes is not None:
            scores = scores - slopes[:, None, None] * distance
        weights = scores.masked_fill(distance > window, -torch.inf).softmax(-1)
        if threshold := dropout_threshold(dropout):
            keep = attention_keep_mask(key, rows[start:stop], qkv.shape[2], stop - start, dropout)
            weights = torch.where(keep, weights * dropout_scale(threshold), 0.0)
        outputs.append((weights @ v).transpose(0, 1))
    return torch.cat(outputs)


def with_gradient(function: Callable[[Tensor], Tensor], qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output, and the gradient of qkv for a random gradient of the output."""
    leaf = qkv.clone().requires_grad_()
    out = function(leaf)
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(out.shape, generator=generator).to(out.dtype)
    out.backward(gradient)
    assert leaf.grad is not None
    return out.detach(), leaf.grad


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize("alibi", [False, True])
def test_plain_form_equals_a_masked_square(window, dropout, alibi):
    ops.select("plain")
    qkv, cu_seqlens, longest, rows = packed_qkv(LENGTHS, 3, 8)
    slopes = torch.tensor([1.0, 0.25, 0.0]) if alibi else None
    found = with_gradient(
        lambda x: ops.attention(x, cu_seqlens, longest, dropout, 5, rows, slopes, window),
        qkv.double(),
    )
    expected = with_gradient(
        lambda x: square_attention(x, cu_seqlens, dropout, 5, rows, slopes, window), qkv.double()
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def tiles(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *arguments: Any) -> Tensor:
    """Run the kernel for the matrix unit, which is emulated in C on a processor without one."""
    del max_seqlen
    return native_attention(qkv, cu_seqlens, *arguments, tiles=True)


def with_float32_tables(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `attention` with float32 slopes and rotations: `check_errors` casts all arguments."""

    def run(*arguments: Any) -> Tensor:
        *rest, slopes, window, rotations = arguments
        wide_slopes = None if slopes is None else slopes.float()
        wide_rotations = None if rotations is None else rotations.float()
        return attention(*rest, wide_slopes, window, wide_rotations)

    return run


@pytest.mark.parametrize(
    ("kernels", "form", "heads", "window", "dropout", "alibi", "rotary"),
    [
        *(("native", "fp32", (2, 64), window, 0.1, True, True) for window in WINDOWS),
        *(("native", "fp32", heads, 31, p, False, True) for heads in HEADS for p in DROPOUTS),
        *(("native", "bf16", heads, 31, 0.1, True, True) for heads in HEADS),
        *(("native", "tiles", (1, 64), window, 0.1, True, True) for window in (0, 31, 64, 5000)),
        ("native", "tiles", (3, 32), 31, 0.0, False, True),
        ("native", "tiles", (1, 64), 31, 0.0, True, False),
        ("native", "fp32", (2, 64), 31, 0.0, False, False),
        ("triton", "bf16", (1, 32), 5, 0.1, True, True),
        ("triton", "bf16", (1, 32), 64, 0.0, False, True),
        ("triton", "fp32", (1, 32), 33, 0.1, False, True),
        *(
            pytest.param("triton", "bf16", (2, 64), window, 0.1, True, True, marks=pytest.mark.slow)
            for window in WINDOWS
        ),
    ],
    indirect=["kernels"],
)
def test_error(kernels, form, heads, window, dropout, alibi, rotary):
    function = tiles if form == "tiles" else ops.attention
    num_heads, head_size = heads
    generator = torch.Generator().manual_seed(window)
    slopes = torch.tensor([0.5, 0.00390625, 0.0])[:num_heads] if alibi else None
    rotations = ops.rotations(torch.arange(sum(LENGTHS)) % 40, head_size, BASE) if rotary else None

    def draw() -> list:
        qkv, cu_seqlens, longest, rows = packed_qkv(
            LENGTHS, num_heads, head_size, generator=generator
        )
        return [qkv, cu_seqlens, longest, dropout, 99, rows, slopes, window, rotations]

    check_errors("attention", draw, DTYPES[form], [0], with_float32_tables(function))


@pytest.mark.parametrize(
    ("kernels", "length", "dtype"),
    [
        ("native", 130, torch.float32),
        ("native", 70, torch.bfloat16),
        pytest.param("triton", 70, torch.bfloat16, marks=pytest.mark.slow),
    ],
    indirect=["kernels"],
)
@pytest.mark.parametrize("window", [0, 5, 33])
def test_dropout_masks_are_those_without_a_window(kernels, length, dtype, window):
    check_attention_mask(ops.attention, length, 3, 64, dtype, window=window)


def test_dropout_masks_of_tiles_are_those_without_a_window(use_native):
    check_attention_mask(tiles, 130, 1, 64, torch.bfloat16, window=33)


@pytest.mark.parametrize("tail", [0, 5])
def test_hidden_keys_have_no_effect(use_native, tail):
    window = 20
    far = 60
    qkv, cu_seqlens, longest, rows = packed_qkv([100, 30], 2, 32, tail)
    changed = qkv.clone()
    changed[far + window + 1 : 100] += 1000.0
    attend = functools.partial(
        ops.attention,
        cu_seqlens=cu_seqlens,
        max_seqlen=longest,
        dropout_p=0.1,
        key=3,
        rows=rows,
        window=window,
    )
    out = attend(qkv)
    assert torch.equal(attend(changed)[: far + 1], out[: far + 1])
    assert torch.equal(attend(changed)[100:], out[100:])
    leaf = changed.requires_grad_()
    attend(leaf)[:far].sum().backward()
    assert not leaf.grad[far + window + 1 : 100, 1:].any()


@pytest.mark.parametrize("choice", ["plain", "native"])
@pytest.mark.parametrize("window", [49, 50, 5000])
def test_a_window_of_the_whole_sequence_gives_the_same_bits(native_ops, choice, window):
    ops.select(choice)
    qkv, cu_seqlens, longest, rows = packed_qkv([50, 30], 2, 32)

    def attend(x: Tensor, window: int | None) -> Tensor:
        return ops.attention(x, cu_seqlens, longest, 0.1, 3, rows, None, window)

    found = with_gradient(lambda x: attend(x, window), qkv)
    assert all(map(torch.equal, found, with_gradient(lambda x: attend(x, None), qkv)))


@pytest.mark.parametrize("choice", ["plain", "native"])
@pytest.mark.parametrize("window", [None, 16])
def test_rotations_are_those_of_rotary(native_ops, choice, window):
    ops.select(choice)
    qkv, cu_seqlens, longest, rows = packed_qkv([5, 70], 2, 64)
    table = ops.rotations(torch.arange(75) % 7, 64, BASE)

    def attend(x: Tensor, rotations: Tensor | None) -> Tensor:
        return ops.attention(x, cu_seqlens, longest, 0.1, 3, rows, None, window, rotations)

    found = with_gradient(lambda x: attend(x, table), qkv)
    expected = with_gradient(lambda x: attend(reference.rotary(x, table), None), qkv)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_long_sequences(use_native):
    """Offsets of keys far into the sequence; the plain form needs memory for the window only."""
    qkv, cu_seqlens, longest, rows = packed_qkv([LONG, 77], 1, 64)
    rotations = ops.rotations(torch.arange(LONG + 77), 64, BASE)
    results = [
        with_gradient(
            lambda x, form=form: form(x, cu_seqlens, longest, 0.1, 3, rows, None, 64, rotations),
            qkv,
        )
        for form in (ops.attention, reference.attention)
    ]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
