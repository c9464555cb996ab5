"""Batch-size warm-up: how many sequences each step takes while the batch grows to its full size."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from mlbert.config.configuration import Configuration


@dataclass(frozen=True)
class BatchGrowth:
    """A batch that grows by one sequence at a time, each size for equally many steps.

    Step n (from 0) of the first `steps` takes first + floor(n (last - first) / steps) sequences, a
    later one `last`. Each size thus sees a number of tokens in proportion to itself, as in
    ModernBERT's batch-size warm-up.

    Attributes:
        first: sequences of step 0, at least 1.
        last: sequences of the full batch, at least `first`.
        steps: length of the warm-up; 0 if the batch does not grow.
    """

    first: int
    last: int
    steps: int

    def __post_init__(self) -> None:
        assert 1 <= self.first <= self.last
        assert self.steps >= 0

    @classmethod
    def constant(cls, size: int) -> BatchGrowth:
        """Return a batch of the same size in each step."""
        return cls(size, size, 0)

    @property
    def is_constant(self) -> bool:
        """True if each step has the full batch."""
        return self.steps == 0 or self.first == self.last

    def size(self, step: int) -> int:
        """Return the sequences of a step, counted from 0."""
        if step >= self.steps:
            return self.last
        return self.first + step * (self.last - self.first) // self.steps

    def before(self, step: int) -> int:
        """Return the sequences of all steps before a step."""
        growing = min(step, self.steps)
        total = growing * self.first + (step - growing) * self.last
        if growing:
            total += floor_sum(growing, self.last - self.first, self.steps)
        return total

    def full_batches(self, step: int) -> float:
        """Return the sequences before a step in units of the full batch.

        A step below 0, such as the start of a ramp before the training, counts as step 0's batch.
        """
        if step < 0:
            return step * self.size(0) / self.last
        return self.before(step) / self.last

    def steps_for(self, sequences: float) -> int:
        """Return the least number of steps that take at least this many sequences."""
        enough = self.steps + int(sequences) // self.last + 1
        return bisect.bisect_left(range(enough), sequences, key=self.before)


def growth_of(config: Configuration) -> BatchGrowth:
    """Return how the batch of a rank grows, in sequences, or with packing in rows."""
    known = config.catalog.by_key
    last = config.get(known["train_batch_size"])
    assert isinstance(last, int)
    first = config.get(known["batchsize_warmup_start"])
    steps = config.get(known["batchsize_warmup_steps"])
    if not isinstance(first, int) or not isinstance(steps, int):
        return BatchGrowth.constant(last)
    return BatchGrowth(first, last, steps)


def floor_sum(count: int, numerator: int, denominator: int) -> int:
    """Return the sum of floor(i numerator / denominator) for i from 0 to count - 1.

    Counts the lattice points below a line by Euclid's algorithm, in O(log denominator); see
    Graham, Knuth, Patashnik, "Concrete Mathematics", section 3.5.
    """
    total = 0
    offset = 0
    while True:
        total += count * (count - 1) // 2 * (numerator // denominator)
        total += count * (offset // denominator)
        numerator %= denominator
        offset %= denominator
        highest = numerator * count + offset
        if highest < denominator:
            return total
        # Exchange the axes: count the points by rows.
        count, offset = divmod(highest, denominator)
        numerator, denominator = denominator, numerator
