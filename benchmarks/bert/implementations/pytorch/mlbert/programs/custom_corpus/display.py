"""Progress display of pre-training on custom text: a bar or lines, and warnings."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from mlbert.programs.console import short_duration
from mlbert.runs.events import Events
from mlbert.runs.progress import RunOutcome, TrainState

LINE_SECONDS = 10.0
_EARLY, _LATE = 0.3, 0.6  # fractions of the time after which accuracy is compared with the baselines


class Display(Events):
    """Show the progress of a run.

    Args:
        seconds: duration of the whole run.
        baselines: held-out accuracies of the most frequent token and of the bigram model.
    """

    def __init__(self, console: Console, seconds: float, baselines: Mapping[str, Any], log_every_steps: int) -> None:
        self._console, self._seconds, self._every = console, seconds, log_every_steps
        self._most_frequent = float(baselines["most_frequent_accuracy"])
        self._bigram = float(baselines["bigram_accuracy"])
        self._accuracy: float | None = None
        self._last_print = time.monotonic()
        self._warned = 0
        self._bar: Progress | None = None

    def opened(self, state: TrainState) -> None:
        """Start the bar."""
        if self._console.is_terminal:
            text = "{task.fields[words]}"
            self._bar = Progress(
                TextColumn("{task.percentage:3.0f} %"), BarColumn(), TextColumn(text), console=self._console
            )
            self._bar.add_task("train", total=1.0, words="")
            self._bar.start()

    def should_log(self, step: int) -> bool:
        """Return True for steps to show: every ``log_every_steps``, or after 10 s."""
        return step % self._every == 0 or time.monotonic() - self._last_print >= LINE_SECONDS

    def step(self, state: TrainState, loss: float, lr: float, grad_norm: float, ranks: Sequence[float] = ()) -> None:
        """Show loss, accuracy and speed."""
        share = min(1.0, state.due_seconds / self._seconds)
        left = short_duration(max(0.0, self._seconds - state.due_seconds))
        parts = [f"{left} left", f"loss {loss:.2f}"]
        if self._accuracy is not None:
            parts.append(f"accuracy {self._accuracy:.3f}")
        parts.append(f"{state.tokens / max(state.train_seconds, 1e-9):,.0f} tokens/s")
        words = ", ".join(parts)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=share, words=words)
        if time.monotonic() - self._last_print >= LINE_SECONDS:
            self._last_print = time.monotonic()
            if self._bar is None:
                self.say(f"{share:4.0%}  {words}")

    def evaluation(self, state: TrainState, metrics: Mapping[str, float], seconds: float) -> None:
        """Print the accuracy on held-out text and compare it with the baselines."""
        accuracy = self._accuracy = state.accuracy
        self.say(f"held-out accuracy {accuracy:.4f} after {short_duration(seconds)}")
        share = seconds / self._seconds
        if self._warned < 1 and share >= _EARLY and accuracy <= self._most_frequent + 0.005:
            self._warned = 1
            what = f"always guessing the most frequent token ({self._most_frequent:.4f})"
            self.say(f"warning: no better than {what}: the model has learnt nothing else yet")
        elif self._warned < 2 and share >= _LATE and accuracy <= self._bigram:
            self._warned = 2
            what = f"guessing from one neighbour ({self._bigram:.4f})"
            self.say(f"warning: no better than {what}: use more --minutes, or a smaller --size")

    def skipped(self, state: TrainState) -> None:
        """Print a step that was skipped because its gradient was not finite."""
        self.say(f"step {state.step} skipped: non-finite gradient ({state.skipped_steps} so far)")

    def stop(self, outcome: RunOutcome | None) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(None)

    def say(self, text: str) -> None:
        """Print one line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
