"""Thousands of ranks in one process: what each would get of a step, by the program's own order, packing and deal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlbert.data.formats.order import snake
from mlbert.data.formats.packing import pack_lengths
from mlbert.data.formats.permutation import Permutation
from mlbert.data.loading.synthetic import lengths_at
from mlbert.report.run_plan import bytes_a_step

SEQUENCES = 400_000  # made up with the published quantiles of lengths
MAX_TOKENS, MAX_SEQUENCES = 512, 3
STEPS = 50


@dataclass(frozen=True)
class Balance:
    """Tokens of the fullest rank over the mean of all ranks.

    Attributes:
        name: how sequences are handed out.
        mean, worst: over `STEPS` steps.
        sequences: on average of a step, over all ranks.
    """

    name: str
    mean: float
    worst: float
    sequences: float


def balances(ranks: int, sequences: int, group: int, seed: int = 1) -> list[Balance]:
    """How evenly ``sequences`` a rank and step are shared out, for each way that the program knows.

    Args:
        ranks: in all.
        sequences: of one rank and step, nominal: two make a pack.
        group: ranks in a row that exchange among themselves; divides ``ranks``.
        seed: of lengths and orders.
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
    """Of units with so many tokens and sequences, ``each`` of them a rank and step."""
    order = Permutation(len(tokens), (seed, 0))
    ratios, counts = [], []
    size = ranks * each
    # Which places of a group's units, longest first, go to each of its ranks does not depend on the lengths.
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
    """Bytes that each rank sends a step, by how the optimizer's state is shared."""
    ways = {"off": 1, "node": per_node, "all": ranks}
    return {name: bytes_a_step(parameters, ranks, sharers, 2) for name, sharers in ways.items()}
