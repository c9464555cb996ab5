"""What a run tells and to whom: the listener's protocol, MLPerf's events from run_start to run_stop, several as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mlbert.mlperf.mllog import MLPerfLogger
from mlbert.runs.progress import RunOutcome, TrainState


class Events:
    """What a run tells. Nothing here does anything: who listens overrides what it wants to hear."""

    def start(self, state: TrainState) -> None:
        """The clock starts; no sample has been touched."""

    def opened(self, state: TrainState) -> None:
        """The data is open."""

    def should_log(self, step: int) -> bool:
        """Whether `step` is to be told of this one: the same answer on every rank."""
        return False

    def step(self, state: TrainState, loss: float, lr: float, grad_norm: float) -> None:
        """A step that somebody wanted. ``state`` includes it."""

    def skipped(self, state: TrainState) -> None:
        """A step was left out because its gradient was not finite."""

    def evaluation_start(self, state: TrainState) -> None:
        """An evaluation is queued."""

    def evaluation(self, state: TrainState, metrics: Mapping[str, float], seconds: float) -> None:
        """Its result is known, ``seconds`` after `start`."""

    def stop(self, outcome: RunOutcome) -> None:
        """The clock stops."""

    def say(self, text: str) -> None:
        """One line for a person."""


class MLPerfEvents(Events):
    """The MLPerf log of a run; its words for samples so far is ``epoch_num``.

    Args:
        log: of this rank.
        eval_samples: size of the evaluation; asked for at the end.
    """

    def __init__(self, log: MLPerfLogger, eval_samples: Callable[[], int]) -> None:
        self._log, self._eval_samples = log, eval_samples

    def start(self, state: TrainState) -> None:
        """The clock starts."""
        self._log.start("run_start")

    def opened(self, state: TrainState) -> None:
        """Training is one block of one epoch."""
        self._log.start("epoch_start", metadata={"epoch_num": state.samples})
        self._log.start("block_start", metadata={"first_epoch_num": 1, "epoch_count": 1})

    def evaluation_start(self, state: TrainState) -> None:
        """An evaluation is queued."""
        self._log.start("eval_start", metadata={"epoch_num": state.samples})

    def evaluation(self, state: TrainState, metrics: Mapping[str, float], seconds: float) -> None:
        """The accuracy gets the time at which it is known."""
        self._log.end("eval_stop", metadata={"epoch_num": state.samples})
        self._log.event("eval_accuracy", state.accuracy, metadata={"epoch_num": state.samples})

    def stop(self, outcome: RunOutcome) -> None:
        """What comes before run_stop, which `Lifecycle.finish` has written."""
        state = outcome.state
        samples = state.samples
        self._log.end("block_stop", metadata={"first_epoch_num": 1})
        self._log.end("epoch_stop", metadata={"epoch_num": samples})
        self._log.event("train_samples", samples)
        self._log.event("eval_samples", self._eval_samples())
        self._log.event("steps", state.step)
        self._log.event("skipped_steps", state.skipped_steps)
        self._log.event("tokens", state.tokens)


class EventFanout(Events):
    """Tells several listeners, in order."""

    def __init__(self, listeners: Sequence[Events]) -> None:
        self._listeners = listeners

    def start(self, state: TrainState) -> None:
        for listener in self._listeners:
            listener.start(state)

    def opened(self, state: TrainState) -> None:
        for listener in self._listeners:
            listener.opened(state)

    def should_log(self, step: int) -> bool:
        return any(listener.should_log(step) for listener in self._listeners)

    def step(self, state: TrainState, loss: float, lr: float, grad_norm: float) -> None:
        for listener in self._listeners:
            listener.step(state, loss, lr, grad_norm)

    def skipped(self, state: TrainState) -> None:
        for listener in self._listeners:
            listener.skipped(state)

    def evaluation_start(self, state: TrainState) -> None:
        for listener in self._listeners:
            listener.evaluation_start(state)

    def evaluation(self, state: TrainState, metrics: Mapping[str, float], seconds: float) -> None:
        for listener in self._listeners:
            listener.evaluation(state, metrics, seconds)

    def stop(self, outcome: RunOutcome) -> None:
        for listener in self._listeners:
            listener.stop(outcome)

    def say(self, text: str) -> None:
        for listener in self._listeners:
            listener.say(text)
