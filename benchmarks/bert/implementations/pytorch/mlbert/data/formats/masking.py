"""Static masking and pair truncation of the benchmark's instance generator, as pure functions of a ``random.Random``.

The order of random draws is part of the definition: the same generator state gives the same instance, draw by draw,
as the benchmark's published generator (``create_pretraining_data``). Tokens are integers here; the published program
works on strings, which draws the same numbers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Of the benchmark's generator: share of a sequence's tokens that it masks, and most of them.
MASKED_SHARE = 0.15
MAX_PREDICTIONS = 76


@dataclass(frozen=True)
class MaskingRule:
    """What masking needs to know of the vocabulary and of the benchmark's options."""

    masked_lm_prob: float  # share of a sequence's tokens to predict
    max_predictions: int  # upper limit of predictions in one sequence, tokens
    mask_id: int
    cls_id: int  # as [SEP] never masked
    sep_id: int
    vocab_size: int  # random replacements are drawn from ids 0 to vocab_size - 1


def shuffle(items: list[Any], rng: random.Random) -> None:
    """``rng.shuffle(items)`` with the rejection sampling written out: same draws, same result, half the time."""
    getrandbits = rng.getrandbits
    for i in range(len(items) - 1, 0, -1):
        bits = (i + 1).bit_length()
        j = getrandbits(bits)
        while j > i:
            j = getrandbits(bits)
        items[i], items[j] = items[j], items[i]


def num_predictions(length: int, rule: MaskingRule) -> int:
    """How many of ``length`` tokens are predicted; Python's rounding (half to even) is part of the rule."""
    return min(rule.max_predictions, max(1, round(length * rule.masked_lm_prob)))


def mask_tokens(tokens: list[int], rule: MaskingRule, rng: random.Random) -> tuple[list[int], list[int], list[int]]:
    """Mask one sequence: of the chosen tokens 80 % become [MASK], 10 % stay, 10 % become a random word.

    Args:
        tokens: the sequence with [CLS] and [SEP]; not changed.
        rule: the benchmark's options and the special ids.
        rng: source of all draws.

    Returns:
        (tokens after masking, masked positions ascending, original ids at these positions).
    """
    never = (rule.cls_id, rule.sep_id)
    candidates = [position for position, token in enumerate(tokens) if token not in never]
    shuffle(candidates, rng)
    positions = candidates[: num_predictions(len(tokens), rule)]
    draw, masked = rng.random, list(tokens)
    for position in positions:
        if draw() < 0.8:
            masked[position] = rule.mask_id
        elif draw() >= 0.5:
            masked[position] = rng.randint(0, rule.vocab_size - 1)
    positions.sort()
    return masked, positions, [tokens[position] for position in positions]


def truncate_pair(
    first: Sequence[int], second: Sequence[int], max_tokens: int, rng: random.Random
) -> tuple[Sequence[int], Sequence[int]]:
    """Cut two sentences to ``max_tokens`` together: one token at a time from the longer (the second when equal),
    from its front or its back with equal chance.

    Returns:
        (first, second), cut copies.
    """
    starts, ends = [0, 0], [len(first), len(second)]
    excess = len(first) + len(second) - max_tokens
    draw = rng.random
    for _ in range(excess):
        longer = 0 if ends[0] - starts[0] > ends[1] - starts[1] else 1
        if draw() < 0.5:
            starts[longer] += 1
        else:
            ends[longer] -= 1
    return first[starts[0] : ends[0]], second[starts[1] : ends[1]]
