"""Listeners of a run: the interface, the MLPerf log from run_start to run_stop,
and a fan-out to several listeners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlbert.mlperf.mllog import MLPerfLogger
from mlbert.runs.progress import RunOutcome, TrainState


class Events:
    """Callbacks of a run. They do nothing by default; a listener overrides the ones it needs."""

    def start(self, state: TrainState) -> None:
        """The clock starts; no sample has been touched."""

    def opened(self, state: TrainState) -> None:
        """The data is open."""

    def should_log(self, step: int) -> bool:
        """Return True if `step` should be called for this step. Must be the same on every rank."""
        return False

    def step(
        self,
        state: TrainState,
        loss: float,
        lr: float,
        grad_norm: float,
        ranks: Sequence[float] = (),
    ) -> None:
        """A step for which `should_log` was True is done. ``state`` includes it.

        ``ranks``: each rank's seconds per step since the last call,
        without its waits for the other ranks.
        """

    def skipped(self, state: TrainState) -> None:
        """A step was skipped because its gradient was not finite."""

    def evaluation_start(self, state: TrainState) -> None:
        """An evaluation is queued."""

    def evaluation(self, state: TrainState, metrics: Mapping[str, float], seconds: float) -> None:
        """An evaluation's result is known, ``seconds`` after `start`."""

    def stop(self, outcome: RunOutcome) -> None:
        """The clock stops."""

    def say(self, text: str) -> None:
        """One line for a person."""


class MLPerfEvents(Events):
    """Writes the MLPerf log of a run. ``epoch_num`` is the number of samples so far.

    Args:
        log: this rank's log.
        eval_samples: returns the size of the evaluation set; called at the end.
    """

    def __init__(self, log: MLPerfLogger, eval_samples: Callable[[], int]) -> None:
        self._log = log
        self._eval_samples = eval_samples

    def start(self, state: TrainState) -> None:
        """Log run_start."""
        self._log.start("run_start")

    def opened(self, state: TrainState) -> None:
        """Log training as one block of one epoch."""
        self._log.start("epoch_start", metadata={"epoch_num": state.samples})
        self._log.start("block_start", metadata={"first_epoch_num": 1, "epoch_count": 1})

    def evaluation_start(self, state: TrainState) -> None:
        """Log eval_start."""
        self._log.start("eval_start", metadata={"epoch_num": state.samples})

    def evaluation(self, state: TrainState, metrics: Mapping[str, float], seconds: float) -> None:
        """Log the accuracy at the time at which it is known."""
        self._log.end("eval_stop", metadata={"epoch_num": state.samples})
        self._log.event("eval_accuracy", state.accuracy, metadata={"epoch_num": state.samples})

    def stop(self, outcome: RunOutcome) -> None:
        """Log the events that precede run_stop, which `Lifecycle.finish` writes."""
        state = outcome.state
        samples = state.samples
        self._log.end("block_stop", metadata={"first_epoch_num": 1})
        self._log.end("epoch_stop", metadata={"epoch_num": samples})
        self._log.event("train_samples", samples)
        self._log.event("eval_samples", self._eval_samples())
        self._log.event("steps", state.step)
        self._log.event("skipped_steps", state.skipped_steps)
        self._log.event("tokens", state.tokens)


def _to_all(name: str) -> Callable[..., None]:
    """Return a method that calls the method ``name`` of every listener with its own arguments."""

    def call(self: EventFanout, *arguments: Any, **named: Any) -> None:
        for listener in self._listeners:
            getattr(listener, name)(*arguments, **named)

    return call


class EventFanout(Events):
    """Forwards every event to several listeners, in order."""

    def __init__(self, listeners: Sequence[Events]) -> None:
        self._listeners = listeners

    def should_log(self, step: int) -> bool:
        return any(listener.should_log(step) for listener in self._listeners)

    start = _to_all("start")
    opened = _to_all("opened")
    step = _to_all("step")
    skipped = _to_all("skipped")
    evaluation_start = _to_all("evaluation_start")
    evaluation = _to_all("evaluation")
    stop = _to_all("stop")
    say = _to_all("say")
