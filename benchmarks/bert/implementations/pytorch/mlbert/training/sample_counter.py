"""Count steps before their results are known, and subtract a step again if its update was skipped.

On a CUDA device a step's result is read only after the next step is queued, so that the device never waits for the
host. Until then the step counts as if it had changed the weights.
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
    """Counts the samples of one run.

    Args:
        state: the run's progress, updated in place.
        skipped: called when an update turns out to have been skipped, with the state at that step.
    """

    def __init__(self, state: TrainState, skipped: Callable[[TrainState], None]) -> None:
        self._state, self._skipped = state, skipped
        self._open: _Entry | None = None

    @property
    def is_open(self) -> bool:
        """True while the last step's result is not known."""
        return self._open is not None

    def count(self, result: StepResult, counts: StepCounts) -> None:
        """Record a queued step and finalize the previous one."""
        self.settle()
        self._state.step += 1
        self._state.add(counts)
        self._open = _Entry(result, self._state.step, counts)

    def settle(self) -> None:
        """Wait for the last step, and subtract its samples if its update was skipped."""
        entry, self._open = self._open, None
        if entry is None or not entry.result.skipped:
            return
        self._state.skipped_steps += 1
        self._state.add(entry.counts, sign=-1)
        self._skipped(replace(self._state, step=entry.step))
