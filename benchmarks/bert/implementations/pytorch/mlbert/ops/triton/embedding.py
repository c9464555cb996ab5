"""The sum of the three embeddings in Triton, with a gradient without atomics.

Each table's gradient is a sum over tokens by id. For frequent rows ([MASK], the two segments, the
first positions) atomics would be slow and not deterministic. Instead, tokens are sorted by id
(stable, on the device) and split into chunks. One program per chunk sums its runs of equal ids and
writes those within the chunk; runs that may continue in a neighboring chunk are joined in order by
a second kernel. Each row has one writer, so rows can be added to a gradient in place. Sizes do not
depend on the data, and there is no host synchronization.

Legend: T tokens, D hidden, V rows of a table, C chunks of sorted tokens.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops import reference
from mlbert.ops.triton.device import ACTIVATION_TYPES
from mlbert.ops.weights import buffer_to_add, written

CHUNK = 64  # tokens
JOIN_ROWS = 16
JOIN_COLUMNS = 128


@registry.register("embedding_sum", "triton")
def embedding_sum(input_ids, segment_ids, position_ids, word, position, segment, dtype=None):
    """See `mlbert.ops.embedding.embedding_sum`; an id out of range makes the token's sum NaN."""
    out_type = dtype or word.dtype
    types = {word.dtype, position.dtype, segment.dtype, out_type}
    if not types <= set(ACTIVATION_TYPES):
        return reference.embedding_sum(
            input_ids, segment_ids, position_ids, word, position, segment, dtype
        )
    ids = (input_ids, position_ids, segment_ids)
    return _TritonEmbeddingSum.apply(ids, out_type, word, position, segment)


class _TritonEmbeddingSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, dtype, *parameters):
        ids = [x.contiguous() for x in ids]
        tables = [table.contiguous() for table in parameters]
        assert len({x.shape for x in ids}) == 1, "three ids per token"
        assert len({table.shape[1] for table in tables}) == 1, "tables must have the same width"
        tokens = ids[0].numel()
        hidden = tables[0].shape[1]
        out = torch.empty(tokens, hidden, dtype=dtype, device=tables[0].device)
        if tokens:
            block = triton.next_power_of_2(hidden)
            rows = [table.shape[0] for table in tables]
            embedding_forward_kernel[(tokens,)](
                *ids, *tables, out, *rows, hidden, BLOCK=block, num_warps=_warps(block)
            )
        ctx.save_for_backward(*ids)
        ctx.tables = parameters
        return out

    @staticmethod
    def backward(ctx, d_out):
        d_out = d_out.contiguous()
        gradients = []
        for ids, table in zip(ctx.saved_tensors, ctx.tables, strict=True):
            buffer = buffer_to_add(table)
            gradient = sum_rows_by_id(ids, d_out, table.shape[0], buffer)
            if buffer is None:
                gradients.append(gradient.to(table.dtype))
            else:
                written((table,))
                gradients.append(None)
        return None, None, *gradients


def sum_rows_by_id(
    ids: Tensor, values: Tensor, num_rows: int, buffer: Tensor | None = None
) -> Tensor:
    """Return out[r] = the sum of the rows of `values` with id r, in a fixed order.

    Args:
        ids: int64 [T]; ids outside 0..num_rows-1 are ignored.
        values: [T, D] float32 or bfloat16, contiguous.
        num_rows: V.
        buffer: float32 [V, D] to add the sums to, which is returned; by default new memory.

    Returns:
        float32 [V, D].
    """
    tokens, hidden = values.shape
    if buffer is None:
        out = torch.zeros(num_rows, hidden, dtype=torch.float32, device=values.device)
    else:
        out = buffer
        assert out.is_contiguous(), "contiguous gradient expected"
    adds = buffer is not None
    if tokens == 0:
        return out
    sorted_ids, order = torch.sort(ids.to(torch.int32), stable=True)
    chunks = triton.cdiv(tokens, CHUNK)
    first_ends, last_ends = torch.empty(
        2, chunks, hidden, dtype=torch.float32, device=values.device
    )
    block = triton.next_power_of_2(hidden)
    embedding_sum_runs_kernel[(chunks,)](
        values,
        sorted_ids,
        order,
        out,
        first_ends,
        last_ends,
        tokens,
        num_rows,
        hidden=hidden,
        ADDS=adds,
        CHUNK=CHUNK,
        BLOCK=block,
        num_warps=_warps(block),
    )
    # End of the last run of each full chunk: the first sorted position with a larger id.
    run_ends = torch.searchsorted(
        sorted_ids, sorted_ids[CHUNK - 1 :: CHUNK].contiguous(), right=True
    )
    if len(run_ends):
        grid = (len(run_ends), triton.cdiv(hidden, JOIN_COLUMNS))
        embedding_join_runs_kernel[grid](
            sorted_ids,
            run_ends,
            out,
            first_ends,
            last_ends,
            num_rows,
            hidden=hidden,
            ADDS=adds,
            CHUNK=CHUNK,
            BLOCK_ROWS=JOIN_ROWS,
            BLOCK=JOIN_COLUMNS,
        )
    return out


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))


@triton.jit
def _table_row(table, ids, token, rows, columns, hidden):
    row = tl.load(ids + token)
    width = tl.where((row >= 0) & (row < rows), hidden, 0)
    return tl.load(table + row * hidden + columns, mask=columns < width, other=float("nan")).to(
        tl.float32
    )


@triton.jit
def embedding_forward_kernel(
    word_ids, position_ids, segment_ids, word, position, segment, out, words, positions, segments,
    hidden, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum one token's rows [D] in float32, in the reference's order.

    Grid: T. ids: int64 [T]; tables: [V, D].
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    total = _table_row(word, word_ids, token, words, columns, hidden)
    total += _table_row(position, position_ids, token, positions, columns, hidden)
    total += _table_row(segment, segment_ids, token, segments, columns, hidden)
    tl.store(out + token * hidden + columns, total.to(out.dtype.element_ty), mask=columns < hidden)


@triton.jit
def _store_row(out, row, total, columns, hidden, inside, ADDS: tl.constexpr):
    """Store, or add, a sum [D] in a row."""
    place = out + row.to(tl.int64) * hidden + columns
    if ADDS:
        total += tl.load(place, mask=inside, other=0.0)
    tl.store(place, total, mask=inside)


@triton.jit
def _store_run(
    out, heads, tails, chunk, run, total, columns, num_rows, hidden, enters, leaves,
    ADDS: tl.constexpr,
):  # fmt: skip
    """Store a run's sum: in its row, or in the chunk's head (began earlier)
    or tail (begins here and continues).
    """
    complete = (run >= 0) & (run < num_rows) & (not enters) & (not leaves)
    _store_row(out, run, total, columns, hidden, columns < tl.where(complete, hidden, 0), ADDS)
    tl.store(heads + chunk * hidden + columns, total, mask=columns < tl.where(enters, hidden, 0))
    tl.store(
        tails + chunk * hidden + columns,
        total,
        mask=columns < tl.where(leaves & (not enters), hidden, 0),
    )


@triton.jit(do_not_specialize=["tokens"])
def embedding_sum_runs_kernel(
    values, sorted_ids, order, out, heads, tails, tokens, num_rows, hidden: tl.constexpr,
    ADDS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the runs of equal ids among CHUNK sorted tokens; with ADDS, add sums to rows. Grid: C.

    values: [T, D]; sorted_ids: int32 [T]; order: int64 [T]; out: float32 [V, D];
    heads, tails: float32 [C, D].
    """
    chunk = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    first = chunk * CHUNK
    last = tl.minimum(first + CHUNK, tokens)
    run = tl.load(sorted_ids + first)
    # Tokens are sorted by id, so a table row's gradient is one run, which may span chunks.
    enters = tl.load(sorted_ids + first - 1, mask=first > 0, other=-1) == run
    enters = enters & (first > 0)
    total = tl.zeros([BLOCK], tl.float32)
    place = first
    while place < last:
        row_id = tl.load(sorted_ids + place)
        if row_id != run:
            _store_run(
                out, heads, tails, chunk, run, total, columns, num_rows, hidden, enters, False,
                ADDS,
            )  # fmt: skip
            run = row_id
            enters = False
            total = tl.zeros([BLOCK], tl.float32)
        token = tl.load(order + place)
        total += tl.load(values + token * hidden + columns, mask=columns < hidden, other=0.0).to(
            tl.float32
        )
        place += 1
    leaves = (tl.load(sorted_ids + last, mask=last < tokens, other=-1) == run) & (last < tokens)
    _store_run(
        out, heads, tails, chunk, run, total, columns, num_rows, hidden, enters, leaves, ADDS
    )


@triton.jit
def embedding_join_runs_kernel(
    sorted_ids, run_ends, out, heads, tails, num_rows, hidden: tl.constexpr, ADDS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the row of a run that begins in this chunk and continues:
    its tail plus the following heads.

    Grid: full chunks, D / BLOCK. run_ends: int64 [full chunks], the sorted position after the run.
    """
    chunk = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    run = tl.load(sorted_ids + chunk * CHUNK + CHUNK - 1)
    end = tl.load(run_ends + chunk)
    before = tl.load(sorted_ids + chunk * CHUNK - 1, mask=chunk > 0, other=0)
    begins = (chunk == 0) | (before != run)
    # Only the chunk in which a run begins writes its row, so no atomics are needed.
    if begins & (end > (chunk + 1) * CHUNK) & (run >= 0) & (run < num_rows):
        total = tl.load(tails + chunk * hidden + columns, mask=columns < hidden, other=0.0)
        last = (end - 1) // CHUNK
        start = chunk + 1
        while start <= last:
            rows = start + tl.arange(0, BLOCK_ROWS)
            inside = (rows <= last)[:, None] & (columns < hidden)[None, :]
            part = tl.load(
                heads + rows[:, None] * hidden + columns[None, :], mask=inside, other=0.0
            )
            total += tl.sum(part, 0)
            start += BLOCK_ROWS
        _store_row(out, run, total, columns, hidden, columns < hidden, ADDS)
