"""Masking and pair truncation of the benchmark's instance generator, done once at preparation.

Both are pure functions of a ``random.Random``. The order of random draws is part of the definition:
from the same generator state they produce the same instance as the benchmark's published generator
(``create_pretraining_data``). Tokens are integers here and strings there, which does not change the
draws.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Of the benchmark's generator: share of a sequence's tokens that it masks,
# and their maximum number.
MASKED_SHARE = 0.15
MAX_PREDICTIONS = 76


@dataclass(frozen=True)
class MaskingRule:
    """Parameters of static masking: the benchmark's options and the vocabulary's special ids."""

    masked_lm_prob: float  # share of a sequence's tokens to predict
    max_predictions: int  # maximum predictions per sequence, tokens
    mask_id: int
    cls_id: int  # never masked, like [SEP]
    sep_id: int
    vocab_size: int  # random replacements are drawn from ids 0 to vocab_size - 1


def shuffle(items: list[Any], rng: random.Random) -> None:
    """Shuffle like ``rng.shuffle(items)``, with the same draws and result in half the time:
    rejection sampling is inlined.
    """
    getrandbits = rng.getrandbits
    for i in range(len(items) - 1, 0, -1):
        bits = (i + 1).bit_length()
        j = getrandbits(bits)
        while j > i:
            j = getrandbits(bits)
        items[i], items[j] = items[j], items[i]


def num_predictions(length: int, rule: MaskingRule) -> int:
    """Return how many of ``length`` tokens are predicted;
    Python's rounding (half to even) is part of the rule.
    """
    return min(rule.max_predictions, max(1, round(length * rule.masked_lm_prob)))


def mask_tokens(
    tokens: list[int], rule: MaskingRule, rng: random.Random
) -> tuple[list[int], list[int], list[int]]:
    """Mask one sequence: of the chosen tokens 80 % become [MASK], 10 % stay,
    10 % become a random word.

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
    draw = rng.random
    masked = list(tokens)
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
    """Truncate a pair of sentences to ``max_tokens`` in total.

    Removes one token at a time from the longer sentence (the second if equal),
    from the front or back with equal probability.

    Returns:
        (first, second), truncated copies.
    """
    starts = [0, 0]
    ends = [len(first), len(second)]
    excess = len(first) + len(second) - max_tokens
    draw = rng.random
    for _ in range(excess):
        longer = 0 if ends[0] - starts[0] > ends[1] - starts[1] else 1
        if draw() < 0.5:
            starts[longer] += 1
        else:
            ends[longer] -= 1
    return first[starts[0] : ends[0]], second[starts[1] : ends[1]]
