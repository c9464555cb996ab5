"""Simulate how sequences of a step are distributed over thousands of ranks, with the program's order and packing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlbert.data.formats.order import snake
from mlbert.data.formats.packing import pack_lengths
from mlbert.data.formats.permutation import Permutation
from mlbert.data.loading.synthetic import lengths_at
from mlbert.report.run_plan import bytes_a_step

SEQUENCES = 400_000  # dummy sequences with the published length quantiles
MAX_TOKENS, MAX_SEQUENCES = 512, 3
STEPS = 50


@dataclass(frozen=True)
class Balance:
    """Tokens of the fullest rank relative to the mean of all ranks.

    Attributes:
        name: how sequences are distributed.
        mean, worst: ratio over `STEPS` steps.
        sequences: mean sequences per step over all ranks.
    """

    name: str
    mean: float
    worst: float
    sequences: float


def balances(ranks: int, sequences: int, group: int, seed: int = 1) -> list[Balance]:
    """Return the load balance for each way to distribute sequences.

    Args:
        ranks: total ranks.
        sequences: nominal sequences per rank and step: two make a pack.
        group: consecutive ranks that exchange sequences; divides ``ranks``.
        seed: seed of lengths and orders.
    """
    lengths = lengths_at(np.random.default_rng(seed).random(max(SEQUENCES, 4 * ranks * sequences)), MAX_TOKENS)
    packs = pack_lengths(lengths, MAX_TOKENS, MAX_SEQUENCES, seed)
    of_packs = np.add.reduceat(lengths[packs.order], packs.offsets[:-1])
    members = np.diff(packs.offsets)
    each = max(1, sequences // 2)
    found = [_balance("packs", of_packs, members, ranks, each, 1, seed)]
    ones = np.ones(len(lengths), np.int64)
    for name, size in (("single sequences, as they come", 1), (f"exchanged in groups of {group}", group)):
        found.append(_balance(name, lengths, ones, ranks, sequences, size, seed))
    if group != ranks:
        found.append(_balance("exchanged among all", lengths, ones, ranks, sequences, ranks, seed))
    return found


def _balance(
    name: str, tokens: np.ndarray, members: np.ndarray, ranks: int, each: int, group: int, seed: int
) -> Balance:
    """Return the balance for units of ``tokens`` tokens and ``members`` sequences, ``each`` units per rank and step."""
    order = Permutation(len(tokens), (seed, 0))
    ratios, counts = [], []
    size = ranks * each
    # A group's units are sorted by length; which sorted positions each rank gets does not depend on the lengths.
    falling = np.arange(group * each, 0, -1)
    dealt = np.stack([snake(falling, group, part) for part in range(group)]) if group > 1 else None
    for step in range(min(STEPS, len(tokens) // size)):
        units = order(np.arange(step * size, (step + 1) * size))
        if dealt is None:
            of_ranks = tokens[units].reshape(ranks, each).sum(1)
        else:
            in_groups = -np.sort(-tokens[units].reshape(ranks // group, group * each))
            of_ranks = in_groups[:, dealt].sum(-1).reshape(-1)
        ratios.append(float(of_ranks.max() / of_ranks.mean()))
        counts.append(int(members[units].sum()))
    return Balance(name, float(np.mean(ratios)), max(ratios), float(np.mean(counts)))


def traffic(parameters: int, ranks: int, per_node: int) -> dict[str, float]:
    """Return the bytes that each rank sends per step, by how the optimizer state is shared."""
    ways = {"off": 1, "node": per_node, "all": ranks}
    return {name: bytes_a_step(parameters, ranks, sharers, 2) for name, sharers in ways.items()}
