"""Progress display of a run, and its metrics file with one JSON line per log point.

On a terminal it shows a Rich progress bar, otherwise plain lines, at most one every few seconds.
Only rank 0 writes.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mlbert.host.console import short_duration
from mlbert.host.files import writing
from mlbert.host.metrics import EVALUATION_PREFIX
from mlbert.host.metrics_file import read_points
from mlbert.runs.events import Events
from mlbert.runs.progress import NO_LIMIT, Limits, TrainState

PLAIN_LINE_SECONDS = 5.0
WIDE_COLUMNS = 110  # of a terminal that shows a bar next to all figures


class Monitor(Events):
    """Progress display and ``metrics.jsonl``.

    Args:
        path: the metrics file; None on ranks other than 0.
        limits: used to estimate the time left.
        log_every_steps: steps between log points.
        console: where progress is displayed.
        append: continue an existing metrics file, dropping the lines after the checkpoint.
    """

    def __init__(
        self,
        path: Path | None,
        limits: Limits,
        log_every_steps: int,
        console: Console,
        append: bool = False,
    ) -> None:
        self.limits = limits
        self.every = log_every_steps
        self.console = console
        self._hosts: Sequence[str] = ()
        self.path = path
        self.append = append
        self.active = path is not None
        self._file: IO[str] | None = None
        self._progress: Progress | None = None
        self._started = self._last_line = time.monotonic()
        self._fraction_at_start = self._seconds_before = 0.0

    def open(self, state: TrainState, hosts: Sequence[str] = ()) -> None:
        """Open the metrics file and the display, before the clock starts.

        ``hosts``: the machine of each rank.
        """
        self._hosts = hosts
        if self.path is not None:
            self._file = self._open(self.path, state.step)
        self._started = self._last_line = time.monotonic()
        self._seconds_before = state.elapsed_seconds
        self._fraction_at_start = self._fraction(state, 0.0)
        if self.active and self.console.is_terminal:
            figures = TextColumn("step {task.fields[step]}  {task.fields[figures]}")
            left = TextColumn("{task.fields[left]}")
            columns = (
                (figures, BarColumn(bar_width=None), TimeElapsedColumn(), left)
                if self._is_wide
                else (figures, left)
            )
            self._progress = Progress(*columns, console=self.console)
            self._progress.add_task(
                "train", total=1.0, step=0, figures=self._figures(state, 0.0, "-"), left=""
            )
            self._progress.start()

    def should_log(self, step: int) -> bool:
        """Return True if this step is a log point; the same on every rank."""
        return self.every > 0 and (step % self.every == 0 or step == 1)

    def step(
        self,
        state: TrainState,
        loss: float,
        lr: float,
        grad_norm: float,
        ranks: Sequence[float] = (),
    ) -> None:
        """Write and show a log point.

        The rate is the average over all steps, including this one; so is the loader's share.
        With several ranks, name the slowest.
        """
        rate = state.samples / state.train_seconds if state.train_seconds else 0.0
        seconds = time.monotonic() - self._started
        extra, words = _spread(ranks, self._hosts) if len(ranks) > 1 else ({}, "")
        if state.loader_share is not None:
            extra["loader_share"] = state.loader_share
        self._write(
            kind="step",
            step=state.step,
            samples=state.samples,
            seconds=round(self._seconds_before + seconds, 3),
            loss=loss,
            learning_rate=lr,
            grad_norm=grad_norm,
            samples_per_second=round(rate, 1),
            **extra,
        )
        self._show(state, f"{loss:.3f}", rate, seconds, words)

    def evaluation(self, state: TrainState, metrics: Mapping[str, float], seconds: float) -> None:
        """Write and show an evaluation's result."""
        values_by_key = {f"{EVALUATION_PREFIX}accuracy": state.accuracy}
        for name, value in metrics.items():  # one of them may be called accuracy
            values_by_key[f"{EVALUATION_PREFIX}{name}"] = value
        self._write(
            kind="evaluation",
            step=state.step,
            samples=state.samples,
            seconds=round(seconds, 3),
            **values_by_key,
        )
        values = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.say(f"evaluation at {state.samples} samples, {seconds:.1f} s: {values}")

    def skipped(self, state: TrainState) -> None:
        """Write and show a step that was skipped because its gradient was not finite."""
        self._write(kind="skipped", step=state.step, samples=state.samples)
        self.say(f"step {state.step} skipped: non-finite gradient ({state.skipped_steps} so far)")

    def say(self, text: str) -> None:
        """Print one line, on rank 0 only."""
        if self.active:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Close the display and the file."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, path: Path, step: int) -> IO[str]:
        kept: list[dict[str, Any]] = []
        if self.append and path.exists():
            points, foreign = read_points(path)
            # Later steps will be repeated.
            kept = [point for point in points if point["step"] <= step]
            if foreign:
                self.say(f"warning: {path}: skipping {foreign} lines that are not metrics of a run")
        with writing(path, "Set LOGDIR to a writable folder"):
            file = path.open("w", encoding="utf-8")
            file.writelines(json.dumps(point) + "\n" for point in kept)
            file.flush()
        return file

    @property
    def _knows_steps(self) -> bool:
        """True if the number of the last step is known."""
        return self.limits.max_steps < NO_LIMIT and self.limits.step_tokens is None

    def _fraction(self, state: TrainState, seconds: float) -> float:
        """Return the used share of the limit that is closest."""
        shares = [self.limits.share_done(state)]
        if self.limits.max_seconds:
            shares.append((self._seconds_before + seconds) / self.limits.max_seconds)
        return min(max(shares), 1.0)

    def _show(
        self, state: TrainState, loss: str, rate: float, seconds: float, slowest: str
    ) -> None:
        if not self.active:
            return
        fraction = self._fraction(state, seconds)
        gained = fraction - self._fraction_at_start
        left = "time left unknown"
        if gained > 0:
            left = f"at most {short_duration(seconds * (1 - fraction) / gained)} left"
        total = f"/{self.limits.max_steps}" if self._knows_steps else ""
        if self._progress is not None:
            self._progress.update(
                self._progress.task_ids[0],
                completed=fraction,
                step=state.step,
                figures=self._figures(state, rate, loss),
                left=left,
            )
        elif time.monotonic() - self._last_line >= PLAIN_LINE_SECONDS:
            self._last_line = time.monotonic()
            self.say(
                f"step {state.step}{total}  {self._figures(state, rate, loss, is_full=True)}  "
                f"{seconds:.0f} s, {left}{slowest}"
            )

    @property
    def _is_wide(self) -> bool:
        """True if a bar and all figures fit the width of the terminal."""
        return self.console.width >= WIDE_COLUMNS

    def _figures(
        self, state: TrainState, rate: float, loss: str, is_full: bool | None = None
    ) -> str:
        """Return the figures of a step. A narrow terminal shows the loss only until an accuracy is
        known that has a target, and not the loader's share.
        """
        accuracy = self._accuracy(state)
        parts = [f"{rate:.0f} samples/s" if rate else "- samples/s"]
        if is_full or (is_full is None and self._is_wide):
            parts += [f"loss {loss}", _loader_words(state), accuracy]
        elif state.accuracy and self.limits.target_accuracy is not None:
            parts += [accuracy]
        else:
            parts += [f"loss {loss}", accuracy]
        return "  ".join(filter(None, parts))

    def _accuracy(self, state: TrainState) -> str:
        """Return the accuracy of the last evaluation, if there was one, and the target."""
        target = self.limits.target_accuracy
        if not state.accuracy:
            return "" if target is None else f"target {target:g}"
        of_target = "" if target is None else f" of {target:g}"
        return f"accuracy {state.accuracy:.4f}{of_target}"

    def _write(self, **values: object) -> None:
        if self._file is None:
            return
        with writing(str(self.path), "Free space on its disk"):
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()


def _loader_words(state: TrainState) -> str:
    """Return the loader's share of a step as a part of a line; empty if it was not measured."""
    share = state.loader_share
    return "" if share is None else f"loader {share:.1%}"


def _spread(ranks: Sequence[float], hosts: Sequence[str]) -> tuple[dict[str, object], str]:
    """Return the slowest rank and the spread of the ranks' own step times,
    as metrics and as the end of a line.
    """
    most, median, least = (round(of(ranks), 6) for of in (max, statistics.median, min))
    rank = max(range(len(ranks)), key=ranks.__getitem__)
    words = (
        f"  slowest: rank {rank} on {hosts[rank]}, "
        f"{most:.3f} s a step (median {median:.3f}, least {least:.3f})"
    )
    seconds = {
        "slowest_rank_seconds": most,
        "median_rank_seconds": median,
        "fastest_rank_seconds": least,
    }
    return {"slowest_rank": rank, "slowest_host": hosts[rank], **seconds}, words
