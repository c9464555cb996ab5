"""Where a run stands, when it stops and how it ended: plain numbers that a checkpoint carries."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, fields

from mlbert.optim.config import ScheduleConfig
from mlbert.training.config import EvaluationConfig, RunConfig

_LEAST_FACTOR = 1e-6  # an update's rate is not 0
_MOST_EVALUATION = 0.1  # of the time, beside the first evaluation and the last


@dataclass(frozen=True)
class StepCounts:
    """What a step holds over all ranks: sequences, real tokens, model FLOPs."""

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
        skipped_steps: steps left out because the gradient was not finite.
        next_eval_samples: the evaluation that is due next.
        accuracy: the last evaluation's metric, the one that the target is compared with (0 before the first).
        train_seconds: time in training steps, evaluation left out.
        elapsed_seconds: time since run_start, over all continuations.
        due_seconds: when an evaluation that began now would be over, since run_start; compared with MAX_SECONDS.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    flops: int = 0
    skipped_steps: int = 0
    next_eval_samples: int = 0
    accuracy: float = 0.0
    train_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    due_seconds: float = 0.0

    @property
    def updates(self) -> int:
        """Steps that changed the weights."""
        return self.step - self.skipped_steps

    def add(self, counts: StepCounts, sign: int = 1) -> None:
        """Counts a step in, or, with sign -1, out again."""
        self.samples += sign * counts.samples
        self.tokens += sign * counts.tokens
        self.flops += sign * counts.flops

    def to_json(self) -> dict[str, float]:
        """The fields as plain numbers."""
        return asdict(self)

    def restore(self, values: dict[str, float]) -> None:
        """Takes over the fields of `to_json`. Raises ValueError: one is missing or cannot be."""
        for field in fields(self):
            value: object = values.get(field.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or (values[field.name] < 0 and field.name != "accuracy"):
                raise ValueError(f"{field.name} is {value!r}")
        for field in fields(self):
            setattr(self, field.name, values[field.name])


class Clock:
    """Seconds since run_start, continuing from an earlier part of the same run.

    Attributes:
        evaluation_seconds: what the last evaluation took.
        evaluated_at, saved_at: `TrainState.due_seconds` at the last evaluation and checkpoint, or at the start.
    """

    def __init__(self, already_seconds: float) -> None:
        self._start = time.monotonic() - already_seconds
        self.evaluation_seconds = 0.0
        self.evaluated_at = self.saved_at = already_seconds

    def seconds(self) -> float:
        """Elapsed seconds."""
        return time.monotonic() - self._start


@dataclass(frozen=True)
class Pace:
    """A run that is shaped to the clock in place of a number of steps.

    Attributes:
        seconds: MAX_SECONDS.
        warmup, decay: shares of them, at their beginning and end, over which the schedule's rate rises from 0 and falls
            to it, on straight lines.
        evaluate_every, save_every: seconds between evaluations and between checkpoints, at least.
    """

    seconds: float
    warmup: float
    decay: float
    evaluate_every: float
    save_every: float

    def factor(self, seconds: float) -> float:
        """What the schedule's rate is multiplied by so many seconds after run_start."""
        share = seconds / self.seconds
        return max(_LEAST_FACTOR, min(1.0, share / self.warmup, (1.0 - share) / self.decay))

    def evaluates(self, since: float, took: float) -> bool:
        """Whether to evaluate so many seconds after the last evaluation, which took so long: a slow one waits longer,
        as a run that is always evaluated learns nothing."""
        return since >= max(self.evaluate_every, took / _MOST_EVALUATION)


@dataclass(frozen=True)
class Limits:
    """Bounds of a run; None: no time limit; no target, so that the run succeeds at a limit."""

    target_accuracy: float | None
    max_steps: int
    max_samples: int
    max_seconds: float | None
    max_skipped_steps: int

    @classmethod
    def of(cls, evaluation: EvaluationConfig, schedule: ScheduleConfig, run: RunConfig) -> Limits:
        """Return the limits that the settings give."""
        return cls(
            evaluation.target_metric,
            schedule.max_steps,
            run.max_samples_termination,
            run.max_seconds,
            run.max_skipped_steps,
        )

    def met(self, state: TrainState) -> bool:
        """Whether an evaluation reached the target."""
        return self.target_accuracy is not None and state.accuracy >= self.target_accuracy

    def succeeds(self, state: TrainState) -> bool:
        """Whether a run that has come to one of its limits did all that was asked of it."""
        return self.target_accuracy is None and state.skipped_steps <= self.max_skipped_steps

    def reached(self, state: TrainState, seconds: float) -> str | None:
        """Why the run must end before the target is reached, or None to go on."""
        checks: list[tuple[bool, str]] = [
            (state.skipped_steps > self.max_skipped_steps, f"{state.skipped_steps} steps had non-finite gradients"),
            (state.step >= self.max_steps, f"MAX_STEPS {self.max_steps} reached"),
            (state.samples >= self.max_samples, f"MAX_SAMPLES_TERMINATION {self.max_samples} reached"),
            (
                self.max_seconds is not None and seconds >= self.max_seconds,
                f"MAX_SECONDS {self.max_seconds} reached",
            ),
        ]
        return next((reason for hit, reason in checks if hit), None)


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended: MLPerf status, reason in words, and the seconds from run_start to run_stop."""

    status: str
    reason: str
    seconds: float
    state: TrainState
