"""The FP8 products before GELU and before its derivative with the weight kept in shared memory,
in Gluon, for Hopper.

They compute what `mlbert.ops.triton.product` does. That kernel reads both factors of every block of
128 x 128 through the L2 cache. Here a program keeps 128 rows of the weight, and only activations
stream past it:

    producer, one warp        loads the weight once, then tiles of 64 rows of `a` into a ring
    two consumers, four       multiply one tile each: while one of them runs the matrix products,
    warps each                the other computes GELU, casts and stores

Barriers (PTX ISA, "mbarrier"; a wait only knows whether a phase is odd, so no partition may wait
for a phase that is two away):

    full[s], empty[s]   slot s of the ring has data; the consumer has finished with it
    turn[c]             consumer c may use the ring. Without it, a consumer would mistake the data
                        of the other one, two phases earlier in the same slot, for its own
    b_full, pre_full[c] the weight is there; the tile of the pre-activation is there (backward)

The kernel has been compiled, and its source has run in a model of these barriers
(``tests/unit/ops/gluon_model.py``). It has not run on a GPU, so only ``OPS=gluon`` uses it.

Legend: T tokens, U tokens rounded up to a multiple of 16, D inner dimension, F columns.
"""

from __future__ import annotations

# mypy: disallow-untyped-defs=False
import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mlbert.ops import forms as registry
from mlbert.ops.fp8_scaling import Quantized
from mlbert.ops.triton.device import multiprocessors, sum_partials
from mlbert.ops.triton.gelu import gelu_parts
from mlbert.ops.triton.product import buffers_of_product

# Of a tile: rows of the activations, rows of the weight, and FP8 numbers of both in a step.
ROWS = 64
COLUMNS = 128
INNER = 128
# Partitions that multiply, each a different tile.
CONSUMERS = 2
# 128 KiB of weight fill shared memory, with the ring and what waits to be stored.
MAX_STEPS = 8
# Slots of the ring. Backward, the sums over a tile's rows take the memory of one slot.
FORWARD_STAGES = 4
BACKWARD_STAGES = 3
PAIR = gl.constexpr(CONSUMERS)
WARPS = 4
_FP8 = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_FP8_TURNED = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
_BF16 = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def fits(inner: int, columns: int) -> bool:
    """Return whether the kernel can multiply by a weight [columns, inner]."""
    return inner % INNER == 0 and inner // INNER <= MAX_STEPS and columns % COLUMNS == 0


def num_programs(tokens: int, columns: int, processors: int) -> int:
    """Return how many programs to start: as many for each block of columns,
    at most one for each pair of tiles, and no more than `processors` if these suffice.
    """
    blocks = columns // COLUMNS
    pairs = triton.cdiv(tokens, CONSUMERS * ROWS)
    return blocks * max(1, min(processors // blocks, pairs))


@registry.register("fp8_product_gelu", "gluon")
def product_gelu(a, b, inverses, bias, exact, scale, amax, dtype) -> tuple[Tensor, Quantized]:
    """See `mlbert.ops.fp8._product_gelu`. What does not fit runs ``fused``."""
    if exact or not a.numel() or not fits(a.shape[1], b.shape[0]):
        other = registry.form("fp8_product_gelu", "fused")
        return other(a, b, inverses, bias, exact, scale, amax, dtype)
    pre = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)
    return pre, _product(a, b, inverses, pre, bias, scale, amax, dtype, None)


@registry.register("fp8_product_gelu_backward", "gluon")
def product_gelu_backward(
    a, b, inverses, fast, pre, bias, exact, scale, amax, dtype, buffer=None
) -> tuple[Quantized, Tensor]:
    """See `mlbert.ops.fp8._product_gelu_backward`. What does not fit runs ``fused``."""
    if exact or not fast or not a.numel() or not fits(a.shape[1], b.shape[0]):
        other = registry.form("fp8_product_gelu_backward", "fused")
        return other(a, b, inverses, fast, pre, bias, exact, scale, amax, dtype, buffer=buffer)
    tiles = CONSUMERS * triton.cdiv(a.shape[0], CONSUMERS * ROWS)
    partial = torch.empty(tiles, b.shape[0], dtype=torch.float32, device=a.device)
    copies = _product(a, b, inverses, pre, bias, scale, amax, dtype, partial)
    return copies, sum_partials(partial, buffer)


def _product(a, b, inverses, pre, bias, scale, amax, dtype, partial) -> Quantized:
    tokens, columns = pre.shape
    assert pre.dtype == torch.bfloat16, f"{pre.dtype} instead of bfloat16 pre-activations"
    copies = buffers_of_product(a, b, pre, dtype)
    programs = num_programs(tokens, columns, multiprocessors(a.device))
    by_rows = [ROWS, COLUMNS]
    gluon_product_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [ROWS, INNER], _FP8),
        TensorDescriptor.from_tensor(b, [COLUMNS, INNER], _FP8),
        TensorDescriptor.from_tensor(pre, by_rows, _BF16),
        TensorDescriptor.from_tensor(copies.rows, by_rows, _FP8),
        TensorDescriptor.from_tensor(copies.columns, [COLUMNS, ROWS], _FP8_TURNED),
        *inverses,
        bias,
        scale,
        amax,
        partial,
        tokens,
        columns,
        columns // COLUMNS,
        a.shape[1] // INNER,
        FORWARD_STAGES if partial is None else BACKWARD_STAGES,
        ROWS,
        COLUMNS,
        INNER,
        num_warps=WARPS,
    )
    return copies


@gluon.jit
def produce(
    a, b, a_ring, b_kept, full, empty, b_full, first_column, first, count, stride,
    STEPS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    INNER: gl.constexpr,
):  # fmt: skip
    """Load the weight, then for each pair of tiles the steps of both, in the consumers' order."""
    mbarrier.expect(b_full, STEPS * COLUMNS * INNER)
    for part in gl.static_range(STEPS):
        tma.async_copy_global_to_shared(b, [first_column, part * INNER], b_full, b_kept.index(part))
    step = 0
    for pair in range(first, count, stride):
        for which in range(PAIR):
            for k in range(STEPS):
                slot = step % STAGES
                # Passes at once the first time: the phase before the first one counts as over.
                mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(slot), ROWS * INNER)
                tma.async_copy_global_to_shared(
                    a,
                    [(PAIR * pair + which) * ROWS, k * INNER],
                    full.index(slot),
                    a_ring.index(slot),
                )
                step += 1


@gluon.jit
def consume(
    WHICH: gl.constexpr, a_ring, b_kept, full, empty, turn, b_full, pre_full, pre_tile, small_tile,
    turned_tile, pre, out_rows, out_columns, inverse_a, inverse_b, bias, scale, amax, partial,
    first_column, first, count, stride, tokens, columns, STEPS: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Multiply every other tile, and store what follows."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    factor = gl.load(inverse_a) * gl.load(inverse_b)
    up = gl.load(scale)
    column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    shift = gl.load(bias + column)[None, :]
    mbarrier.wait(b_full, 0)
    step = WHICH * STEPS
    number = 0  # of tiles before
    for pair in range(first, count, stride):
        tile = PAIR * pair + WHICH
        first_row = tile * ROWS
        if partial is not None:
            # The previous tile has been read. Its memory is now written through another proxy.
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.expect(pre_full.index(WHICH), ROWS * COLUMNS * 2)
            tma.async_copy_global_to_shared(
                pre, [first_row, first_column], pre_full.index(WHICH), pre_tile
            )
        # The first turn is the first consumer's.
        mbarrier.wait(turn.index(WHICH), (number & 1) ^ (1 - WHICH))
        total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        for k in gl.static_range(STEPS):
            slot = (step + k) % STAGES
            mbarrier.wait(full.index(slot), ((step + k) // STAGES) & 1)
            total = warpgroup_mma(
                a_ring.index(slot), b_kept.index(k).permute((1, 0)), total, is_async=True
            )
            if k > 0:
                total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
                mbarrier.arrive(empty.index((step + k - 1) % STAGES), count=1)
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        mbarrier.arrive(empty.index((step + STEPS - 1) % STAGES), count=1)
        mbarrier.arrive(turn.index(1 - WHICH), count=1)
        step += PAIR * STEPS
        value = total * factor
        # What the tile before stored has been read.
        tma.store_wait(pendings=0)
        if partial is None:
            pre_tile.store(value.to(gl.bfloat16))
            value = gelu_parts(value + shift, False)[0]
        else:
            mbarrier.wait(pre_full.index(WHICH), number & 1)
            kept = pre_tile.load(layout).to(gl.float32)
            value *= gelu_parts(kept + shift, False)[1]
        number += 1  # noqa: SIM113  # Gluon has no enumerate
        inside = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout)) < tokens
        # gelu(0 + bias) is not 0, and the transposed copy is padded with 0.
        value = gl.where(inside[:, None], value, 0.0)
        if partial is not None:
            gl.store(partial + tile * columns + column, gl.sum(value, 0))
        small = (value * up).to(small_tile.dtype)
        small_tile.store(small)
        turned_tile.permute((1, 0)).store(small)
        # A maximum does not depend on the order, so the atomic is deterministic.
        gl.atomic_max(amax, gl.max(gl.max(gl.abs(value), 1), 0), sem="relaxed")
        fence_async_shared()
        if partial is None:
            tma.async_copy_shared_to_global(pre, [first_row, first_column], pre_tile)
        tma.async_copy_shared_to_global(out_rows, [first_row, first_column], small_tile)
        tma.async_copy_shared_to_global(out_columns, [first_column, first_row], turned_tile)
    tma.store_wait(pendings=0)


@gluon.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=["inverse_a", "inverse_b", "scale", "amax"],
)
def gluon_product_kernel(
    a, b, pre, out_rows, out_columns, inverse_a, inverse_b, bias, scale, amax, partial, tokens,
    columns, BLOCKS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, INNER: gl.constexpr,
):  # fmt: skip
    """Compute every n-th pair of tiles of a block of columns. Grid: `num_programs`.

    Descriptors: a FP8 [T, D], b FP8 [F, D], pre bfloat16 [T, F], out_rows FP8 [T, F], out_columns
    FP8 [F, U]. bias: [F]; inverses, scale, amax: float32 scalars. Forward, `partial` is None, and
    pre is written. Backward, pre is read, and partial float32 [tiles, F] gets the sums over a
    tile's tokens.
    """
    first_column = (gl.program_id(0) % BLOCKS) * COLUMNS
    first = gl.program_id(0) // BLOCKS
    stride = gl.num_programs(0) // BLOCKS
    count = (tokens + PAIR * ROWS - 1) // (PAIR * ROWS)
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES, ROWS, INNER], a.layout)
    b_kept = gl.allocate_shared_memory(b.dtype, [STEPS, COLUMNS, INNER], b.layout)
    pre_tiles = gl.allocate_shared_memory(pre.dtype, [PAIR, ROWS, COLUMNS], pre.layout)
    small_tiles = gl.allocate_shared_memory(out_rows.dtype, [PAIR, ROWS, COLUMNS], out_rows.layout)
    turned_tiles = gl.allocate_shared_memory(
        out_columns.dtype, [PAIR, COLUMNS, ROWS], out_columns.layout
    )
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    turn = gl.allocate_shared_memory(gl.int64, [PAIR, 1], barriers)
    pre_full = gl.allocate_shared_memory(gl.int64, [PAIR, 1], barriers)
    b_full = gl.allocate_shared_memory(gl.int64, [1], barriers)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    for which in gl.static_range(PAIR):
        mbarrier.init(turn.index(which), count=1)
        mbarrier.init(pre_full.index(which), count=1)
    mbarrier.init(b_full, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                consume,
                (
                    0, a_ring, b_kept, full, empty, turn, b_full, pre_full, pre_tiles.index(0),
                    small_tiles.index(0), turned_tiles.index(0), pre, out_rows, out_columns,
                    inverse_a, inverse_b, bias, scale, amax, partial, first_column, first, count,
                    stride, tokens, columns, STEPS, STAGES, ROWS, COLUMNS,
                ),
            ),
            (
                consume,
                (
                    1, a_ring, b_kept, full, empty, turn, b_full, pre_full, pre_tiles.index(1),
                    small_tiles.index(1), turned_tiles.index(1), pre, out_rows, out_columns,
                    inverse_a, inverse_b, bias, scale, amax, partial, first_column, first, count,
                    stride, tokens, columns, STEPS, STAGES, ROWS, COLUMNS,
                ),
            ),
            (
                produce,
                (
                    a, b, a_ring, b_kept, full, empty, b_full, first_column, first, count, stride,
                    STEPS, STAGES, ROWS, COLUMNS, INNER,
                ),
            ),
        ],
        [4, 1],
        [208, 24],
    )  # fmt: skip
