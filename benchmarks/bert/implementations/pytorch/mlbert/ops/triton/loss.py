"""Cross-entropy of the masked tokens in Triton: one program per row.

The gradient overwrites the logits.

The forward kernel reads a row once, keeping the running maximum, its lowest column and the sum of
exponentials (Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv
1805.02867); the backward kernel reads and writes it once. There is no host synchronization: an
invalid label makes the loss NaN; other implementations raise.

Legend: M masked tokens, V vocabulary, V' columns of the logits (V padded).
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlbert.ops import forms as registry

# Excludes a row from loss, gradient and count, as in PyTorch's cross_entropy. Fills batches up to a
# fixed number of masked tokens.
IGNORED = tl.constexpr(-100)
MAX_BLOCK = 4096
SUM_BLOCK = 1024


@registry.register("masked_cross_entropy", "triton")
def masked_cross_entropy(logits, labels, vocab_size):
    """See `mlbert.ops.loss.masked_cross_entropy`; rows with label -100 are ignored."""
    assert labels.shape == logits.shape[:1], (
        f"{tuple(labels.shape)} labels for {logits.shape[0]} rows"
    )
    assert vocab_size <= logits.shape[1], f"{vocab_size} classes in {logits.shape[1]} columns"
    return _TritonCrossEntropy.apply(logits, labels, vocab_size)


class _TritonCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, vocab_size):
        logits = logits.contiguous()
        labels = labels.contiguous()
        rows, columns = logits.shape
        highests, totals, losses = (
            torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3)
        )
        correct = torch.empty(rows, dtype=torch.int32, device=logits.device)
        loss_sum = torch.zeros((), dtype=torch.float32, device=logits.device)
        num_correct = torch.zeros((), dtype=torch.int64, device=logits.device)
        if rows:
            sizes = {
                "columns": columns,
                "vocab_size": vocab_size,
                "BLOCK": _block(columns),
                "num_warps": 8,
            }
            loss_forward_kernel[(rows,)](logits, labels, highests, totals, losses, correct, **sizes)
            loss_sum_kernel[(1,)](losses, correct, loss_sum, num_correct, rows, BLOCK=SUM_BLOCK)
        ctx.save_for_backward(logits, labels, highests, totals)
        ctx.vocab_size = vocab_size
        ctx.consumed = False
        ctx.mark_non_differentiable(num_correct)
        return loss_sum, num_correct

    @staticmethod
    def backward(ctx, d_loss, _):
        logits, labels, highests, totals = ctx.saved_tensors
        assert not ctx.consumed, (
            "masked_cross_entropy's backward runs once: it overwrites the logits"
        )
        ctx.consumed = True
        rows, columns = logits.shape
        if rows:
            block = _block(columns)
            grid = (rows, triton.cdiv(columns, block))
            sizes = {
                "columns": columns,
                "vocab_size": ctx.vocab_size,
                "BLOCK": block,
                "num_warps": 8,
            }
            loss_backward_kernel[grid](logits, labels, highests, totals, d_loss.float(), **sizes)
        return logits, None, None


def _block(columns: int) -> int:
    return min(MAX_BLOCK, triton.next_power_of_2(columns))


@triton.jit
def loss_forward_kernel(
    logits, labels, highests, totals, losses, correct, columns: tl.constexpr,
    vocab_size: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute maximum, sum of exp(score - maximum), loss and hit of one row [V']. Grid: M.

    logits: float32 or bfloat16 [M, V']; labels: int64 [M];
    highests, totals, losses: float32 [M]; correct: int32 [M], 0 or 1.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    lanes = tl.arange(0, BLOCK)
    highest = -float("inf")
    best = 0
    total = 0.0
    for start in range(0, vocab_size, BLOCK):
        column = start + lanes
        # Also read padded columns: full rows are aligned, so a thread loads 16 bytes at once.
        scores = tl.load(logits + row * columns + column, mask=column < columns, other=0.0).to(
            tl.float32
        )
        scores = tl.where(column < vocab_size, scores, -float("inf"))
        block_highest, place = tl.max(
            scores, 0, return_indices=True, return_indices_tie_break_left=True
        )
        best = tl.where(block_highest > highest, start + place, best)
        new_highest = tl.maximum(highest, block_highest)
        # If all scores so far are -inf, there is no sum to rescale, and -inf - -inf would be NaN.
        safe = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        total = total * tl.exp(highest - safe) + tl.sum(tl.exp(scores - safe), 0)
        highest = new_highest
    is_class = (label >= 0) & (label < vocab_size)
    score = tl.load(logits + row * columns + label, mask=is_class, other=float("nan")).to(
        tl.float32
    )
    counts = label != IGNORED
    tl.store(highests + row, highest)
    tl.store(totals + row, total)
    tl.store(losses + row, tl.where(counts, tl.log(total) - (score - highest), 0.0))
    # Also compare the label's score: it differs from the maximum in rows with NaN.
    tl.store(correct + row, (counts & (best == label) & (score == highest)).to(tl.int32))


@triton.jit(do_not_specialize=["rows"])
def loss_sum_kernel(losses, correct, loss_sum, num_correct, rows, BLOCK: tl.constexpr):
    """Sum losses (in float64) and hits in one program, in a fixed order."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    hits = tl.zeros([BLOCK], tl.int64)
    start = 0
    while start < rows:
        inside = start + lanes < rows
        total += tl.load(losses + start + lanes, mask=inside, other=0.0).to(tl.float64)
        hits += tl.load(correct + start + lanes, mask=inside, other=0).to(tl.int64)
        start += BLOCK
    tl.store(loss_sum, tl.sum(total, 0).to(tl.float32))
    tl.store(num_correct, tl.sum(hits, 0))


@triton.jit
def loss_backward_kernel(
    logits, labels, highests, totals, d_loss, columns: tl.constexpr, vocab_size: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace BLOCK logits of a row with (softmax - one-hot) * d_loss; 0 in padded columns.

    Grid: M, V' / BLOCK.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels + row)
    place = logits + row * columns + column
    scores = tl.load(place, mask=column < columns, other=0.0).to(tl.float32)
    scores = tl.where(column < vocab_size, scores - tl.load(highests + row), -float("inf"))
    probabilities = tl.exp(scores) / tl.load(totals + row)
    gradient = (probabilities - tl.where(column == label, 1.0, 0.0)) * tl.load(d_loss)
    gradient = tl.where(label != IGNORED, gradient, 0.0)
    tl.store(place, gradient.to(logits.dtype.element_ty), mask=column < columns)
