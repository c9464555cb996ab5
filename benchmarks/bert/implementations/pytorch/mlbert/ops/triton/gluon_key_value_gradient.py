"""The gradients of attention's keys and values in Gluon, for Hopper and heads of 64.

They compute what `attention_key_value_gradient_kernel` of `mlbert.ops.triton.attention_backward`
does, with the partitions and barriers of `mlbert.ops.triton.gluon_attention_forward`. Here a
consumer has 64 keys and values, and blocks of 64 queries stream past it, with the gradients of the
result, saved sums and delta. Scores are computed with keys as rows, so that weights and their
gradients multiply from registers:

    S = K Q^T    dP = V dO^T    dV += P dO    dK += dS Q

Queries past the end are zeros, with sums and delta of 0, so they add nothing. Keys and values have
two places each, so that those of the next pair arrive while these are used. The first block's
barrier covers them: ``cp.async`` arrives after all copies before it.

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
from mlbert.ops.triton.attention_forward import LOG2_E, bits_start, is_seen
from mlbert.ops.triton.attention_pairs import key_blocks, task_of
from mlbert.ops.triton.gluon_attention_forward import (
    COPIERS,
    COPIES,
    FACTORS,
    KEYS,
    PAIR,
    ROWS,
    SCORES,
    STORES,
    TILE,
    WARPS,
    begin_scores,
    copy_rows,
    num_programs,
    pair_at,
    pass_block,
    zero_tail,
)

STAGES = 4
# Registers of a thread of the second consumer and of the producer.
CONSUMER_REGISTERS = gl.constexpr(224)
PRODUCER_REGISTERS = gl.constexpr(56)
# Places of a consumer's keys and values.
PLACES = gl.constexpr(2)
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
VECTOR_COPIES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
# Of the scores, rows as [16s of keys, 4s of 16, pairs of 4, one of two] and columns as [16s of
# queries, half of 16, g].
PARTS = gl.constexpr(
    gl.DistributedLinearLayout(
        [
            [0, 0, 0, 0, 0, 0, 1],
            [0, 2, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 1, 0],
            [0, 0, 0, 0, 1, 0, 0],
            [0, 0, 0, 0, 2, 0, 0],
        ],
        [
            [0, 0, 0, 0, 0, 0, 2],
            [0, 0, 0, 0, 0, 0, 4],
            [0, 0, 0, 1, 0, 0, 0],
            [0, 0, 1, 0, 0, 0, 0],
            [0, 1, 0, 0, 0, 0, 0],
        ],
        [[1, 0, 0, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0, 0]],
        [],
        [4, 4, 2, 2, 4, 2, 8],
    )
)
# Numbers with the saved bits, as [4s of 16 keys, 16s of queries, g].
_THREE = gl.SliceLayout(3, gl.SliceLayout(5, PARTS.value))
NUMBERS = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(2, _THREE)))
# What numbers a bit: 16s of keys, pairs of 4, one of two, half of 16 queries.
BIT_PLACES = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(4, gl.SliceLayout(6, PARTS.value))))


def launch_key_value_gradient(settings, saved, gradients) -> None:
    """See `mlbert.ops.triton.attention.launch_key_value_gradient`."""
    num_tokens, _, num_heads, head_size = saved.qkv.shape
    gluon_key_value_gradient_kernel[(num_programs(saved.pairs, num_heads),)](
        saved.qkv,
        saved.cu_seqlens,
        saved.pairs,
        saved.bits,
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
def copy_vector(vector, base, row, length):
    """Begin to copy numbers at `base`; zeros from row `length` on."""
    async_copy.async_copy_global_to_shared(vector, base + row, mask=row < length)


@gluon.jit
def produce(
    qkv, pairs, d_out, log_sums, delta, kv_tiles, q_ring, o_ring, sums_ring, delta_ring, full,
    empty, kv_empty, tasks, num_tokens, NUM_HEADS: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, HEAD_SIZE: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values of each pair, then the blocks of queries that see them."""
    WIDTH: gl.constexpr = NUM_HEADS * HEAD_SIZE
    STRIDE: gl.constexpr = 3 * WIDTH
    row = gl.arange(0, ROWS, gl.SliceLayout(1, COPIES))
    number_row = gl.arange(0, ROWS, VECTOR_COPIES)
    programs = gl.num_programs(0)
    step = 0
    number = 0  # of pairs before
    for turn in range(0, (tasks + programs - 1) // programs):
        task = task_of(turn, gl.program_id(0), programs)
        if task < tasks:
            head, _, start, length, first = pair_at(pairs, task, NUM_HEADS)
            base = qkv + start * STRIDE + head * HEAD_SIZE
            d_base = d_out + start * WIDTH + head * HEAD_SIZE
            statistic = head.to(gl.int64) * num_tokens + start
            for which in gl.static_range(PAIR):
                place = number % PLACES * PAIR + which
                # Passes at once the first time: the phase before the first one counts as over.
                mbarrier.wait(kv_empty.index(place), ((number // PLACES) & 1) ^ 1)
                own = first + which * ROWS + row
                key_tile = kv_tiles.index(2 * place)
                value_tile = kv_tiles.index(2 * place + 1)
                copy_rows(key_tile, base + WIDTH, own, length, STRIDE, HEAD_SIZE)
                copy_rows(value_tile, base + 2 * WIDTH, own, length, STRIDE, HEAD_SIZE)
            number += 1
            block, blocks = key_blocks(first, length, WINDOW, PAIR * ROWS, KEYS)
            for k in range(0, blocks):
                slot = step % STAGES
                first_q = (block + blocks - 1 - k) * KEYS
                mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
                copy_rows(q_ring.index(slot), base, first_q + row, length, STRIDE, HEAD_SIZE)
                copy_rows(o_ring.index(slot), d_base, first_q + row, length, WIDTH, HEAD_SIZE)
                numbers = first_q + number_row
                copy_vector(sums_ring.index(slot), log_sums + statistic, numbers, length)
                copy_vector(delta_ring.index(slot), delta + statistic, numbers, length)
                async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
                step += 1


@gluon.jit
def numbers_of(bits, first_q, first_k, key, length, bits_blocks):
    """Return the saved bits of a block, 16 numbers a thread; unused without dropout."""
    numbers = key
    if bits is not None:
        without_four: gl.constexpr = gl.SliceLayout(0, NUMBERS)
        four = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, NUMBERS)))
        sixteen = gl.arange(0, 4, gl.SliceLayout(1, without_four))
        g = gl.arange(0, 8, gl.SliceLayout(0, without_four))
        row = first_q // 2 + 8 * sixteen[:, None] + g[None, :]
        exists = (row // 8 * 16 < length)[None, :, :]
        at = bits + row[None, :, :] * (4 * bits_blocks)
        at += (first_k // 64 * 4 + four)[:, None, None]
        numbers = gl.load(at, mask=exists, other=0)
    return numbers


@gluon.jit
def kept_of(numbers, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """Return which weights the bits of `numbers_of` keep, bool [64 keys, 64 queries]."""
    first_three: gl.constexpr = gl.SliceLayout(3, BIT_PLACES)
    first_two: gl.constexpr = gl.SliceLayout(2, first_three)
    sixteen = gl.arange(0, 4, gl.SliceLayout(1, first_two))
    two = gl.arange(0, 2, gl.SliceLayout(0, first_two))
    one = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, first_three)))
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, BIT_PLACES))))
    place = 2 * sixteen[:, None, None, None] + two[None, :, None, None]
    place = place + 8 * one[None, None, :, None] + 16 * half[None, None, None, :]
    bits = (1 << place)[:, None, :, :, None, :, None]
    kept = (numbers[None, :, None, None, :, None, :] & bits) != 0
    return gl.convert_layout(gl.reshape(kept, [ROWS, KEYS]), SCORES, assert_trivial=True)


@gluon.jit
def weights_and_gradients(
    scores, d_weights, numbers, log_sum, delta, key, query, length, FACTOR: gl.constexpr,
    DROPS: gl.constexpr, WINDOW: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Return kept weights, before the dropout scale, and the gradient of scaled scores over that
    scale: float32 [64 keys, 64 queries].
    """
    weights = gl.exp2(scores * FACTOR - log_sum[None, :])
    if WINDOW is not None:
        # Weights of hidden keys may be infinite before.
        weights = gl.where(is_seen(key, query, length, WINDOW), weights, 0.0)
    kept = weights
    if DROPS:
        kept = gl.where(kept_of(numbers, ROWS, KEYS), weights, 0.0)
        # Both products are rounded before they may cancel, which is negligible in 16 bits.
        d_scores = kept * d_weights - weights * delta[None, :]
    else:
        d_scores = weights * (d_weights - delta[None, :])
    return kept, d_scores


@gluon.jit
def key_value_gradient_half(
    k, v, bits, q_ring, o_ring, sums_ring, delta_ring, full, empty, turns, step, first, block,
    blocks, length, bits_blocks, WHICH: gl.constexpr, FACTOR: gl.constexpr, DROPS: gl.constexpr,
    WINDOW: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
):  # fmt: skip
    """Return the unscaled gradients of keys and values, from at least one block of queries, the
    last one first.
    """
    key = first + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    query = gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    first_q = (block + blocks - 1) * KEYS
    slot = step % STAGES
    numbers = numbers_of(bits, first_q, first, key, length, bits_blocks)
    scores = begin_scores(k, q_ring, full, turns, step, WHICH, STAGES, ROWS, KEYS)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    gradients = o_ring.index(slot).permute((1, 0))
    d_weights = warpgroup_mma(v, gradients, zeros, use_acc=False, is_async=True)
    mbarrier.arrive(turns.index(1 - WHICH), count=1)
    log_sum = sums_ring.index(slot).load(gl.SliceLayout(0, SCORES))
    delta = delta_ring.index(slot).load(gl.SliceLayout(0, SCORES))
    scores, d_weights = warpgroup_mma_wait(num_outstanding=0, deps=(scores, d_weights))
    kept, d_scores = weights_and_gradients(
        scores, d_weights, numbers, log_sum, delta, key, first_q + query, length, FACTOR, DROPS,
        WINDOW, ROWS, KEYS,
    )  # fmt: skip
    kept = kept.to(k.dtype)
    d_scores = d_scores.to(k.dtype)
    d_k = gl.zeros([ROWS, HEAD_SIZE], gl.float32, SCORES)
    d_v = gl.zeros([ROWS, HEAD_SIZE], gl.float32, SCORES)
    for _ in range(1, blocks):
        first_q -= KEYS
        previous = step % STAGES
        step += 1
        slot = step % STAGES
        numbers = numbers_of(bits, first_q, first, key, length, bits_blocks)
        scores = begin_scores(k, q_ring, full, turns, step, WHICH, STAGES, ROWS, KEYS)
        zeros = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        gradients = o_ring.index(slot).permute((1, 0))
        d_weights = warpgroup_mma(v, gradients, zeros, use_acc=False, is_async=True)
        kept = gl.convert_layout(kept, FACTORS)
        d_v = warpgroup_mma(kept, o_ring.index(previous), d_v, is_async=True)
        d_scores = gl.convert_layout(d_scores, FACTORS)
        d_k = warpgroup_mma(d_scores, q_ring.index(previous), d_k, is_async=True)
        mbarrier.arrive(turns.index(1 - WHICH), count=1)
        log_sum = sums_ring.index(slot).load(gl.SliceLayout(0, SCORES))
        delta = delta_ring.index(slot).load(gl.SliceLayout(0, SCORES))
        scores, d_weights = warpgroup_mma_wait(num_outstanding=2, deps=(scores, d_weights))
        kept, d_scores = weights_and_gradients(
            scores, d_weights, numbers, log_sum, delta, key, first_q + query, length, FACTOR, DROPS,
            WINDOW, ROWS, KEYS,
        )  # fmt: skip
        kept = kept.to(k.dtype)
        d_scores = d_scores.to(k.dtype)
        # Passes at once; see `gluon_attention_forward.attend_half`.
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        d_k, d_v = warpgroup_mma_wait(num_outstanding=0, deps=(d_k, d_v))
        mbarrier.arrive(empty.index(previous), count=1)
    kept = gl.convert_layout(kept, FACTORS)
    d_v = warpgroup_mma(kept, o_ring.index(slot), d_v, is_async=True)
    d_scores = gl.convert_layout(d_scores, FACTORS)
    d_k = warpgroup_mma(d_scores, q_ring.index(slot), d_k, is_async=True)
    d_k, d_v = warpgroup_mma_wait(num_outstanding=0, deps=(d_k, d_v))
    mbarrier.arrive(empty.index(slot), count=1)
    return d_k, d_v


@gluon.jit
def store_rows(
    base, values, first, length, STRIDE: gl.constexpr, ROWS: gl.constexpr, HEAD_SIZE: gl.constexpr
):
    """Store rows up to `length` of values [64, 64], rounded."""
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, STORES))
    column = gl.arange(0, HEAD_SIZE, gl.SliceLayout(0, STORES))
    stored = gl.convert_layout(values.to(base.dtype.element_ty), STORES)
    at = base + row[:, None] * STRIDE + column[None, :]
    gl.store(at, stored, mask=(row < length)[:, None])


@gluon.jit
def consume(
    WHICH: gl.constexpr, pairs, bits, d_qkv, kv_tiles, q_ring, o_ring, sums_ring, delta_ring, full,
    empty, kv_empty, turns, tasks, num_tokens, num_sequences, bits_blocks,
    NUM_HEADS: gl.constexpr, SCALE: gl.constexpr, THRESHOLD: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, HEAD_SIZE: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of one half of each pair."""
    WIDTH: gl.constexpr = NUM_HEADS * HEAD_SIZE
    KEPT: gl.constexpr = 256.0 / (256 - THRESHOLD)
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
            place = number % PLACES * PAIR + WHICH
            number += 1
            if own_blocks > 0:
                own_bits = bits
                if bits is not None:
                    own_bits += bits_start(
                        head, start, sequence, num_tokens, num_sequences, bits_blocks
                    )
                d_k, d_v = key_value_gradient_half(
                    kv_tiles.index(2 * place), kv_tiles.index(2 * place + 1), own_bits, q_ring,
                    o_ring, sums_ring, delta_ring, full, empty, turns, step, first, own_block,
                    own_blocks, length, bits_blocks, WHICH, SCALE * LOG2_E, THRESHOLD > 0, WINDOW,
                    STAGES, ROWS, KEYS, HEAD_SIZE,
                )  # fmt: skip
                step += own_blocks
                base = d_qkv + start * (3 * WIDTH) + head * HEAD_SIZE
                d_k *= SCALE * KEPT
                d_v *= KEPT
                store_rows(base + WIDTH, d_k, first, length, 3 * WIDTH, ROWS, HEAD_SIZE)
                store_rows(base + 2 * WIDTH, d_v, first, length, 3 * WIDTH, ROWS, HEAD_SIZE)
            mbarrier.arrive(kv_empty.index(place), count=1)
            for _ in range(0, after):
                pass_block(full, empty, turns, step, WHICH, STAGES)
                step += 1


@gluon.jit(do_not_specialize=["num_tokens", "num_sequences", "bits_blocks"])
def gluon_key_value_gradient_kernel(
    qkv, cu_seqlens, pairs, bits, d_out, log_sums, delta, d_qkv, num_tokens, num_sequences,
    bits_blocks, NUM_HEADS: gl.constexpr, SCALE: gl.constexpr, THRESHOLD: gl.constexpr,
    WINDOW: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
):  # fmt: skip
    """Compute d_qkv[:, 1] and d_qkv[:, 2] of every n-th task: a head and a pair. Grid: as forward.

    pairs: `attention_pairs.pairs_of`. The others are those of
    `attention_key_value_gradient_kernel`.
    """
    tasks = gl.load(pairs) * NUM_HEADS
    dtype: gl.constexpr = qkv.dtype.element_ty
    kv_tiles = gl.allocate_shared_memory(dtype, [2 * PLACES * PAIR, ROWS, HEAD_SIZE], TILE)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_SIZE], TILE)
    o_ring = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_SIZE], TILE)
    sums_ring = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], VECTOR)
    delta_ring = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], VECTOR)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    kv_empty = gl.allocate_shared_memory(gl.int64, [PLACES * PAIR, 1], barriers)
    turns = gl.allocate_shared_memory(gl.int64, [PAIR, 1], barriers)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=COPIERS)
        mbarrier.init(empty.index(slot), count=PAIR)
    for place in gl.static_range(PLACES * PAIR):
        mbarrier.init(kv_empty.index(place), count=1)
    for which in gl.static_range(PAIR):
        mbarrier.init(turns.index(which), count=1)
    fence_async_shared()
    WIDTH: gl.constexpr = NUM_HEADS * HEAD_SIZE
    for part in gl.static_range(1, 3):
        zero_tail(
            d_qkv + part * WIDTH, cu_seqlens, num_tokens, num_sequences, NUM_HEADS, 3, ROWS,
            HEAD_SIZE,
        )  # fmt: skip
    gl.warp_specialize(
        [
            (
                consume,
                (
                    0, pairs, bits, d_qkv, kv_tiles, q_ring, o_ring, sums_ring, delta_ring, full,
                    empty, kv_empty, turns, tasks, num_tokens, num_sequences, bits_blocks,
                    NUM_HEADS, SCALE, THRESHOLD, WINDOW, STAGES, ROWS, KEYS, HEAD_SIZE,
                ),
            ),
            (
                consume,
                (
                    1, pairs, bits, d_qkv, kv_tiles, q_ring, o_ring, sums_ring, delta_ring, full,
                    empty, kv_empty, turns, tasks, num_tokens, num_sequences, bits_blocks,
                    NUM_HEADS, SCALE, THRESHOLD, WINDOW, STAGES, ROWS, KEYS, HEAD_SIZE,
                ),
            ),
            (
                produce,
                (
                    qkv, pairs, d_out, log_sums, delta, kv_tiles, q_ring, o_ring, sums_ring,
                    delta_ring, full, empty, kv_empty, tasks, num_tokens, NUM_HEADS,
                    WINDOW, STAGES, ROWS, KEYS, HEAD_SIZE,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
