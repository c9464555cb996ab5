"""Packing: put short sequences together so that few slots of a pack stay empty.

What counts is only how many sequences of each length there are, so the search works on at most ``max_tokens`` counts
and takes seconds for any number of sequences. It first looks for full packs: how often to use each combination of
up to three lengths that fills a pack exactly, so that the counts come out (`fit`). What is left over, and everything
where packs may hold very many tokens, is packed longest first, each into the pack that it fills best.

Legend: N sequences, P packs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_FITTED_TOKENS = 1024  # combinations of three lengths grow with the square of it: 87,552 here
FIT_ITERATIONS = (1000, 100, 100)  # of the first fit, and of those to what rounding left of the one before


@dataclass(frozen=True)
class Packing:
    """Which sequences share a pack."""

    order: np.ndarray  # int64 [N], every sequence index exactly once, pack by pack
    offsets: np.ndarray  # int64 [P+1], pack p holds order[offsets[p]:offsets[p+1]]

    @property
    def num_packs(self) -> int:
        """Number of packs (P)."""
        return len(self.offsets) - 1

    def filled(self, lengths: np.ndarray, max_tokens: int) -> float:
        """Share of slots that hold a token, 0 to 1."""
        return float(lengths.sum(dtype=np.int64)) / (self.num_packs * max_tokens) if self.num_packs else 1.0


def plan(histogram: np.ndarray, max_tokens: int, max_sequences: int) -> dict[tuple[int, ...], int]:
    """Choose combinations of lengths and how often to use each: {lengths in falling order: number of packs}.

    Uses up the histogram, int64 [max_tokens+1], the number of sequences of each length, exactly.
    """
    greedy = best_fit(histogram, max_tokens, max_sequences)
    if max_tokens > MAX_FITTED_TOKENS or max_sequences < 2 or not histogram.any():
        return greedy
    rest = np.array(histogram, np.int64)
    fitted: Counter[tuple[int, ...]] = Counter()
    for iterations in FIT_ITERATIONS:
        fitted.update(fit(rest, max_tokens, min(max_sequences, 3), iterations))
    fitted.update(best_fit(rest, max_tokens, max_sequences))
    return fitted if fitted.total() < sum(greedy.values()) else greedy


def fit(
    histogram: np.ndarray, max_tokens: int, max_sequences: int, iterations: int = FIT_ITERATIONS[0]
) -> dict[tuple[int, ...], int]:
    """Full packs that use up most of a histogram.

    Finds non-negative amounts x of the combinations with (A x) close to the histogram by the multiplicative update
    x <- x * mean over the combination's lengths of (histogram / A x), over-relaxed by the power 1.5; then rounds so
    that the amounts of neighbouring combinations keep their sum: most amounts are far below 1.

    Args:
        histogram: int64 [max_tokens+1]; what is packed is subtracted in place.
        max_tokens: slots of a pack.
        max_sequences: 2 or 3.
        iterations: updates of the amounts.
    """
    # All (a, b, c) with a >= b >= c >= 0 and a + b + c = max_tokens. 0 is an empty place; with two sequences c is one.
    a, b = np.divmod(np.arange((max_tokens + 1) ** 2), max_tokens + 1)
    c = max_tokens - a - b
    falling = (a >= b) & (b >= c) & (c >= 0) & (c <= (max_tokens if max_sequences > 2 else 0))
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
        ratio[0] = 0  # empty places have no say
        mean = (ratio[combinations[:, 0]] + ratio[combinations[:, 1]] + ratio[combinations[:, 2]]) / used
        amounts *= mean * np.sqrt(mean)  # power 1.5; only operations that round alike on every machine
    packed: dict[tuple[int, ...], int] = {}
    # Rounding the running sum, not each amount, which is mostly below a half.
    rounded = np.diff(np.floor(np.cumsum(amounts) + 0.5), prepend=0).astype(np.int64)
    for index in np.argsort(-rounded, kind="stable")[: np.count_nonzero(rounded)]:
        combination = tuple(int(length) for length in combinations[index] if length)
        lengths, each = np.unique(combination, return_counts=True)
        count = min(int(rounded[index]), int((histogram[lengths] // each).min()))
        if count:
            histogram[lengths] -= count * each
            packed[combination] = count
    return packed


def best_fit(histogram: np.ndarray, max_tokens: int, max_sequences: int) -> dict[tuple[int, ...], int]:
    """Longest first: each length goes to the open packs with the smallest free room that holds it. As `plan`."""
    full: Counter[tuple[int, ...]] = Counter()
    open_packs: defaultdict[int, Counter[tuple[int, ...]]] = defaultdict(Counter)  # by their free room

    def put(combination: tuple[int, ...], count: int) -> None:
        room = max_tokens - sum(combination)
        done = len(combination) == max_sequences or room == 0
        (full if done else open_packs[room])[combination] += count

    for length in range(max_tokens, 0, -1):
        left = int(histogram[length])
        for room in sorted(room for room in open_packs if room >= length) if left else ():
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
    """Pack sequences of ``lengths``, integer [N], into packs of ``max_tokens`` slots with ``max_sequences`` at most.

    Which sequence of a length goes where, and the order of packs, are random by ``seed``: same seed, same result.

    Raises:
        ValueError: a length is below 1 or above ``max_tokens``.
    """
    if max_sequences < 1 or max_tokens < 1:
        raise ValueError(f"max_tokens {max_tokens} and max_sequences {max_sequences} must be at least 1")
    lengths = np.asarray(lengths)
    if len(lengths) and (int(lengths.min()) < 1 or int(lengths.max()) > max_tokens):
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} do not fit packs of {max_tokens} tokens")
    generator = np.random.Generator(np.random.PCG64(seed))
    histogram = np.bincount(lengths, minlength=max_tokens + 1) if len(lengths) else np.zeros(max_tokens + 1, np.int64)
    # By length, in random order within each: the next of a length is then any of them.
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
