"""Expand a `mlbert.data.batches.HostBatch` in one Triton kernel;
each program writes BLOCK indices of every output.

Legend as in `mlbert.data.batches`; T', S', M' are the sizes of the padded batch.
"""

# mypy: disallow-untyped-defs=False
# (Triton converts kernel arguments; the kernel's docstring gives their types)

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops.loss import IGNORED

BLOCK = 256
# Steps of the binary search over sequences; fixed, so that one compiled kernel handles all sizes
HALVINGS = 20
MAX_SEQUENCES = 1 << (HALVINGS - 1)

LOWEST_BITS = {2: 0xFFFF, 4: 0x7FFFFFFF}  # of an id, by its bytes: ids are loaded as signed

# In the order of the kernel's arguments.
INPUTS = [
    "ids",
    "masked_labels",
    "masked_positions",
    "cu_seqlens",
    "first_lengths",
    "first_rows",
    "next_sentence",
]
OUTPUTS = (
    "input_ids",
    "segment_ids",
    "position_ids",
    "dropout_rows",
    "cu_seqlens",
    "masked_positions",
    "masked_labels",
    "next_sentence_labels",
)


@registry.register_exact("expand_batch", "triton")
def expand(parts: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
    """Expand the parts into ``out``; bitwise the same as `mlbert.data.batches.expand_plain`."""
    tokens = parts["ids"].numel()
    sequences = parts["next_sentence"].numel()
    masked = parts["masked_labels"].numel()
    tokens_out = out["input_ids"].numel()
    sequences_out = out["next_sentence_labels"].numel()
    masked_out = out["masked_labels"].numel()
    fits = tokens <= tokens_out and sequences <= sequences_out and masked <= masked_out
    assert fits, "the batch is larger than its target"
    assert sequences <= MAX_SEQUENCES, f"{sequences} sequences"
    longest = max(tokens_out, sequences_out + 1, masked_out)
    grid = (triton.cdiv(longest, BLOCK),)
    expand_kernel[grid](
        *(parts[name] for name in INPUTS),
        *(out[name] for name in OUTPUTS),
        tokens,
        sequences,
        masked,
        tokens_out,
        sequences_out,
        masked_out,
        LOWEST_BITS=LOWEST_BITS[parts["ids"].element_size()],
        IGNORED=IGNORED,
        HALVINGS=HALVINGS,
        BLOCK=BLOCK,
    )
    if "labels" in out:  # only small tasks have labels: not worth a second kernel variant
        out["labels"][:sequences].copy_(parts["labels"])
        out["labels"][sequences:].zero_()


# Sizes change from batch to batch: specialization would cause compilation in the middle of a run.
@triton.jit(
    do_not_specialize=["tokens", "sequences", "masked", "tokens_out", "sequences_out", "masked_out"]
)
def expand_kernel(
    ids,
    labels,
    places,
    bounds,
    first_lengths,
    first_rows,
    next_sentence,
    input_ids,
    segment_ids,
    position_ids,
    dropout_rows,
    cu_seqlens,
    masked_positions,
    masked_labels,
    next_sentence_labels,
    tokens,
    sequences,
    masked,
    tokens_out,
    sequences_out,
    masked_out,
    LOWEST_BITS: tl.constexpr,
    IGNORED: tl.constexpr,
    HALVINGS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write BLOCK indices of every output. Grid: max(T', S'+1, M') / BLOCK.

    Inputs: the parts of `mlbert.data.batches`. Outputs, in order: int64 [T'], [T'], [T'],
    int32 [T'], int32 [S'+1], int64 [M'], [M'], [S'].
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    # A token belongs to the first sequence that ends after it,
    # found by binary search in [low, high].
    real = index < tokens
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + sequences - 1
    for _ in tl.static_range(HALVINGS):
        middle = (low + high) // 2
        behind = tl.load(bounds + middle + 1, mask=real, other=0) <= index
        behind = behind & (low < high)
        high = tl.where(behind, high, tl.where(low < high, middle, high))
        low = tl.where(behind, middle + 1, low)
    position = index - tl.load(bounds + low, mask=real, other=0)
    segment = position >= tl.load(first_lengths + low, mask=real, other=0)
    row = position + tl.load(first_rows + low, mask=real, other=0)
    word = tl.load(ids + index, mask=real, other=0).to(tl.int32) & LOWEST_BITS
    inside = index < tokens_out
    tl.store(input_ids + index, word.to(tl.int64), mask=inside)
    tl.store(segment_ids + index, tl.where(real, segment.to(tl.int64), 0), mask=inside)
    tl.store(position_ids + index, tl.where(real, position, 0).to(tl.int64), mask=inside)
    tl.store(dropout_rows + index, tl.where(real, row, 0), mask=inside)

    real = index < masked
    place = tl.load(places + index, mask=real, other=0)
    label = tl.load(labels + index, mask=real, other=0).to(tl.int32) & LOWEST_BITS
    tl.store(masked_positions + index, place.to(tl.int64), mask=index < masked_out)
    tl.store(
        masked_labels + index, tl.where(real, label, IGNORED).to(tl.int64), mask=index < masked_out
    )

    real = index < sequences
    random_next = tl.load(next_sentence + index, mask=real, other=0).to(tl.int32)
    tl.store(
        next_sentence_labels + index,
        tl.where(real, random_next, IGNORED).to(tl.int64),
        mask=index < sequences_out,
    )
    bound = tl.load(bounds + index, mask=index <= sequences, other=0)
    tl.store(
        cu_seqlens + index, tl.where(index <= sequences, bound, tokens), mask=index <= sequences_out
    )
