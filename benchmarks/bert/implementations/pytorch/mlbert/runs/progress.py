"""Progress, limits and outcome of a run: plain numbers, stored in checkpoints."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, fields

from mlbert.host.errors import UserError
from mlbert.mlperf.mllog import constants
from mlbert.runs.config import RunConfig

NO_LIMIT = 10**9  # steps of a run that the clock ends
_LEAST_FACTOR = 1e-6  # keeps the learning rate above 0
_MOST_EVALUATION = 0.1  # share of the time, not counting the first and the last evaluation


@dataclass(frozen=True)
class StepCounts:
    """Counts of a step over all ranks: sequences, real tokens, model FLOPs."""

    samples: int
    tokens: int
    flops: int


@dataclass
class TrainState:
    """Progress of a run.

    Attributes:
        step: optimizer steps taken, skipped ones included.
        samples: sequences trained on, over all ranks.
        tokens: real tokens trained on, over all ranks.
        flops: model FLOPs of the training steps, over all ranks.
        skipped_steps: steps skipped because the gradient was not finite.
        next_eval_samples: number of samples at which the next evaluation is due.
        accuracy: the last evaluation's metric that is compared with the target (0 before the
            first).
        train_seconds: time in training steps, without evaluation.
        loader_seconds: the part of it in which this rank waited for its batches; 0 if that is not
            measured, as in TensorFlow.
        elapsed_seconds: time since run_start, summed over all parts of a resumed run.
        due_seconds: time since run_start at which an evaluation started now would end;
            compared with MAX_SECONDS.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    flops: int = 0
    skipped_steps: int = 0
    next_eval_samples: int = 0
    accuracy: float = 0.0
    train_seconds: float = 0.0
    loader_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    due_seconds: float = 0.0

    @property
    def updates(self) -> int:
        """Steps that changed the weights."""
        return self.step - self.skipped_steps

    @property
    def loader_share(self) -> float | None:
        """Share of the training steps' time in which this rank waited for its batches, rounded;
        None if it was not measured.
        """
        if not self.loader_seconds or not self.train_seconds:
            return None
        return round(self.loader_seconds / self.train_seconds, 4)

    def add(self, counts: StepCounts, sign: int = 1) -> None:
        """Add the counts of a step, or subtract them with sign -1."""
        self.samples += sign * counts.samples
        self.tokens += sign * counts.tokens
        self.flops += sign * counts.flops

    def to_json(self) -> dict[str, float]:
        """Return the fields as plain numbers."""
        return asdict(self)

    def restore(self, values: dict[str, float]) -> None:
        """Restore the fields of `to_json`. Raises ValueError if one is missing or invalid.

        Checkpoints of earlier versions have no ``loader_seconds``.
        """
        values = {"loader_seconds": 0.0, **values}
        for field in fields(self):
            value: object = values.get(field.name)
            is_number = (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and math.isfinite(value)
            )
            if not is_number or (values[field.name] < 0 and field.name != "accuracy"):
                raise ValueError(f"{field.name} is {value!r}")
        for field in fields(self):
            setattr(self, field.name, values[field.name])


class Clock:
    """Seconds since run_start, including earlier parts of a resumed run.

    Attributes:
        step_seconds, evaluation_seconds: duration of the last step and evaluation.
        evaluated_at, saved_at: `TrainState.due_seconds` at the last evaluation and checkpoint,
            or at the start.
    """

    def __init__(self, already_seconds: float) -> None:
        self._start = time.monotonic() - already_seconds
        self.step_seconds = self.evaluation_seconds = 0.0
        self.evaluated_at = self.saved_at = already_seconds

    def seconds(self) -> float:
        """Return the elapsed seconds."""
        return time.monotonic() - self._start


@dataclass(frozen=True)
class Pace:
    """Schedule of a run by the clock instead of by steps.

    Attributes:
        seconds: MAX_SECONDS.
        warmup, decay: shares of the time at the start and end, in which the schedule's learning
            rate rises linearly from 0 and falls linearly to 0.
        evaluate_every, save_every: minimum seconds between evaluations and between checkpoints.
    """

    seconds: float
    warmup: float
    decay: float
    evaluate_every: float
    save_every: float

    def factor(self, seconds: float) -> float:
        """Return the factor on the schedule's learning rate at this many seconds after
        run_start.
        """
        share = seconds / self.seconds
        return max(_LEAST_FACTOR, min(1.0, share / self.warmup, (1.0 - share) / self.decay))

    def evaluates(self, since: float, took: float) -> bool:
        """Return True if an evaluation is due ``since`` seconds after the last one, which took
        ``took`` seconds. Slow evaluations are less frequent, so that most of the time goes to
        training.
        """
        return since >= max(self.evaluate_every, took / _MOST_EVALUATION)


@dataclass(frozen=True)
class Limits:
    """Limits of a run.

    ``max_seconds`` is optional; without ``target_accuracy`` the run succeeds at a limit. With
    ``step_tokens``, that many tokens count as one step of ``max_steps``.
    """

    target_accuracy: float | None
    max_steps: int
    max_samples: int
    max_seconds: float | None
    max_skipped_steps: int
    step_tokens: int | None = None

    @classmethod
    def of(
        cls,
        run: RunConfig,
        *,
        target_accuracy: float | None,
        max_steps: int,
        step_tokens: int | None = None,
    ) -> Limits:
        """Return the limits of a run's settings, target metric and length of the schedule."""
        return cls(
            target_accuracy=target_accuracy,
            max_steps=max_steps,
            max_samples=run.max_samples_termination,
            max_seconds=run.max_seconds,
            max_skipped_steps=run.max_skipped_steps,
            step_tokens=step_tokens,
        )

    def place(self, state: TrainState) -> float:
        """Return the place in the schedule, in steps of ``max_steps``, for the next learning rate.

        Skipped steps do not count; with ``step_tokens``, their tokens do.
        """
        if self.step_tokens is None:
            return state.updates
        return state.tokens / self.step_tokens

    def _steps_done(self, state: TrainState) -> float:
        """Return how much of ``max_steps`` is done."""
        return state.step if self.step_tokens is None else self.place(state)

    def share_done(self, state: TrainState) -> float:
        """Return the used share of the limit of steps or samples that is closest."""
        return max(self._steps_done(state) / self.max_steps, state.samples / self.max_samples)

    def met(self, state: TrainState) -> bool:
        """Return True if an evaluation reached the target."""
        return self.target_accuracy is not None and state.accuracy >= self.target_accuracy

    def succeeds(self, state: TrainState) -> bool:
        """Return True if a run that reached a limit counts as a success."""
        return self.target_accuracy is None and state.skipped_steps <= self.max_skipped_steps

    def check_resumed(self, state: TrainState) -> None:
        """Raise UserError if a checkpoint's progress is beyond the end of the schedule."""
        if self.step_tokens is None and state.step > self.max_steps:
            reason = f"the checkpoint to resume from is at step {state.step}"
            remedy = f"Set MAX_STEPS to {state.step} or more, or use another LOGDIR"
            raise UserError("run.other-settings", f"MAX_STEPS {self.max_steps}", reason, remedy)

    @property
    def _end(self) -> str:
        if self.step_tokens is None:
            return f"MAX_STEPS {self.max_steps} reached"
        return f"{self.max_steps * self.step_tokens:,} tokens reached"

    def reached(self, state: TrainState, seconds: float) -> str | None:
        """Return why the run must end before the target is reached, or None to continue."""
        is_late = self.max_seconds is not None and seconds >= self.max_seconds
        checks: list[tuple[bool, str]] = [
            (
                state.skipped_steps > self.max_skipped_steps,
                f"{state.skipped_steps} steps had non-finite gradients",
            ),
            (self._steps_done(state) >= self.max_steps, self._end),
            (
                state.samples >= self.max_samples,
                f"MAX_SAMPLES_TERMINATION {self.max_samples} reached",
            ),
            (is_late, f"MAX_SECONDS {self.max_seconds} reached"),
        ]
        return next((reason for hit, reason in checks if hit), None)


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended: MLPerf status, reason in words,
    and the seconds from run_start to run_stop.
    """

    status: str
    reason: str
    seconds: float
    state: TrainState

    @property
    def ending(self) -> str:
        """Return "success" or "stopped": a run that ends at its limit did what it was asked; only
        MLPerf's log calls that "aborted".
        """
        return self.status if self.status == constants.SUCCESS else "stopped"
