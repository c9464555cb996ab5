"""Attention with dropout over sequences in a flat token stream.

Implementations:

    plain    `mlbert.ops.reference.attention`
    native   a C kernel in which each thread takes one sequence and head at a time
             (``csrc/cpu/ops_attention.c``). In bfloat16, on processors with a matrix unit, the same
             algorithm in tiles (``csrc/cpu/ops_attention_tiles.c``), after it has reproduced the
             first kernel on a small problem
    triton   `mlbert.ops.triton.attention`
    fmha     `mlbert.ops.fmha`; opt-in

All ops are `autograd.Function`s rather than `torch.library.custom_op`s: with torch 2.13 the latter
add 60 us to a forward and 140 us to a forward and backward, and even a small model calls dozens of
ops in a step.

Legend: S sequences, T tokens, N heads, H head size.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops import reference, rotary
from mlbert.ops.dropout import Key, dropout_threshold
from mlbert.ops.native_library import (
    check_attention,
    check_rotations,
    check_rows,
    check_slopes,
    is_bf16,
    library,
    pointer,
)

TILE_HEAD_SIZE = 32
TRITON_HEAD_SIZES = (32, 64, 128)  # other sizes run plain
HALF_TYPES = (torch.bfloat16, torch.float16)  # supported by fmha
FMHA_HEAD_SIZE = 64
FMHA_LENGTH = 512  # tokens
# Correct bfloat16 results differ by about 0.3 %; a wrong instruction
# or layout causes more than 10 %.
_TILE_TOLERANCE = 0.02
ORDER = "sequence_order"  # the op, in the registry
_EVERYTHING = -1  # the kernels' window for whole sequences


def attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float,
    key: Key,
    rows: Tensor | None,
    alibi_slopes: Tensor | None = None,
    window: int | None = None,
    rotations: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Return dropout(softmax(Q K^T / sqrt(H) + bias)) V within each sequence, bidirectional.

    Args:
        qkv: [T, 3, N, H] float32 or bfloat16 (float64 runs plain).
        cu_seqlens: int32 [S+1]; sequence s has tokens cu_seqlens[s] to cu_seqlens[s+1].
            Empty sequences are allowed.
        max_seqlen: longest sequence, tokens.
        dropout_p: dropout probability of attention weights, in [0, 1); rounded to 1/256.
        key: `dropout_key` of this layer and step.
        rows: int32 [T], `Batch.dropout_rows`: the mask row of each query token. Mask columns are
            key positions within the sequence, and each head has its own key
            (`mlbert.ops.dropout.head_key`).
        alibi_slopes: float32 [N]; the bias of query i and key j of a sequence is -slope * |i - j|
            (Press et al., arXiv 2108.12409, in both directions). None means no bias. Not
            differentiated.
        window: number of tokens that a query sees on each side, besides its own: those at a
            distance of at most `window`, for the cost of as many keys (ModernBERT's
            ``local_attention`` is twice this number). None means the whole sequence. Dropout masks
            and biases are the same with and without it.
        rotations: float32 [T, H], `mlbert.ops.api.rotations` of the tokens: queries and keys are
            rotated first (`mlbert.ops.rotary`). None means no rotation. Not differentiated.
        order: `sequence_order` of the sequences, which layers share; None computes it here.

    Returns:
        [T, N, H] of the dtype of qkv; zero for tokens after the last sequence.
    """
    assert window is None or window >= 0, f"window {window}"
    return registry.implementation("attention", qkv)(
        qkv, cu_seqlens, max_seqlen, dropout_p, key, rows, alibi_slopes, window, rotations, order
    )


def sequence_order(cu_seqlens: Tensor) -> Tensor:
    """Return the numbers of the sequences, int32 [S], the longest first, in a stable order: kernels
    begin with the longest, so that all programs or threads finish together.
    """
    order: Tensor = registry.fastest_exact(ORDER, cu_seqlens.device.type)(cu_seqlens)
    return order


@registry.register_exact(ORDER, "plain")
def _plain_order(cu_seqlens: Tensor) -> Tensor:
    return cu_seqlens.diff().argsort(descending=True, stable=True).int()


def capture_obstacle(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    alibi: bool,
    max_seqlen: int,
    window: int | None = None,
) -> str | None:
    """Return why the selected implementation cannot run this attention in a CUDA graph,
    or None if it can.
    """
    form = registry.selected(device)["attention"]
    is_local = window is not None and window < max_seqlen - 1
    unsupported = {
        "triton": head_size not in TRITON_HEAD_SIZES,
        "fmha": head_size != FMHA_HEAD_SIZE
        or dtype not in HALF_TYPES
        or max_seqlen > FMHA_LENGTH
        or is_local,
    }
    if form in ("plain", "native"):
        return f"{form} attention reads the sequences' lengths on the host"
    if unsupported.get(form):
        kind = f"{dtype} attention of {max_seqlen} tokens with heads of {head_size}"
        kind += " and ALiBi" if alibi else ""
        kind += f" and a window of {window}" if is_local else ""
        return (
            f"{kind} has no {form} implementation and runs plain, "
            "which reads the sequences' lengths on the host"
        )
    return None


registry.register("attention", "plain")(reference.attention)


def _remark() -> str:
    return "bfloat16 attention on the matrix unit" if tiles_work() else ""


@registry.register("attention", "native", remark=_remark)
def _native(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float,
    key: int,
    rows: Tensor | None,
    alibi_slopes: Tensor | None = None,
    window: int | None = None,
    rotations: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Run `attention` with a C kernel."""
    del max_seqlen
    tiles = uses_tiles(qkv.dtype, qkv.shape[3])
    return native_attention(
        qkv, cu_seqlens, dropout_p, key, rows, alibi_slopes, window, rotations, order, tiles=tiles
    )


def uses_tiles(dtype: torch.dtype, head_size: int) -> bool:
    """Return whether the C kernel for the matrix unit computes attention."""
    return dtype == torch.bfloat16 and head_size % TILE_HEAD_SIZE == 0 and tiles_work()


def native_attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    dropout_p: float,
    key: int,
    rows: Tensor | None,
    alibi_slopes: Tensor | None = None,
    window: int | None = None,
    rotations: Tensor | None = None,
    order: Tensor | None = None,
    *,
    tiles: bool,
) -> Tensor:
    """Run `attention` with a C kernel.

    `tiles` selects the matrix unit (bfloat16, H a multiple of 32).
    """
    return _NativeAttention.apply(
        qkv.contiguous(),
        cu_seqlens,
        tiles,
        dropout_threshold(dropout_p),
        key,
        rows,
        alibi_slopes,
        window,
        None if rotations is None else rotations.contiguous(),
        sequence_order(cu_seqlens) if order is None else order,
    )


@functools.cache
def tiles_work() -> bool:
    """Return whether the bfloat16 matrix unit exists and reproduces the other kernel.

    Compared on a small problem, with and without a window and rotations.
    """
    if not library().attention_tiles_available():
        return False
    generator = torch.Generator().manual_seed(0)
    bounds = torch.tensor([0, 70, 71, 240], dtype=torch.int32)
    rows = torch.arange(240, dtype=torch.int32)
    values = torch.randn(240, 3, 2, 64, generator=generator).bfloat16()
    table = rotary.rotations(rows, 64, 10_000.0)
    found = list[Tensor]()
    expected = list[Tensor]()
    with torch.enable_grad():
        for window, turns in ((None, None), (40, table)):
            for tiles, results in ((False, expected), (True, found)):
                qkv = values.clone().requires_grad_()
                out = native_attention(qkv, bounds, 0.1, 1, rows, None, window, turns, tiles=tiles)
                (gradient,) = torch.autograd.grad(out, qkv, values[:, 0])
                results += [out.detach().float(), gradient.float()]
    return all(
        bool((a - b).norm() <= _TILE_TOLERANCE * a.norm())
        for a, b in zip(expected, found, strict=True)
    )


class Queries(NamedTuple):
    """Some tokens as queries, in the order of the tokens.

    Attributes:
        bounds: int32 [S+1], the queries of each sequence.
        rows: int32 [R], the place of each query among the tokens that were asked for.
        tokens: int32 [R].
        unused: int64, the places of tokens after the last sequence.
    """

    bounds: Tensor
    rows: Tensor
    tokens: Tensor
    unused: Tensor

    @classmethod
    def of(cls, tokens: Tensor, cu_seqlens: Tensor) -> Queries:
        """Return the queries for tokens, int64 [R] in any order, on the host."""
        numbers = tokens.numpy()
        order = np.argsort(numbers, kind="stable")
        ascending = numbers[order]
        bounds = np.searchsorted(ascending, cu_seqlens.numpy())
        return cls(
            torch.from_numpy(bounds.astype(np.int32)),
            torch.from_numpy(order.astype(np.int32)),
            torch.from_numpy(ascending.astype(np.int32)),
            torch.from_numpy(order[bounds[-1] :]),
        )

    def zero_unused(self, x: Tensor) -> None:
        """Zero the rows of x [R, ...] of tokens after the last sequence."""
        if self.unused.numel():
            x[self.unused] = 0


class NativeAttention:
    """The C kernels for one call, without autograd.

    Args:
        tiles: whether to use the matrix unit.
        threshold: `dropout_threshold`.

    The others are as in `attention`.
    """

    def __init__(
        self,
        cu_seqlens: Tensor,
        tiles: bool,
        threshold: int,
        key: int,
        rows: Tensor | None,
        slopes: Tensor | None,
        window: int | None,
        rotations: Tensor | None,
        order: Tensor,
    ) -> None:
        self._cu_seqlens = cu_seqlens
        self._tiles = tiles
        self._threshold = threshold
        self._key = key
        self._rows = rows
        self._slopes = slopes
        self._rotations = rotations
        self._order = order
        # NumPy takes a tenth of the time of PyTorch's operators here.
        bounds = cu_seqlens.numpy()
        lengths = bounds[1:] - bounds[:-1]
        self._longest = int(lengths.max())
        self._end = int(bounds[-1])
        assert bounds[0] == 0 <= lengths.min(), "cu_seqlens must increase from 0"
        is_everything = window is None or window >= self._longest - 1
        self._window = _EVERYTHING if is_everything else window

    def forward(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention of qkv [T, 3, N, H], [T, N, H], and statistics for `backward`."""
        check_attention(qkv, self._rows, self._threshold, self._slopes, self._rotations)
        num_tokens, _, num_heads, head_size = qkv.shape
        assert self._end <= num_tokens, (
            f"cu_seqlens ends at {self._end}, but there are {num_tokens} tokens"
        )
        out = qkv.new_empty(num_tokens, num_heads, head_size)
        self._zero_tail(out)
        statistics = torch.empty(num_tokens, num_heads, 2)
        kernels = library()
        function = kernels.attention_tiles_forward if self._tiles else kernels.attention_forward
        arguments, _scratch = self._arguments(qkv)
        function(*arguments, pointer(statistics), pointer(out))
        return out, statistics

    def backward(self, qkv: Tensor, statistics: Tensor, d_out: Tensor) -> Tensor:
        """Return the gradient of qkv."""
        d_out = d_out.contiguous()
        d_qkv = torch.empty_like(qkv)
        self._zero_tail(d_qkv)
        kernels = library()
        function = kernels.attention_tiles_backward if self._tiles else kernels.attention_backward
        arguments, _scratch = self._arguments(qkv)
        function(*arguments, pointer(statistics), pointer(d_out, d_qkv.dtype), pointer(d_qkv))
        return d_qkv

    @property
    def takes_queries(self) -> bool:
        """Whether there are kernels for some tokens as queries: a block of them may see more keys
        than a window has.
        """
        return not self._tiles and self._window == _EVERYTHING

    def forward_of_queries(
        self, queries: Queries, q: Tensor, keys_and_values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return attention of some tokens, [R, N, H], and statistics for `backward_of_queries`.

        Args:
            queries: the tokens.
            q: [R, N, H], in the order in which they were asked for.
            keys_and_values: [T, 2, N, H].
        """
        assert self.takes_queries, "not for windows, nor on the matrix unit"
        self._check_queries(queries, q, keys_and_values)
        out = torch.empty_like(q)
        queries.zero_unused(out)
        statistics = torch.empty(*q.shape[:2], 2)
        arguments, _scratch = self._arguments(q)
        library().attention_queries_forward(
            *arguments,
            pointer(keys_and_values, q.dtype),
            *self._query_arguments(queries),
            pointer(statistics),
            pointer(out),
        )
        return out, statistics

    def backward_of_queries(
        self,
        queries: Queries,
        q: Tensor,
        keys_and_values: Tensor,
        statistics: Tensor,
        d_out: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of q and of the keys and values."""
        d_out = d_out.contiguous()
        d_q = torch.empty_like(q)
        queries.zero_unused(d_q)
        d_keys_and_values = torch.empty_like(keys_and_values)
        self._zero_tail(d_keys_and_values)
        arguments, _scratch = self._arguments(q)
        library().attention_queries_backward(
            *arguments,
            pointer(keys_and_values, q.dtype),
            *self._query_arguments(queries),
            pointer(statistics),
            pointer(d_out, q.dtype),
            pointer(d_q),
            pointer(d_keys_and_values),
        )
        return d_q, d_keys_and_values

    def _check_queries(self, queries: Queries, q: Tensor, keys_and_values: Tensor) -> None:
        num_queries, num_heads, head_size = q.shape
        num_tokens = keys_and_values.shape[0]
        assert keys_and_values.shape == (num_tokens, 2, num_heads, head_size)
        assert queries.rows.shape == queries.tokens.shape == (num_queries,)
        assert queries.bounds.shape == self._cu_seqlens.shape
        assert self._end <= num_tokens, (
            f"cu_seqlens ends at {self._end}, but there are {num_tokens} tokens"
        )
        check_rows(self._rows, num_tokens, self._threshold)
        check_slopes(self._slopes, num_heads)
        check_rotations(self._rotations, num_tokens, head_size)

    @staticmethod
    def _query_arguments(queries: Queries) -> list[int | None]:
        numbers = (queries.bounds, queries.rows, queries.tokens)
        return [pointer(x, torch.int32) for x in numbers]

    def _zero_tail(self, x: Tensor) -> None:
        """Zero the tokens after the last sequence."""
        if self._end < x.shape[0]:
            x[self._end :].zero_()

    def _arguments(self, qkv: Tensor) -> tuple[tuple[int | None, ...], Tensor]:
        """Return the leading arguments of both directions, and the scratch tensor.

        The scratch tensor must stay alive.
        """
        num_heads, head_size = qkv.shape[-2:]
        threads = torch.get_num_threads()
        if self._tiles:
            scratch_floats = library().attention_tiles_scratch_floats
        else:
            scratch_floats = library().attention_scratch_floats
        scratch = torch.empty(threads * scratch_floats(self._longest, head_size, self._window))
        arguments = (
            pointer(qkv),
            pointer(self._cu_seqlens, torch.int32),
            pointer(self._order),
            pointer(self._rows, torch.int32),
            pointer(self._slopes, torch.float32),
            pointer(self._rotations, torch.float32),
            self._order.numel(),
            num_heads,
            head_size,
            self._longest,
            self._window,
            self._key,
            self._threshold,
            is_bf16(qkv),
            threads,
            pointer(scratch),
        )
        return arguments, scratch


class _NativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, *settings: Any) -> Tensor:
        ctx.attention = NativeAttention(*settings)
        out, statistics = ctx.attention.forward(qkv)
        ctx.save_for_backward(qkv, statistics)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        return (ctx.attention.backward(*ctx.saved_tensors, d_out), *[None] * 9)
