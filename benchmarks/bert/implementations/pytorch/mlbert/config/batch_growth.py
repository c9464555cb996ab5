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


@dataclass(frozen=True)
class TokenGrowth:
    """A batch that grows by one row at a time with the tokens that were trained, whatever share of
    the rows is padding.

    The size s, from `first` to `last` - 1, ends at this share of `tokens`:

        (first + ... + s) / (first + ... + (last - 1))

    So each size sees tokens in proportion to itself, as in `BatchGrowth`.

    Attributes:
        first: rows of step 0, at least 1.
        last: rows of the full batch, at least `first`.
        tokens: without padding, of the warm-up; at least 1.
    """

    first: int
    last: int
    tokens: int

    def __post_init__(self) -> None:
        assert 1 <= self.first <= self.last
        assert self.tokens >= 1

    @property
    def is_constant(self) -> bool:
        """True if each step has the full batch."""
        return self.first == self.last

    def size(self, tokens: int) -> int:
        """Return the rows of a step before which so many tokens were trained."""
        if self.is_constant or tokens >= self.tokens:
            return self.last
        num_sizes = self.last - self.first
        done = tokens * self._sum_of_sizes(num_sizes)

        def end(ended: int) -> int:
            return self.tokens * self._sum_of_sizes(ended)

        return self.first + bisect.bisect_right(range(num_sizes), done, key=end) - 1

    def _sum_of_sizes(self, count: int) -> int:
        return count * self.first + count * (count - 1) // 2


Growth = BatchGrowth | TokenGrowth


def growth_of(config: Configuration) -> Growth:
    """Return how the batch of a rank grows, in sequences, or with packing in rows: with the tokens
    of all ranks if STEP_TOKENS or BATCHSIZE_WARMUP_TOKENS is set, otherwise with the steps.
    """
    known = config.catalog.by_key
    last = config.get(known["train_batch_size"])
    assert isinstance(last, int)
    first = config.get(known["batchsize_warmup_start"])
    steps = config.get(known["batchsize_warmup_steps"])
    tokens = config.get(known["batchsize_warmup_tokens"])
    if isinstance(first, int) and isinstance(tokens, int):
        return TokenGrowth(first, last, tokens)
    if not isinstance(first, int) or not isinstance(steps, int):
        return BatchGrowth.constant(last)
    step_tokens = config.get(known["step_tokens"])
    if isinstance(step_tokens, int):
        return TokenGrowth(first, last, steps * step_tokens)
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
