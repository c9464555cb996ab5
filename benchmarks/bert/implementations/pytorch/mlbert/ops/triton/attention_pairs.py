"""The work of `mlbert.ops.triton.gluon_attention`: which queries and keys, and in which order.

Legend: S sequences, T tokens, N heads, L tokens of one sequence, P pairs: as many queries as two
consumers take at once.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlbert.ops.triton.attention import lengths_of
from mlbert.ops.triton.attention_forward import seen_range

BLOCK = 64  # sequences of a program
# Of a pair: first token of its sequence, tokens of the sequence, its first query, the sequence.
FIELDS = 4


def pairs_of(cu_seqlens: Tensor, num_tokens: int, rows: int) -> Tensor:
    """Return the pairs of all sequences, those of longer sequences first.

    Returns:
        int32 [P + 1, 4]. The first row has the number of pairs, which may be less than P; the
        others have `FIELDS`.
    """
    num_sequences = cu_seqlens.numel() - 1
    most = num_tokens // rows + num_sequences
    pairs = torch.empty(most + 1, FIELDS, dtype=torch.int32, device=cu_seqlens.device)
    attention_pairs_kernel[(max(1, triton.cdiv(num_sequences, BLOCK)),)](
        cu_seqlens, pairs, num_sequences, ROWS=rows, BLOCK=BLOCK, FIELDS=FIELDS
    )
    return pairs


@triton.jit(do_not_specialize=["num_sequences"])
def attention_pairs_kernel(
    cu_seqlens,
    pairs,
    num_sequences,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Write `pairs_of`. Grid: S / BLOCK, at least 1. cu_seqlens: int32 [S+1]."""
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = lengths_of(cu_seqlens, own, num_sequences)
    place = tl.zeros([BLOCK], tl.int32)
    count = 0
    for start in range(0, num_sequences, BLOCK):
        other = start + tl.arange(0, BLOCK)
        other_length = lengths_of(cu_seqlens, other, num_sequences)
        number = tl.maximum(other_length + ROWS - 1, 0) // ROWS
        longer = other_length[None, :] > length[:, None]
        earlier = (other_length[None, :] == length[:, None]) & (other[None, :] < own[:, None])
        place += tl.sum(tl.where(longer | earlier, number[None, :], 0), 1)
        count += tl.sum(number, 0)
    if tl.program_id(0) == 0:
        tl.store(pairs, count)
    first_token = tl.load(cu_seqlens + own, mask=own < num_sequences, other=0)
    number = tl.maximum(length + ROWS - 1, 0) // ROWS
    for pair in range(0, tl.max(number, 0)):
        exists = pair < number
        at = pairs + (1 + place + pair) * FIELDS
        tl.store(at, first_token, mask=exists)
        tl.store(at + 1, length, mask=exists)
        tl.store(at + 2, pair * ROWS + tl.zeros_like(length), mask=exists)
        tl.store(at + 3, own, mask=exists)


@triton.jit
def task_of(turn, program, programs):
    """Return which task a program does in a turn.

    Tasks are sorted by length. The order of the programs is turned round every other time, so that
    none of them always has the longest one.
    """
    place = program if turn % 2 == 0 else programs - 1 - program
    return turn * programs + place


@triton.jit
def key_blocks(first, length, WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Return the first block of keys that ROWS queries from `first` on see, and how many blocks.

    There are none if the queries are past the end.
    """
    start = 0
    end = length
    if WINDOW is not None:
        start, end = seen_range(first, length, WINDOW, ROWS, KEYS)
    blocks = (end - start + KEYS - 1) // KEYS
    return start // KEYS, tl.where(first < length, blocks, 0)
