"""Streams of tokens for the tests of attention."""

from __future__ import annotations

import torch
from torch import Tensor


def stream(
    lengths: list[int], num_heads: int, head_size: int, tail: int = 0, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor, int, Tensor]:
    """Return qkv, cu_seqlens, max_seqlen, rows; `tail` tokens are after the last sequence."""
    generator = generator or torch.Generator().manual_seed(len(lengths))
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    num_tokens = int(cu_seqlens[-1]) + tail
    qkv = 1.5 * torch.randn(num_tokens, 3, num_heads, head_size, generator=generator)
    rows = torch.randint(0, 2**31 - 1, (num_tokens,), dtype=torch.int32, generator=generator)
    return qkv, cu_seqlens, max(lengths), rows
