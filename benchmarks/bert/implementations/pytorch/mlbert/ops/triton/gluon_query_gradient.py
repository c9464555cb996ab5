"""The gradient of attention's queries in Gluon, for Hopper and heads of 64.

It computes what `attention_query_gradient_kernel` of `mlbert.ops.triton.attention_backward` does,
with the partitions, barriers and order of work of `mlbert.ops.triton.gluon_attention_forward`. A
consumer requests the scores and the gradients of the weights of the next block of keys before it
multiplies the gradients of this block's scores by its keys.

Legend: S sequences, T tokens, N heads, H head size, L tokens of one sequence.
"""

from __future__ import annotations

# mypy: disallow-untyped-defs=False
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlbert.ops.triton.attention import blocks_of_bits
from mlbert.ops.triton.attention_forward import LOG2_E, bits_start, is_seen, number_at
from mlbert.ops.triton.attention_pairs import key_blocks, task_of
from mlbert.ops.triton.gluon_attention_forward import (
    BITS,
    CONSUMER_REGISTERS,
    COPIERS,
    COPIES,
    FACTORS,
    KEYS,
    PAIR,
    PRODUCER_REGISTERS,
    ROWS,
    SCORES,
    STAGES,
    STORES,
    TILE,
    WARPS,
    begin_scores,
    copy_blocks,
    copy_rows,
    num_programs,
    pair_at,
    pass_block,
    zero_tail,
)
from mlbert.ops.triton.mask import key_of

# Of a consumer: queries, gradients of the result, the result.
TILES = gl.constexpr(3)
# As the scores, with rows [16s, half of 16, g] and columns [16s, half of 16, l, one of two].
PARTS = gl.constexpr(
    gl.DistributedLinearLayout(
        [
            [0, 0, 0, 0, 0, 0, 1],
            [0, 1, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 1, 0, 0],
            [0, 0, 0, 1, 0, 0, 0],
            [0, 0, 0, 2, 0, 0, 0],
        ],
        [
            [0, 0, 0, 0, 0, 1, 0],
            [0, 0, 0, 0, 0, 2, 0],
            [0, 0, 1, 0, 0, 0, 0],
            [0, 0, 2, 0, 0, 0, 0],
            [0, 0, 4, 0, 0, 0, 0],
        ],
        [[1, 0, 0, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0, 0]],
        [],
        [4, 2, 8, 4, 2, 4, 2],
    )
)
_ROWS_AND_L = gl.SliceLayout(4, gl.SliceLayout(6, PARTS.value))
NUMBERS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(3, _ROWS_AND_L)))
# What numbers a bit of a thread: half of the row's 16, 16s and half of the column's, one of two.
BIT_PLACES = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(5, PARTS.value))))


def launch_query_gradient(settings, saved, out, gradients) -> None:
    """See `mlbert.ops.triton.attention.launch_query_gradient`."""
    num_tokens, _, num_heads, head_size = saved.qkv.shape
    gluon_query_gradient_kernel[(num_programs(saved.pairs, num_heads),)](
        saved.qkv,
        saved.cu_seqlens,
        saved.pairs,
        saved.bits,
        out,
        gradients["d_out"],
        gradients["log_sums"],
        gradients["delta"],
        gradients["d_qkv"],
        num_tokens,
        saved.order.numel(),
        blocks_of_bits(settings),
        num_heads,
        head_size**-0.5,
        settings.threshold,
        settings.window,
        STAGES,
        ROWS,
        KEYS,
        head_size,
        num_warps=WARPS,
    )


@gluon.jit
def produce(
    qkv, pairs, out, d_out, tiles, k_ring, v_ring, full, empty, q_full, q_empty, tasks,
    NUM_HEADS: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr, HEAD_SIZE: gl.constexpr,
):  # fmt: skip
    """Copy what belongs to the queries of each pair, then its blocks of keys and values."""
    WIDTH: gl.constexpr = NUM_HEADS * HEAD_SIZE
    row = gl.arange(0, ROWS, gl.SliceLayout(1, COPIES))
    programs = gl.num_programs(0)
    step = 0
    number = 0  # of pairs before
    for turn in range(0, (tasks + programs - 1) // programs):
        task = task_of(turn, gl.program_id(0), programs)
        if task < tasks:
            head, _, start, length, first = pair_at(pairs, task, NUM_HEADS)
            base = qkv + start * (3 * WIDTH) + head * HEAD_SIZE
            place = start * WIDTH + head * HEAD_SIZE
            for which in gl.static_range(PAIR):
                mbarrier.wait(q_empty.index(which), (number & 1) ^ 1)
                own = first + which * ROWS + row
                tile = TILES * which
                copy_rows(tiles.index(tile), base, own, length, 3 * WIDTH, HEAD_SIZE)
                copy_rows(tiles.index(tile + 1), d_out + place, own, length, WIDTH, HEAD_SIZE)
                copy_rows(tiles.index(tile + 2), out + place, own, length, WIDTH, HEAD_SIZE)
                async_copy.mbarrier_arrive(q_full.index(which), increment_count=False)
            number += 1
            step = copy_blocks(
                base, k_ring, v_ring, full, empty, step, first, length, WIDTH, WINDOW, STAGES, ROWS,
                KEYS, HEAD_SIZE,
            )  # fmt: skip


@gluon.jit
def numbers_of(bits, first_q, first_k, row, length, bits_blocks, ROWS: gl.constexpr):
    """Return the saved bits of a block, one number a thread; unused without dropout."""
    numbers = row
    if bits is not None:
        number_row = first_q // 2 + gl.arange(0, ROWS // 2, gl.SliceLayout(1, BITS))
        column = first_k // 64 * 4 + gl.arange(0, 4, gl.SliceLayout(0, BITS))
        at, exists = number_at(bits, number_row, column, length, bits_blocks)
        numbers = gl.load(at, mask=exists, other=0)
    return numbers


@gluon.jit
def kept_of(numbers, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """Return which weights the bits of `numbers_of` keep, bool [64, 64]."""
    half_of_row = gl.arange(
        0, 2, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, BIT_PLACES)))
    )
    sixteen = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, BIT_PLACES))))
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, BIT_PLACES))))
    one = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, BIT_PLACES))))
    place = 16 * half_of_row[:, None, None, None] + 2 * sixteen[None, :, None, None]
    place += half[None, None, :, None] + 8 * one[None, None, None, :]
    numbers = gl.reshape(numbers, [ROWS // 16, 8, 4])
    numbers = gl.convert_layout(numbers, NUMBERS, assert_trivial=True)
    bits = (1 << place)[None, :, None, :, :, None, :]
    kept = (numbers[:, None, :, None, None, :, None] & bits) != 0
    return gl.convert_layout(gl.reshape(kept, [ROWS, KEYS]), SCORES, assert_trivial=True)


@gluon.jit
def gradient_of_scores(
    scores, d_weights, numbers, log_sum, delta, row, key, length, FACTOR: gl.constexpr,
    DROPS: gl.constexpr, WINDOW: gl.constexpr, PARTIAL: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr,
):  # fmt: skip
    """Return the gradient of scaled scores over that scale, in float32."""
    weights = gl.exp2(scores * FACTOR - log_sum[:, None])
    if WINDOW is not None:
        # Weights of hidden keys may be infinite before.
        weights = gl.where(is_seen(row, key, length, WINDOW), weights, 0.0)
    if DROPS:
        # Both products are rounded before they may cancel, which is negligible in 16 bits.
        kept = gl.where(kept_of(numbers, ROWS, KEYS), weights, 0.0)
        d_scores = kept * d_weights - weights * delta[:, None]
    else:
        d_scores = weights * (d_weights - delta[:, None])
    if PARTIAL and WINDOW is None:
        # Weights of keys past the end may be infinite, and infinity times their zero rows NaN.
        d_scores = gl.where((key < length)[None, :], d_scores, 0.0)
    return d_scores


@gluon.jit
def query_gradient_half(
    q, d_o, log_sum, delta, bits, k_ring, v_ring, full, empty, turns, step, first, block, blocks,
    length, bits_blocks, WHICH: gl.constexpr, FACTOR: gl.constexpr, DROPS: gl.constexpr,
    WINDOW: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
):  # fmt: skip
    """Return the unscaled gradient of queries, from at least one block of keys, the last first."""
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    key = key_of(gl.arange(0, KEYS, gl.SliceLayout(0, SCORES)))
    first_k = (block + blocks - 1) * KEYS
    numbers = numbers_of(bits, first, first_k, row, length, bits_blocks, ROWS)
    scores = begin_scores(q, k_ring, full, turns, step, WHICH, STAGES, ROWS, KEYS)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    values = v_ring.index(step % STAGES).permute((1, 0))
    d_weights = warpgroup_mma(d_o, values, zeros, use_acc=False, is_async=True)
    mbarrier.arrive(turns.index(1 - WHICH), count=1)
    scores, d_weights = warpgroup_mma_wait(num_outstanding=0, deps=(scores, d_weights))
    d_scores = gradient_of_scores(
        scores, d_weights, numbers, log_sum, delta, row, first_k + key, length, FACTOR, DROPS,
        WINDOW, True, ROWS, KEYS,
    ).to(q.dtype)  # fmt: skip
    d_q = gl.zeros([ROWS, HEAD_SIZE], gl.float32, SCORES)
    for _ in range(1, blocks):
        first_k -= KEYS
        previous = step % STAGES
        step += 1
        numbers = numbers_of(bits, first, first_k, row, length, bits_blocks, ROWS)
        scores = begin_scores(q, k_ring, full, turns, step, WHICH, STAGES, ROWS, KEYS)
        zeros = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        values = v_ring.index(step % STAGES).permute((1, 0))
        d_weights = warpgroup_mma(d_o, values, zeros, use_acc=False, is_async=True)
        d_scores = gl.convert_layout(d_scores, FACTORS)
        d_q = warpgroup_mma(d_scores, k_ring.index(previous), d_q, is_async=True)
        mbarrier.arrive(turns.index(1 - WHICH), count=1)
        scores, d_weights = warpgroup_mma_wait(num_outstanding=1, deps=(scores, d_weights))
        d_scores = gradient_of_scores(
            scores, d_weights, numbers, log_sum, delta, row, first_k + key, length, FACTOR, DROPS,
            WINDOW, False, ROWS, KEYS,
        ).to(q.dtype)  # fmt: skip
        # Passes at once; see `gluon_attention_forward.attend_half`.
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
        d_q = warpgroup_mma_wait(num_outstanding=0, deps=(d_q,))
        mbarrier.arrive(empty.index(previous), count=1)
    slot = step % STAGES
    d_scores = gl.convert_layout(d_scores, FACTORS)
    d_q = warpgroup_mma(d_scores, k_ring.index(slot), d_q, is_async=True)
    d_q = warpgroup_mma_wait(num_outstanding=0, deps=(d_q,))
    mbarrier.arrive(empty.index(slot), count=1)
    return d_q


@gluon.jit
def consume(
    WHICH: gl.constexpr, pairs, bits, log_sums, delta, d_qkv, tiles, k_ring, v_ring, full, empty,
    q_full, q_empty, turns, tasks, num_tokens, num_sequences, bits_blocks, NUM_HEADS: gl.constexpr,
    SCALE: gl.constexpr, THRESHOLD: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, HEAD_SIZE: gl.constexpr,
):  # fmt: skip
    """Compute the gradient of one half of each pair."""
    WIDTH: gl.constexpr = NUM_HEADS * HEAD_SIZE
    KEPT: gl.constexpr = (256 - THRESHOLD) / 256.0
    row = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    stored_row = gl.arange(0, ROWS, gl.SliceLayout(1, STORES))
    column = gl.arange(0, HEAD_SIZE, gl.SliceLayout(0, STORES))
    programs = gl.num_programs(0)
    step = 0
    number = 0  # of pairs before
    for turn in range(0, (tasks + programs - 1) // programs):
        task = task_of(turn, gl.program_id(0), programs)
        if task < tasks:
            head, sequence, start, length, first = pair_at(pairs, task, NUM_HEADS)
            block, blocks = key_blocks(first, length, WINDOW, PAIR * ROWS, KEYS)
            first += WHICH * ROWS
            own_block, own_blocks = key_blocks(first, length, WINDOW, ROWS, KEYS)
            after = gl.where(own_blocks > 0, own_block - block, 0)
            for _ in range(0, blocks - own_blocks - after):
                pass_block(full, empty, turns, step, WHICH, STAGES)
                step += 1
            # int64: N T may exceed 2^31.
            statistic = head.to(gl.int64) * num_tokens + start + first + row
            exists = first + row < length
            # exp2(score - inf) = 0: queries past the end have zero weight.
            log_sum = gl.load(log_sums + statistic, mask=exists, other=float("inf"))
            mbarrier.wait(q_full.index(WHICH), number & 1)
            number += 1
            q = tiles.index(TILES * WHICH).load(FACTORS)
            d_o = tiles.index(TILES * WHICH + 1).load(FACTORS)
            o = tiles.index(TILES * WHICH + 2).load(FACTORS)
            mbarrier.arrive(q_empty.index(WHICH), count=1)
            if own_blocks > 0:
                own_delta = gl.sum(d_o.to(gl.float32) * o.to(gl.float32), 1) * KEPT
                own_delta = gl.convert_layout(own_delta, gl.SliceLayout(1, SCORES))
                gl.store(delta + statistic, own_delta, mask=exists)
                own_bits = bits
                if bits is not None:
                    own_bits += bits_start(
                        head, start, sequence, num_tokens, num_sequences, bits_blocks
                    )
                d_q = query_gradient_half(
                    q, d_o, log_sum, own_delta, own_bits, k_ring, v_ring, full, empty, turns, step,
                    first, own_block, own_blocks, length, bits_blocks, WHICH, SCALE * LOG2_E,
                    THRESHOLD > 0, WINDOW, STAGES, ROWS, KEYS, HEAD_SIZE,
                )  # fmt: skip
                step += own_blocks
                d_q *= SCALE / KEPT
                stored = gl.convert_layout(d_q.to(d_qkv.dtype.element_ty), STORES)
                at = d_qkv + start * (3 * WIDTH) + head * HEAD_SIZE
                at += (first + stored_row)[:, None] * (3 * WIDTH) + column[None, :]
                gl.store(at, stored, mask=(first + stored_row < length)[:, None])
            for _ in range(0, after):
                pass_block(full, empty, turns, step, WHICH, STAGES)
                step += 1


@gluon.jit(do_not_specialize=["num_tokens", "num_sequences", "bits_blocks"])
def gluon_query_gradient_kernel(
    qkv, cu_seqlens, pairs, bits, out, d_out, log_sums, delta, d_qkv, num_tokens, num_sequences,
    bits_blocks, NUM_HEADS: gl.constexpr, SCALE: gl.constexpr, THRESHOLD: gl.constexpr,
    WINDOW: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
):  # fmt: skip
    """Compute d_qkv[:, 0] and delta of every n-th task: a head and a pair. Grid: as forward.

    pairs: `attention_pairs.pairs_of`. The others are those of `attention_query_gradient_kernel`.
    """
    tasks = gl.load(pairs) * NUM_HEADS
    tiles = gl.allocate_shared_memory(qkv.dtype.element_ty, [PAIR * TILES, ROWS, HEAD_SIZE], TILE)
    k_ring = gl.allocate_shared_memory(qkv.dtype.element_ty, [STAGES, KEYS, HEAD_SIZE], TILE)
    v_ring = gl.allocate_shared_memory(qkv.dtype.element_ty, [STAGES, KEYS, HEAD_SIZE], TILE)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    q_full = gl.allocate_shared_memory(gl.int64, [PAIR, 1], barriers)
    q_empty = gl.allocate_shared_memory(gl.int64, [PAIR, 1], barriers)
    turns = gl.allocate_shared_memory(gl.int64, [PAIR, 1], barriers)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=COPIERS)
        mbarrier.init(empty.index(slot), count=PAIR)
    for which in gl.static_range(PAIR):
        mbarrier.init(q_full.index(which), count=COPIERS)
        mbarrier.init(q_empty.index(which), count=1)
        mbarrier.init(turns.index(which), count=1)
    fence_async_shared()
    zero_tail(d_qkv, cu_seqlens, num_tokens, num_sequences, NUM_HEADS, 3, ROWS, HEAD_SIZE)
    gl.warp_specialize(
        [
            (
                consume,
                (
                    0, pairs, bits, log_sums, delta, d_qkv, tiles, k_ring, v_ring, full, empty,
                    q_full, q_empty, turns, tasks, num_tokens, num_sequences, bits_blocks,
                    NUM_HEADS, SCALE, THRESHOLD, WINDOW, STAGES, ROWS, KEYS, HEAD_SIZE,
                ),
            ),
            (
                consume,
                (
                    1, pairs, bits, log_sums, delta, d_qkv, tiles, k_ring, v_ring, full, empty,
                    q_full, q_empty, turns, tasks, num_tokens, num_sequences, bits_blocks,
                    NUM_HEADS, SCALE, THRESHOLD, WINDOW, STAGES, ROWS, KEYS, HEAD_SIZE,
                ),
            ),
            (
                produce,
                (
                    qkv, pairs, out, d_out, tiles, k_ring, v_ring, full, empty, q_full, q_empty,
                    tasks, NUM_HEADS, WINDOW, STAGES, ROWS, KEYS, HEAD_SIZE,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
