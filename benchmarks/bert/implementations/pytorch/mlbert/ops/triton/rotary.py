"""Rotate queries and keys for the Triton attention, one pass over memory each way.

The attention kernels read each key once for every block of queries, so they read rotated ones.

Legend: T tokens, N heads, H head size.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # tokens of a program


def rotated(qkv: Tensor, rotations: Tensor) -> Tensor:
    """Return a copy of qkv [T, 3, N, H] with rotated queries and keys.

    ``rotations``: float32 [T, H], see `mlbert.ops.rotary`.
    """
    out = torch.empty_like(qkv)
    _launch(qkv, rotations, out, direction=1)
    return out


def rotate_back(d_qkv: Tensor, rotations: Tensor) -> None:
    """Replace the gradients of rotated queries and keys by those of the queries and keys."""
    _launch(d_qkv, rotations, d_qkv, direction=-1)


def _launch(qkv: Tensor, rotations: Tensor, out: Tensor, direction: int) -> None:
    num_tokens, _, num_heads, head_size = qkv.shape
    if num_tokens:
        rotary_kernel[(triton.cdiv(num_tokens, ROWS),)](
            qkv,
            rotations,
            out,
            num_tokens,
            NUM_HEADS=num_heads,
            HALF=head_size // 2,
            DIRECTION=direction,
            COPIES=out is not qkv,
            ROWS=ROWS,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["num_tokens"])
def rotary_kernel(
    qkv, rotations, out, num_tokens, NUM_HEADS: tl.constexpr, HALF: tl.constexpr,
    DIRECTION: tl.constexpr, COPIES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate the queries and keys of ROWS tokens by DIRECTION times their angles. Grid: T / ROWS.

    qkv, out: [T, 3, N, H], may be the same; rotations: float32 [T, H]. With COPIES, values are
    copied.
    """
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_token = (token < num_tokens)[:, None]
    channel = tl.arange(0, HALF)[None, :]
    angle = rotations + token.to(tl.int64)[:, None] * (2 * HALF) + channel
    cosine = tl.load(angle, mask=is_token, other=0.0)
    sine = tl.load(angle + HALF, mask=is_token, other=0.0) * DIRECTION
    start = token.to(tl.int64)[:, None] * (6 * NUM_HEADS * HALF) + channel
    for head in range(0, 2 * NUM_HEADS):
        place = start + head * (2 * HALF)
        a = tl.load(qkv + place, mask=is_token, other=0.0).to(tl.float32)
        b = tl.load(qkv + place + HALF, mask=is_token, other=0.0).to(tl.float32)
        turned_a = a * cosine - b * sine
        turned_b = b * cosine + a * sine
        tl.store(out + place, turned_a.to(out.dtype.element_ty), mask=is_token)
        tl.store(out + place + HALF, turned_b.to(out.dtype.element_ty), mask=is_token)
    if COPIES:
        for head in range(2 * NUM_HEADS, 3 * NUM_HEADS):
            place = start + head * (2 * HALF)
            a = tl.load(qkv + place, mask=is_token, other=0.0)
            b = tl.load(qkv + place + HALF, mask=is_token, other=0.0)
            tl.store(out + place, a, mask=is_token)
            tl.store(out + place + HALF, b, mask=is_token)
