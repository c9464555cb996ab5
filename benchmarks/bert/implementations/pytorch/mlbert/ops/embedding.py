"""The sum of word, position and segment embeddings.

The ``native`` gradient reads the tokens once, with threads splitting the columns:
cost T * D, no atomics.

Legend: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops import reference
from mlbert.ops.native_library import ACTIVATION_TYPES, is_bf16, library, pointer
from mlbert.ops.weights import buffer_to_add, written


def embedding_sum(
    input_ids: Tensor,
    segment_ids: Tensor,
    position_ids: Tensor,
    word: Tensor,
    position: Tensor | None,
    segment: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return word[input_ids] + position[position_ids] + segment[segment_ids].

    Args:
        input_ids, segment_ids, position_ids: int64 [T].
        word, position, segment: [V, D], [longest sequence, D], [2, D]. `position` None runs plain.
        dtype: of the result; by default that of `word`.

    Returns:
        [T, D].
    """
    if position is None:
        return reference.embedding_sum(
            input_ids, segment_ids, position_ids, word, None, segment, dtype
        )
    function = registry.implementation("embedding_sum", word)
    return function(input_ids, segment_ids, position_ids, word, position, segment, dtype)


registry.register("embedding_sum", "plain")(reference.embedding_sum)


@registry.register("embedding_sum", "native")
def _native(
    input_ids: Tensor,
    segment_ids: Tensor,
    position_ids: Tensor,
    word: Tensor,
    position: Tensor,
    segment: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:
    # The kernels read float32 tables; converting another table would cost more than the op.
    are_float32 = all(table.dtype == torch.float32 for table in (word, position, segment))
    out_type = dtype or word.dtype
    if not are_float32 or out_type not in ACTIVATION_TYPES:
        return reference.embedding_sum(
            input_ids, segment_ids, position_ids, word, position, segment, dtype
        )
    _check_ids(input_ids, word)
    _check_ids(position_ids, position)
    _check_ids(segment_ids, segment)
    ids = (input_ids, position_ids, segment_ids)
    return _EmbeddingSum.apply(ids, out_type, word, position, segment)


def _check_ids(ids: Tensor, table: Tensor) -> None:
    if ids.numel() == 0:
        return
    # NumPy takes a fifth of the time of PyTorch's operators here.
    numbers = ids.numpy()
    low = int(numbers.min())
    high = int(numbers.max())
    num_rows = table.shape[0]
    if low < 0 or high >= num_rows:
        wrong = low if low < 0 else high
        raise IndexError(f"id {wrong} is not in an embedding table of {num_rows} rows")


class _EmbeddingSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: tuple[Tensor, ...], dtype: torch.dtype, *parameters: Tensor
    ) -> Tensor:
        ids = tuple(x.contiguous() for x in ids)
        tables = tuple(table.contiguous() for table in parameters)
        assert len({x.shape for x in ids}) == 1, "three ids per token"
        assert len({table.shape[1] for table in tables}) == 1, "tables must have the same width"
        num_tokens = ids[0].numel()
        hidden = tables[0].shape[1]
        out = torch.empty(num_tokens, hidden, dtype=dtype)
        library().embedding_forward(
            *(pointer(x, torch.int64) for x in ids),
            *(pointer(table) for table in tables),
            num_tokens,
            hidden,
            is_bf16(out),
            torch.get_num_threads(),
            pointer(out),
        )
        ctx.save_for_backward(*ids)
        ctx.tables = parameters
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        d_out = d_out.contiguous()
        num_tokens, hidden = d_out.shape
        buffers = [buffer_to_add(table) for table in ctx.tables]
        gradients = [
            torch.zeros(table.shape) if buffer is None else buffer
            for table, buffer in zip(ctx.tables, buffers, strict=True)
        ]
        library().embedding_backward(
            *(pointer(x) for x in ctx.saved_tensors),
            pointer(d_out),
            num_tokens,
            hidden,
            is_bf16(d_out),
            torch.get_num_threads(),
            *(pointer(gradient) for gradient in gradients),
        )
        in_place = [buffer is not None for buffer in buffers]
        written(list(itertools.compress(ctx.tables, in_place)))
        for_autograd = (
            None if is_written else gradient
            for gradient, is_written in zip(gradients, in_place, strict=True)
        )
        return None, None, *for_autograd
