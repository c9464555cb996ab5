"""Counts steps before their results are known, and takes back what a step counted whose update was left out.

On a CUDA device a step is asked for its result only when the next one is queued, so the device never waits for the
host. Until then it counts as if it had changed the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mlbert.runs.progress import StepCounts, TrainState
from mlbert.training.step import StepResult


@dataclass(frozen=True)
class _Entry:
    result: StepResult
    step: int
    counts: StepCounts


class SampleCounter:
    """The counting of one run.

    Args:
        state: what is counted into.
        skipped: called with the state, as of the step, when an update turns out to be left out.
    """

    def __init__(self, state: TrainState, skipped: Callable[[TrainState], None]) -> None:
        self._state, self._skipped = state, skipped
        self._open: _Entry | None = None

    @property
    def is_open(self) -> bool:
        """Whether the last step's result is not known yet."""
        return self._open is not None

    def count(self, result: StepResult, counts: StepCounts) -> None:
        """Enters a step that is queued; the one before it is settled."""
        self.settle()
        self._state.step += 1
        self._state.add(counts)
        self._open = _Entry(result, self._state.step, counts)

    def settle(self) -> None:
        """Waits for the last step, and takes its samples back if its update was left out."""
        entry, self._open = self._open, None
        if entry is None or not entry.result.skipped:
            return
        self._state.skipped_steps += 1
        self._state.add(entry.counts, sign=-1)
        self._skipped(replace(self._state, step=entry.step))
