"""Packing: combine short sequences so that few slots of a pack stay empty.

The search works on the histogram of lengths, with at most ``max_tokens`` counts, and takes seconds
for any number of sequences. It first chooses full packs: how often to use each combination of up to
three lengths that fills a pack exactly (`fit`). The rest, and all sequences if packs have more than
MAX_FITTED_TOKENS slots, are packed longest first by best fit.

Legend: N sequences, P packs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PACKING_VERSION = 1  # raised when equal arguments give other packs
MAX_FITTED_TOKENS = 1024  # combinations of three lengths grow with the square of it: 87,552 here
FIT_ITERATIONS = (1000, 100, 100)  # of the first fit, and of later fits to what rounding left over


@dataclass(frozen=True)
class Packing:
    """The assignment of sequences to packs."""

    order: np.ndarray  # int64 [N], every sequence index exactly once, pack by pack
    offsets: np.ndarray  # int64 [P+1], pack p holds order[offsets[p]:offsets[p+1]]

    @property
    def num_packs(self) -> int:
        """Number of packs (P)."""
        return len(self.offsets) - 1

    def filled(self, lengths: np.ndarray, max_tokens: int) -> float:
        """Return the share of slots that hold a token, 0 to 1."""
        return (
            float(lengths.sum(dtype=np.int64)) / (self.num_packs * max_tokens)
            if self.num_packs
            else 1.0
        )


def plan(histogram: np.ndarray, max_tokens: int, max_sequences: int) -> dict[tuple[int, ...], int]:
    """Choose combinations of lengths that use up a histogram exactly: {descending lengths: number
    of packs}.

    ``histogram`` is int64 [max_tokens+1], the number of sequences of each length.
    """
    greedy = best_fit(histogram, max_tokens, max_sequences)
    # Best fit needs the fewest possible packs of at most two sequences.
    if max_tokens > MAX_FITTED_TOKENS or max_sequences < 3 or not histogram.any():
        return greedy
    rest = np.array(histogram, np.int64)
    fitted: Counter[tuple[int, ...]] = Counter()
    for iterations in FIT_ITERATIONS:
        fitted.update(fit(rest, max_tokens, iterations))
    fitted.update(best_fit(rest, max_tokens, max_sequences))
    return fitted if fitted.total() < sum(greedy.values()) else greedy


def fit(histogram: np.ndarray, max_tokens: int, iterations: int) -> dict[tuple[int, ...], int]:
    """Choose full packs of up to three sequences that use up most of a histogram.

    Finds non-negative amounts x of the combinations with (A x) close to the histogram by the
    multiplicative update x <- x * mean over the combination's lengths of (histogram / A x),
    over-relaxed by the power 1.5. Then rounds the running sum, because most amounts are far below
    1.

    Args:
        histogram: int64 [max_tokens+1]; packed sequences are subtracted in place.
        max_tokens: slots of a pack.
        iterations: updates of the amounts.
    """
    # All (a, b, c) with a >= b >= c >= 0 and a + b + c = max_tokens.
    # 0 means no sequence; with two sequences c is 0.
    a, b = np.divmod(np.arange((max_tokens + 1) ** 2), max_tokens + 1)
    c = max_tokens - a - b
    falling = (a >= b) & (b >= c) & (c >= 0)
    combinations = np.stack([a, b, c], axis=1)[falling]
    combinations = combinations[((combinations == 0) | (histogram[combinations] > 0)).all(axis=1)]
    if not len(combinations):
        return {}
    used = (combinations > 0).sum(axis=1)
    amounts = np.full(len(combinations), histogram.sum() / used.sum())
    for _ in range(iterations):
        # A x: sequences of each length that the amounts use up.
        made = np.bincount(combinations.ravel(), np.repeat(amounts, 3), minlength=max_tokens + 1)
        ratio = np.divide(histogram, made, out=np.zeros(max_tokens + 1), where=made > 0)
        ratio[0] = 0  # exclude empty places
        mean = (
            ratio[combinations[:, 0]] + ratio[combinations[:, 1]] + ratio[combinations[:, 2]]
        ) / used
        # Power 1.5, using only operations that round the same on every machine.
        amounts *= mean * np.sqrt(mean)
    packed: dict[tuple[int, ...], int] = {}
    # Round the running sum: most amounts are below a half and would all round to 0.
    rounded = np.diff(np.floor(np.cumsum(amounts) + 0.5), prepend=0).astype(np.int64)
    for index in np.argsort(-rounded, kind="stable")[: np.count_nonzero(rounded)]:
        combination = tuple(int(length) for length in combinations[index] if length)
        lengths, each = np.unique(combination, return_counts=True)
        count = min(int(rounded[index]), int((histogram[lengths] // each).min()))
        if count:
            histogram[lengths] -= count * each
            packed[combination] = count
    return packed


def best_fit(
    histogram: np.ndarray, max_tokens: int, max_sequences: int
) -> dict[tuple[int, ...], int]:
    """Pack longest first, each length into the open packs with the least sufficient space.

    Returns the same as `plan`.
    """
    full: Counter[tuple[int, ...]] = Counter()
    open_packs: defaultdict[int, Counter[tuple[int, ...]]] = defaultdict(Counter)  # by free room

    def put(combination: tuple[int, ...], count: int) -> None:
        room = max_tokens - sum(combination)
        done = len(combination) == max_sequences or room == 0
        (full if done else open_packs[room])[combination] += count

    for length in range(max_tokens, 0, -1):
        left = int(histogram[length])
        if not left:
            continue
        for room in sorted(room for room in open_packs if room >= length):
            group = open_packs[room]
            while left and group:
                combination, available = group.popitem()
                used = min(left, available)
                left -= used
                if used < available:
                    group[combination] = available - used
                put((*combination, length), used)
        each = min(max_sequences, max_tokens // length)
        if left >= each:
            put((length,) * each, left // each)
        if left % each:
            put((length,) * (left % each), 1)
    for group in open_packs.values():
        full.update(group)
    return full


def pack_lengths(
    lengths: np.ndarray, max_tokens: int, max_sequences: int = 3, seed: int | Sequence[int] = 0
) -> Packing:
    """Pack sequences of ``lengths``, integer [N], into packs of ``max_tokens`` slots
    and at most ``max_sequences``.

    Sequences of equal length, and the packs, are ordered randomly by ``seed``.

    Raises:
        ValueError: a length is below 1 or above ``max_tokens``.
    """
    if max_sequences < 1 or max_tokens < 1:
        raise ValueError(
            f"max_tokens {max_tokens} and max_sequences {max_sequences} must be at least 1"
        )
    lengths = np.asarray(lengths)
    if len(lengths) and (int(lengths.min()) < 1 or int(lengths.max()) > max_tokens):
        raise ValueError(
            f"lengths from {lengths.min()} to {lengths.max()} do not fit packs "
            f"of {max_tokens} tokens"
        )
    generator = np.random.Generator(np.random.PCG64(seed))
    histogram = (
        np.bincount(lengths, minlength=max_tokens + 1)
        if len(lengths)
        else np.zeros(max_tokens + 1, np.int64)
    )
    # Sorted by length, in random order within a length.
    by_length = generator.permutation(len(lengths))
    by_length = by_length[np.argsort(lengths[by_length].astype(np.uint16), kind="stable")]
    next_of_length = np.concatenate([[0], np.cumsum(histogram)])[:-1]

    rows = [np.empty((0, max_sequences), np.int64)]
    for combination, count in plan(histogram, max_tokens, max_sequences).items():
        row = np.full((count, max_sequences), -1, np.int64)  # -1: no sequence
        for slot, length in enumerate(combination):
            start = next_of_length[length]
            row[:, slot] = by_length[start : start + count]
            next_of_length[length] += count
        rows.append(row)
    table = np.concatenate(rows)
    table = table[generator.permutation(len(table))]
    used = table >= 0
    offsets = np.concatenate([[0], np.cumsum(used.sum(axis=1))]).astype(np.int64)
    return Packing(order=table[used], offsets=offsets)
