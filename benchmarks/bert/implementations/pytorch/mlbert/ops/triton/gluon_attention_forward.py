"""Attention's forward pass in Gluon, for Hopper and heads of 64.

It computes what `mlbert.ops.triton.attention_forward` does, with the same dropout mask, saved bits
and sums. A program there waits for its keys and for each product.
Here a program is started once for each multiprocessor and works on many pairs of 64 queries:

    producer, one warp        copies queries, and blocks of 64 keys and values into a ring
    two consumers, four       attend to one half of a pair each. The products of one of them run
    warps each                while the other computes exponentials and masks

A consumer also requests the scores of the next block before it multiplies the weights of this one
by the values. Only the first block that it looks at, the last one of a sequence, is masked where
the sequence ends; with a window, all are.

TMA cannot bring the keys in the order that the dropout mask needs (`mask.key_places`), nor put
zeros behind the end of a sequence, so the producer uses ``cp.async``.

Barriers (PTX ISA, "mbarrier"; a wait only knows whether a phase is odd, so no partition may wait
for a phase that is two away):

    full[s], empty[s]       slot s of the ring has data; both consumers have finished with it
    q_full[c], q_empty[c]   consumer c's queries are there; it has them in registers
    turn[c]                 consumer c may start its products; only for speed

Legend: S sequences, T tokens, N heads, H head size, L tokens of one sequence.
"""

from __future__ import annotations

# mypy: disallow-untyped-defs=False
from torch import Tensor
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
from mlbert.ops.triton.attention_forward import (
    HIDDEN,
    LOG2_E,
    bits_start,
    hashes_of,
    is_seen,
    number_at,
)
from mlbert.ops.triton.attention_pairs import FIELDS, key_blocks, task_of
from mlbert.ops.triton.device import multiprocessors
from mlbert.ops.triton.mask import (
    CHOSEN_BYTES,
    copied_signs,
    half_of_bits,
    key_argument,
    key_of,
    select_pairs,
    signs_of,
)

# Queries of a consumer, and keys of a block.
ROWS = 64
KEYS = 64
HEAD_SIZE = 64
# Blocks in the ring.
STAGES = 5
WARPS = 4
# Registers of a thread of the second consumer and of the producer; the first consumer gets the
# rest of 504.
CONSUMER_REGISTERS = gl.constexpr(208)
PRODUCER_REGISTERS = gl.constexpr(88)
NUM_FIELDS = gl.constexpr(FIELDS)
COPIERS = gl.constexpr(32)  # threads of the producer
CONSUMERS = 2
PAIR = gl.constexpr(CONSUMERS)
TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# Of scores [64, 64], a thread has rows g and g + 8 of 16, and columns 2 l, 2 l + 1 of 8.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
# What multiplies from registers.
FACTORS = gl.constexpr(gl.DotOperandLayout(0, SCORES.value, 2))
# As the scores, with the columns as [16s, half of 16, l, one of two].
PARTS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [8, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0]],
        [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]],
        [[16, 0, 0, 0, 0], [32, 0, 0, 0, 0]],
        [],
        [64, 4, 2, 4, 2],
    )
)
MASKS = gl.constexpr(gl.SliceLayout(4, PARTS.value))
SIGNS = gl.constexpr(gl.SliceLayout(2, MASKS.value))
BIT_PLACES = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(3, MASKS.value)))
SUMS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, MASKS.value)))
# One number of 32 bits for each thread.
BITS = gl.constexpr(
    gl.DistributedLinearLayout(
        [], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 4]
    )
)
COPIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))
STORES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


def num_programs(pairs: Tensor, num_heads: int) -> int:
    """Return how many programs to start: one for each multiprocessor, or for each task if less."""
    most = num_heads * (pairs.shape[0] - 1)
    return max(1, min(multiprocessors(pairs.device), most))


def launch_forward(settings, saved, rows, key, out, log_sums) -> None:
    """See `mlbert.ops.triton.attention.launch_forward`."""
    num_tokens, _, num_heads, head_size = saved.qkv.shape
    gluon_attention_kernel[(num_programs(saved.pairs, num_heads),)](
        saved.qkv,
        saved.cu_seqlens,
        saved.pairs,
        rows,
        key_argument(key),
        out,
        log_sums,
        saved.bits,
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
def copy_rows(tile, base, row, length, STRIDE: gl.constexpr, HEAD_SIZE: gl.constexpr):
    """Begin to copy rows at `base`; zeros from row `length` on."""
    column = gl.arange(0, HEAD_SIZE, gl.SliceLayout(0, COPIES))
    place = base + row[:, None] * STRIDE + column[None, :]
    inside = (row < length)[:, None]
    async_copy.async_copy_global_to_shared(tile, place, mask=inside)


@gluon.jit
def pair_at(pairs, task, NUM_HEADS: gl.constexpr):
    """Return the head, sequence, its first token (int64) and length, and the pair's first query."""
    pair = pairs + (1 + task // NUM_HEADS) * NUM_FIELDS
    start = gl.load(pair).to(gl.int64)
    return task % NUM_HEADS, gl.load(pair + 3), start, gl.load(pair + 1), gl.load(pair + 2)


@gluon.jit
def copy_blocks(
    base, k_ring, v_ring, full, empty, step, first, length, WIDTH: gl.constexpr,
    WINDOW: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values that a pair sees, the last block first; return the next step."""
    key = key_of(gl.arange(0, KEYS, gl.SliceLayout(1, COPIES)))
    block, blocks = key_blocks(first, length, WINDOW, PAIR * ROWS, KEYS)
    for k in range(0, blocks):
        slot = step % STAGES
        place = (block + blocks - 1 - k) * KEYS + key
        # Passes at once the first time: the phase before the first one counts as over.
        mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
        copy_rows(k_ring.index(slot), base + WIDTH, place, length, 3 * WIDTH, HEAD_SIZE)
        copy_rows(v_ring.index(slot), base + 2 * WIDTH, place, length, 3 * WIDTH, HEAD_SIZE)
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        step += 1
    return step


@gluon.jit
def produce(
    qkv, pairs, q_tiles, k_ring, v_ring, full, empty, q_full, q_empty, tasks,
    NUM_HEADS: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr, HEAD_SIZE: gl.constexpr,
):  # fmt: skip
    """Copy the queries of each pair, then its blocks of keys and values."""
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
            for which in gl.static_range(PAIR):
                mbarrier.wait(q_empty.index(which), (number & 1) ^ 1)
                own = first + which * ROWS + row
                copy_rows(q_tiles.index(which), base, own, length, 3 * WIDTH, HEAD_SIZE)
                async_copy.mbarrier_arrive(q_full.index(which), increment_count=False)
            number += 1
            step = copy_blocks(
                base, k_ring, v_ring, full, empty, step, first, length, WIDTH, WINDOW, STAGES, ROWS,
                KEYS, HEAD_SIZE,
            )  # fmt: skip


@gluon.jit
def pass_block(full, empty, turns, step, WHICH: gl.constexpr, STAGES: gl.constexpr):
    """Take no part in a block of keys."""
    slot = step % STAGES
    mbarrier.wait(turns.index(WHICH), (step & 1) ^ (1 - WHICH))
    mbarrier.arrive(turns.index(1 - WHICH), count=1)
    mbarrier.wait(full.index(slot), (step // STAGES) & 1)
    mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def hide(scores, row, key, length, WINDOW: gl.constexpr):
    """Return scores without those of keys that the queries do not see."""
    if WINDOW is None:
        scores = gl.where((key < length)[None, :], scores, -float("inf"))
    else:
        # Finite: a query may see no key of the first block. Its sums so far are then meaningless,
        # and multiplied by 0 after the first block with a key that it sees.
        scores = gl.where(is_seen(row, key, length, WINDOW), scores, HIDDEN)
    return scores


@gluon.jit
def sums_of(weights, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """Return each thread's part of the sums over keys: float32 [64, 4]."""
    parts = gl.convert_layout(
        gl.reshape(weights, [ROWS, KEYS // 16, 2, 4, 2]), PARTS, assert_trivial=True
    )
    return gl.sum(gl.sum(gl.sum(parts, 4), 2), 1)


@gluon.jit
def drop(
    kept, hashes, bits, first_q, first_k, length, bits_blocks, THRESHOLD: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Return 16-bit weights with those dropped set to 0, and store which were kept."""
    sixteen = gl.arange(0, KEYS // 16, gl.SliceLayout(1, gl.SliceLayout(0, SIGNS)))
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, SIGNS)))
    groups = first_k // 4 + 4 * sixteen[:, None] + four[None, :]
    signs = signs_of(hashes[:, None, None], groups[None, :, :], THRESHOLD)
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, MASKS))))
    chosen = gl.where(half == 0, CHOSEN_BYTES[0], CHOSEN_BYTES[1])[None, None, :, None]
    signs, chosen = gl.broadcast(signs[:, :, None, :], chosen)
    masks = copied_signs(signs, chosen)
    pairs = gl.zeros([ROWS, KEYS // 16, 2, 4, 2], gl.int32, PARTS)
    pairs, _ = gl.broadcast(masks[:, :, :, :, None], pairs)
    pairs = gl.convert_layout(gl.reshape(pairs, [ROWS, KEYS]), SCORES, assert_trivial=True)
    kept, _ = select_pairs(kept, pairs)
    if bits is not None:
        sixteen = gl.arange(0, KEYS // 16, gl.SliceLayout(1, BIT_PLACES))
        half = gl.arange(0, 2, gl.SliceLayout(0, BIT_PLACES))
        place = 2 * sixteen[:, None] + half[None, :]
        words = masks & (0x00010001 << place)[None, :, :, None]
        words = gl.reduce_or(gl.reduce_or(words, 2), 1)
        row = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
        words = half_of_bits(words, (row // 8 % 2)[:, None])
        words = gl.reduce_or(gl.reshape(words, [ROWS // 16, 2, 8, 4]), 1)
        words = gl.convert_layout(gl.reshape(words, [ROWS // 2, 4]), BITS, assert_trivial=True)
        row = first_q // 2 + gl.arange(0, ROWS // 2, gl.SliceLayout(1, BITS))
        column = first_k // 64 * 4 + gl.arange(0, 4, gl.SliceLayout(0, BITS))
        at, exists = number_at(bits, row, column, length, bits_blocks)
        gl.store(at, words, mask=exists)
    return kept


@gluon.jit
def zero_tail(
    out, cu_seqlens, num_tokens, num_sequences, NUM_HEADS: gl.constexpr, PARTS: gl.constexpr,
    ROWS: gl.constexpr, HEAD_SIZE: gl.constexpr,
):  # fmt: skip
    """Zero this program's share of the tokens after the last sequence in out[:, 0].

    out: [T, PARTS, N, H].
    """
    WIDTH: gl.constexpr = PARTS * NUM_HEADS * HEAD_SIZE
    row = gl.arange(0, ROWS, gl.SliceLayout(1, STORES))
    column = gl.arange(0, HEAD_SIZE, gl.SliceLayout(0, STORES))
    zeros = gl.zeros([ROWS, HEAD_SIZE], out.dtype.element_ty, STORES)
    end = gl.load(cu_seqlens + num_sequences)
    length = num_tokens - end
    out += end.to(gl.int64) * WIDTH
    blocks = (length + ROWS - 1) // ROWS
    for tile in range(gl.program_id(0), blocks * NUM_HEADS, gl.num_programs(0)):
        own = tile // NUM_HEADS * ROWS + row
        at = out + tile % NUM_HEADS * HEAD_SIZE + own[:, None] * WIDTH + column[None, :]
        gl.store(at, zeros, mask=(own < length)[:, None])


@gluon.jit
def begin_scores(
    q, k_ring, full, turns, step, WHICH: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr,
):  # fmt: skip
    """Begin to multiply queries by a block of keys, as soon as it is there and it is our turn."""
    slot = step % STAGES
    mbarrier.wait(full.index(slot), (step // STAGES) & 1)
    mbarrier.wait(turns.index(WHICH), (step & 1) ^ (1 - WHICH))
    # Copies have written the tiles, and products read them through another proxy.
    fence_async_shared()
    zeros = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    keys = k_ring.index(slot).permute((1, 0))
    return warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def attend_half(
    q, hashes, bits, k_ring, v_ring, full, empty, turns, step, first, block, blocks, length,
    bits_blocks, WHICH: gl.constexpr, FACTOR: gl.constexpr, THRESHOLD: gl.constexpr,
    WINDOW: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
):  # fmt: skip
    """Attend with queries to at least one block of keys, the last one first.

    Returns the sums of values [64, H], not yet divided, the highest scores and the sums of weights.
    """
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    key = key_of(gl.arange(0, KEYS, gl.SliceLayout(0, SCORES)))
    first_k = (block + blocks - 1) * KEYS
    scores = begin_scores(q, k_ring, full, turns, step, WHICH, STAGES, ROWS, KEYS)
    mbarrier.arrive(turns.index(1 - WHICH), count=1)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
    scores = hide(scores, row, first_k + key, length, WINDOW)
    highest = gl.max(scores, 1) * FACTOR
    weights = gl.exp2(scores * FACTOR - highest[:, None])
    sums = sums_of(weights, ROWS, KEYS)
    kept = weights.to(q.dtype)
    if THRESHOLD:
        # After the sums: dropout acts on normalized weights, so the divisor includes dropped ones.
        kept = drop(
            kept, hashes, bits, first, first_k, length, bits_blocks, THRESHOLD, ROWS, KEYS
        )  # fmt: skip
    result = gl.zeros([ROWS, HEAD_SIZE], gl.float32, SCORES)
    for _ in range(1, blocks):
        first_k -= KEYS
        previous = step % STAGES
        step += 1
        scores = begin_scores(q, k_ring, full, turns, step, WHICH, STAGES, ROWS, KEYS)
        kept = gl.convert_layout(kept, FACTORS)
        result = warpgroup_mma(kept, v_ring.index(previous), result, is_async=True)
        mbarrier.arrive(turns.index(1 - WHICH), count=1)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
        if WINDOW is not None:
            scores = hide(scores, row, first_k + key, length, WINDOW)
        new_highest = gl.maximum(highest, gl.max(scores, 1) * FACTOR)
        weights = gl.exp2(scores * FACTOR - new_highest[:, None])
        rescale = gl.exp2(highest - new_highest)
        highest = new_highest
        factor = gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))
        sums = sums * factor[:, None] + sums_of(weights, ROWS, KEYS)
        kept = weights.to(q.dtype)
        if THRESHOLD:
            kept = drop(
                kept, hashes, bits, first, first_k, length, bits_blocks, THRESHOLD, ROWS, KEYS
            )  # fmt: skip
        # Passes at once. Without the end of a basic block here, ptxas moves the wait for the
        # product in front of the exponentials.
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
        result = warpgroup_mma_wait(num_outstanding=0, deps=(result,))
        mbarrier.arrive(empty.index(previous), count=1)
        result *= rescale[:, None]
    slot = step % STAGES
    kept = gl.convert_layout(kept, FACTORS)
    result = warpgroup_mma(kept, v_ring.index(slot), result, is_async=True)
    total = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, SCORES))
    result = warpgroup_mma_wait(num_outstanding=0, deps=(result,))
    mbarrier.arrive(empty.index(slot), count=1)
    return result, highest, total


@gluon.jit
def consume(
    WHICH: gl.constexpr, pairs, rows, key, out, log_sums, bits, q_tile, k_ring, v_ring, full, empty,
    q_full, q_empty, turns, tasks, num_tokens, num_sequences, bits_blocks, NUM_HEADS: gl.constexpr,
    SCALE: gl.constexpr, THRESHOLD: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, HEAD_SIZE: gl.constexpr,
):  # fmt: skip
    """Attend with one half of each pair."""
    WIDTH: gl.constexpr = NUM_HEADS * HEAD_SIZE
    row = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    hashed_row = gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, SIGNS)))
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
            mbarrier.wait(q_full.index(WHICH), number & 1)
            number += 1
            q = q_tile.load(FACTORS)
            mbarrier.arrive(q_empty.index(WHICH), count=1)
            if own_blocks > 0:
                hashes = hashes_of(key, head, rows, start, first + hashed_row, length, THRESHOLD)
                own_bits = bits
                if bits is not None:
                    own_bits += bits_start(
                        head, start, sequence, num_tokens, num_sequences, bits_blocks
                    )
                result, highest, total = attend_half(
                    q, hashes, own_bits, k_ring, v_ring, full, empty, turns, step, first, own_block,
                    own_blocks, length, bits_blocks, WHICH, SCALE * LOG2_E, THRESHOLD, WINDOW,
                    STAGES, ROWS, KEYS, HEAD_SIZE,
                )  # fmt: skip
                step += own_blocks
                # int64: N T may exceed 2^31.
                gl.store(
                    log_sums + head.to(gl.int64) * num_tokens + start + first + row,
                    highest + gl.log2(total),
                    mask=first + row < length,
                )
                result *= ((256.0 / (256 - THRESHOLD)) / total)[:, None]
                stored = gl.convert_layout(result.to(out.dtype.element_ty), STORES)
                at = out + start * WIDTH + head * HEAD_SIZE
                at += (first + stored_row)[:, None] * WIDTH + column[None, :]
                gl.store(at, stored, mask=(first + stored_row < length)[:, None])
            for _ in range(0, after):
                pass_block(full, empty, turns, step, WHICH, STAGES)
                step += 1


@gluon.jit(do_not_specialize=["num_tokens", "num_sequences", "bits_blocks"])
def gluon_attention_kernel(
    qkv, cu_seqlens, pairs, rows, key, out, log_sums, bits, num_tokens, num_sequences, bits_blocks,
    NUM_HEADS: gl.constexpr, SCALE: gl.constexpr, THRESHOLD: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, HEAD_SIZE: gl.constexpr,
):  # fmt: skip
    """Compute every n-th task: a head and a pair. Grid: at most the multiprocessors.

    pairs: `attention_pairs.pairs_of`. The others are those of `attention_forward_kernel`.
    """
    tasks = gl.load(pairs) * NUM_HEADS
    q_tiles = gl.allocate_shared_memory(qkv.dtype.element_ty, [PAIR, ROWS, HEAD_SIZE], TILE)
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
    zero_tail(out, cu_seqlens, num_tokens, num_sequences, NUM_HEADS, 1, ROWS, HEAD_SIZE)
    gl.warp_specialize(
        [
            (
                consume,
                (
                    0, pairs, rows, key, out, log_sums, bits, q_tiles.index(0), k_ring, v_ring,
                    full, empty, q_full, q_empty, turns, tasks, num_tokens, num_sequences,
                    bits_blocks, NUM_HEADS, SCALE, THRESHOLD, WINDOW, STAGES, ROWS, KEYS, HEAD_SIZE,
                ),
            ),
            (
                consume,
                (
                    1, pairs, rows, key, out, log_sums, bits, q_tiles.index(1), k_ring, v_ring,
                    full, empty, q_full, q_empty, turns, tasks, num_tokens, num_sequences,
                    bits_blocks, NUM_HEADS, SCALE, THRESHOLD, WINDOW, STAGES, ROWS, KEYS, HEAD_SIZE,
                ),
            ),
            (
                produce,
                (
                    qkv, pairs, q_tiles, k_ring, v_ring, full, empty, q_full, q_empty, tasks,
                    NUM_HEADS, WINDOW, STAGES, ROWS, KEYS, HEAD_SIZE,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
