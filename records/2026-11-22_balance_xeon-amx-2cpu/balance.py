"""How equally tokens are shared out, and what that takes: `python balance.py SEED > seed_SEED.txt`, three minutes.

A made-up set of two million sequences with the published length quantiles, of which only lengths exist, cut into bins
of 1-128, 129-256, 257-384 and 385-512 tokens. Readers, orders and deals are the product's own.
"""

import itertools
import statistics
import sys
import time
from dataclasses import replace

import numpy as np
from mlbert.feed.synthetic import LENGTH_QUANTILES, lengths_at
from mlbert.store.base import StoreInfo
from mlbert.store.bins import BinnedStore
from mlbert.store.deals import by_length, contiguous, snake
from mlbert.store.order import StepReader, StepShare

SEQUENCES, EACH, COUNTS, EDGES = 2_000_000, 16, (6, 3, 2, 5), (128, 256, 384, 512)
PUBLISHED_MEAN = 254.2
SEED = int(sys.argv[1])


class Lengths:
    """A store of sequences of which only the lengths are known."""

    num_packs = 0

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def lengths_of(self, indices):
        return self.lengths[indices]


class Steps:
    """Lengths of any step's units, in the reader's order."""

    def __init__(self, store, world_size, counts):
        self.share = StepShare(EACH, 1, 0, world_size)
        options = {"max_tokens": 512, "max_sequences": 1, "seed": SEED, "deal": contiguous, "mask": None}
        self.reader = StepReader(store, self.share, bin_counts=counts, **options)

    def lengths(self, step, units):
        epoch, within = divmod(step, self.reader.steps_per_epoch)
        return self.reader.units.lengths(self.reader._order(epoch, within * self.share.global_units + units))


def max_over_mean(steps, group_size, step, dealt):
    """Of the tokens of all ranks; the deal of each rank by itself in the first step, of all ranks at once in others."""
    world_size = steps.share.world_size
    lengths = steps.lengths(step, np.arange(steps.share.global_units))
    in_groups = -np.sort(-lengths.reshape(-1, group_size * EACH))
    tokens = in_groups[:, dealt].sum(-1).reshape(-1) if group_size > 1 else lengths.reshape(-1, EACH).sum(-1)
    if step == 0:
        deal = by_length(group_size)
        parts = [deal(replace(steps.share, rank=rank), lambda units: lengths[units])[0] for rank in range(world_size)]
        assert tokens.tolist() == [lengths[units].sum() for units in parts]
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(lengths)))
    return tokens.max() / tokens.mean()


def table(stores, world_size, group_size, num_steps):
    """A line for each way, and how long steps wait for the slowest rank."""
    for name, (store, counts), size in (
        ("neither", stores["whole"], 1),
        ("bins only", stores["binned"], 1),
        ("exchange only", stores["whole"], group_size),
        ("both", stores["binned"], group_size),
    ):
        steps = Steps(store, world_size, counts)
        longest_first = np.arange(size * EACH, 0, -1)
        dealt = np.stack([snake(longest_first, size, part) for part in range(size)])
        ratios = [max_over_mean(steps, size, step, dealt) for step in range(num_steps)]
        mean, median = statistics.mean(ratios), statistics.median(ratios)
        print(
            f"{world_size:5} ranks, groups of {group_size:5}: {name:14} {num_steps} steps  mean {mean:.4f}  "
            f"median {median:.4f}  worst {max(ratios):.4f}  wait {100 * (mean - 1):.2f} %",
            flush=True,
        )


def speed(store, world_size, group_size, repeats=300):
    """Seconds of one rank's order, composition and deal, each time another step; and of all ranks, one by one."""
    deal, steps = by_length(group_size), Steps(store, world_size, COUNTS)

    def one(rank, step):
        started = time.perf_counter()
        (units,) = deal(replace(steps.share, rank=rank), lambda units: steps.lengths(step, units))
        steps.lengths(step, units)  # which sequences they are
        return time.perf_counter() - started

    times = [one(step * 37 % world_size, step) for step in range(repeats)]
    whole = sum(one(rank, 0) for rank in range(world_size))
    print(
        f"{world_size:5} ranks, groups of {group_size:5}: one rank's step {1e3 * statistics.median(times):.2f} ms "
        f"(median of {repeats}; longest {1e3 * max(times):.2f}); one step of all ranks in one process {whole:.2f} s",
        flush=True,
    )


def main():
    lengths = lengths_at(np.random.default_rng(SEED).random(SEQUENCES), 512)
    parts = [lengths[(lengths > low) & (lengths <= high)] for low, high in itertools.pairwise((0, *EDGES))]
    info = StoreInfo(None, "bins", "", 512, 76, SEQUENCES, None, None)
    binned = BinnedStore(info, [Lengths(part) for part in parts])
    stores = {"whole": (Lengths(lengths), None), "binned": (binned, COUNTS)}
    shares = ", ".join(f"{len(part) / SEQUENCES:.3f}" for part in parts)
    mean = sum(count * part.mean() for count, part in zip(COUNTS, parts, strict=True)) / EACH
    print(f"quantiles {LENGTH_QUANTILES}")
    print(f"mean {lengths.mean():.1f} tokens (published {PUBLISHED_MEAN}); bins hold {shares} of the sequences")
    print(f"mean with {COUNTS} of {EACH}: {mean:.1f} tokens")
    for world_size, group_size in ((8, 8), (1024, 8), (1024, 1024)):
        table(stores, world_size, group_size, 1000)
    for world_size, group_size in ((8, 8), (1024, 8), (1368, 8), (1024, 1024), (1368, 1368)):
        speed(binned, world_size, group_size)


main()
