"""Learning rate schedules: small objects that compute the rate of a step
and log their hyperparameters.

    rate = schedule(step)     step counts the updates done before this one, from 0

A schedule computes with t = max(0, step + first_step). All but the constant one decay after a ramp:

    t - start_warmup_step < warmup_steps:   base_lr (t - start_warmup_step) / warmup_steps
    after that:                             `decayed(t)`, until `decay_end` and beyond

All arithmetic is in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from mlbert.config.batch_growth import BatchGrowth
from mlbert.config.section import Contradiction
from mlbert.optim.config import SCHEDULES, ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A ramp, then a constant rate; subclasses replace the part after the ramp."""

    name: str = ""  # of the registry, for the log
    base_lr: float  # at the end of the ramp
    warmup_steps: float = 0  # length of the ramp; 0 for none
    # Start of the ramp; at most 0 in a valid configuration. A value above 0 gives a negative rate
    # before that step, as in the benchmark's reference.
    start_warmup_step: float = 0
    max_steps: int  # length of the training; for the log
    decay_end: float  # step at which the decay ends; the rate is constant from there on
    first_step: int = 0  # number of the first update, 0 or 1; -1 uses 0 twice

    @classmethod
    def of(cls, config: ScheduleConfig, **numbers: Any) -> Self:
        """Return the configured schedule; ``numbers``: the fields that a subclass adds."""
        decay_end = config.lr_decay_end
        if decay_end is None:
            decay_end = config.max_steps
        return cls(
            name=config.schedule,
            base_lr=config.learning_rate,
            warmup_steps=config.num_warmup_steps,
            start_warmup_step=config.start_warmup_step,
            max_steps=config.max_steps,
            first_step=config.lr_first_step,
            decay_end=decay_end,
            **numbers,
        )

    @staticmethod
    def contradictions(config: ScheduleConfig) -> Iterable[Contradiction]:
        """Return contradictions of settings that only this schedule has.

        Called without a schedule, since those settings may not make one.
        """
        return ()

    @staticmethod
    def oddities(config: ScheduleConfig) -> Iterable[str]:
        """Return a sentence about each value that is legal but looks like a mistake."""
        return ()

    def __call__(self, step: float) -> float:
        """Return the rate of the update after `step` completed updates, or their worth in
        tokens.
        """
        return self.at(max(0, step + self.first_step))

    def at(self, t: float) -> float:
        """Return the rate at a place of the schedule."""
        if t - self.start_warmup_step < self.warmup_steps:
            return self.base_lr * (t - self.start_warmup_step) / self.warmup_steps
        return self.decayed(t)

    def decayed(self, t: float) -> float:
        """Return the rate after the ramp."""
        return self.base_lr

    def hyperparameters(self, event: Callable[[str, int | float | str], None]) -> None:
        """Log each hyperparameter once under the benchmark's key: ``event(key, value)``."""
        event("opt_base_learning_rate", self.base_lr)
        event("opt_learning_rate_decay_schedule", self.name)
        event("opt_learning_rate_training_steps", self.max_steps)
        event("opt_learning_rate_warmup_steps", self.warmup_steps)
        event("num_warmup_steps", self.warmup_steps)
        event("start_warmup_step", self.start_warmup_step)


@dataclass(frozen=True, kw_only=True)
class Polynomial(Schedule):
    """The benchmark's schedule: polynomial decay counted from step 0, regardless of the ramp.

    The rate can therefore drop at the end of the ramp.
    """

    power: float
    end_lr: float = 0.0  # rate at the end of the decay; 0 in the reference

    @classmethod
    def of(cls, config: ScheduleConfig, **numbers: Any) -> Self:
        """See `Schedule.of`."""
        return super().of(config, power=config.poly_power, end_lr=config.end_lr or 0.0, **numbers)

    @staticmethod
    def oddities(config: ScheduleConfig) -> Iterator[str]:
        """Yield a sentence if the decay ends within the warm-up."""
        if config.max_steps >= config.ramp_end > (config.lr_decay_end or config.max_steps):
            yield (
                f"the warm-up ends at step {config.ramp_end}, "
                f"after LR_DECAY_END {config.lr_decay_end}: "
                "the rate falls to its end when the warm-up ends"
            )

    def decayed(self, t: float) -> float:
        """Return the rate between `base_lr` at step 0 and `end_lr` at the end of the decay."""
        left = (1.0 - min(t, self.decay_end) / self.decay_end) ** self.power
        return self.end_lr + (self.base_lr - self.end_lr) * left

    def hyperparameters(self, event: Callable[[str, int | float | str], None]) -> None:
        """Log as in `Schedule`, plus power and end rate."""
        super().hyperparameters(event)
        event("opt_lamb_learning_rate_decay_poly_power", self.power)
        event("opt_end_learning_rate", self.end_lr)


@dataclass(frozen=True, kw_only=True)
class Linear(Schedule):
    """A straight line from `base_lr` at step `warmup_steps` to `end_lr`.

    The line assumes a ramp that begins at step 0. With a negative `start_warmup_step` the ramp ends
    earlier, and the rate is above `base_lr` until step `warmup_steps`.
    """

    end_lr: float = 0.0  # rate at the end of the decay

    @classmethod
    def of(cls, config: ScheduleConfig, **numbers: Any) -> Self:
        """See `Schedule.of`."""
        return super().of(config, end_lr=config.end_lr or 0.0, **numbers)

    @staticmethod
    def contradictions(config: ScheduleConfig) -> Iterator[Contradiction]:
        """Yield a contradiction if the decay ends before the warm-up.

        It begins at num_warmup_steps, wherever the ramp ends.
        """
        end = config.lr_decay_end or config.max_steps
        if config.num_warmup_steps >= end:
            problem = f"ends at step {end}, but the warm-up takes {config.num_warmup_steps} steps"
            remedy = "Set a shorter warm-up, or a later LR_DECAY_END"
            yield Contradiction("config.conflict", f"SCHEDULE={config.schedule}", problem, remedy)

    def share_done(self, t: float) -> float:
        """Return the completed fraction of the decay, 1 at its end."""
        if t >= self.decay_end:
            return 1.0
        return (t - self.warmup_steps) / (self.decay_end - self.warmup_steps)

    def decayed(self, t: float) -> float:
        """Return the rate on the line."""
        return self.base_lr + self.share_done(t) * (self.end_lr - self.base_lr)

    def hyperparameters(self, event: Callable[[str, int | float | str], None]) -> None:
        """Log as in `Schedule`, plus the end rate."""
        super().hyperparameters(event)
        event("opt_end_learning_rate", self.end_lr)


@dataclass(frozen=True, kw_only=True)
class Cosine(Linear):
    """Half a cosine from `base_lr` at step `warmup_steps` to `end_lr`; arguments as in `Linear`."""

    def decayed(self, t: float) -> float:
        """Return the rate on the cosine, which peaks where a ramp from step 0 would end."""
        done = max(self.share_done(t), 0.0)
        return self.end_lr + (self.base_lr - self.end_lr) * 0.5 * (1.0 + math.cos(math.pi * done))


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(Schedule):
    """A plateau, then a straight line to `end_lr` over the last `decay_steps` before
    `decay_end`.
    """

    decay_steps: float
    end_lr: float = 0.0

    @classmethod
    def of(cls, config: ScheduleConfig, **numbers: Any) -> Self:
        """See `Schedule.of`."""
        return super().of(
            config, decay_steps=config.num_decay_steps, end_lr=config.end_lr or 0.0, **numbers
        )

    @staticmethod
    def contradictions(config: ScheduleConfig) -> Iterator[Contradiction]:
        """Yield a contradiction if the decay should have begun before the warm-up ends."""
        end = config.lr_decay_end or config.max_steps
        if config.num_decay_steps is None:
            return
        decay_start = end - config.num_decay_steps
        if decay_start < 0:
            problem = f"{config.num_decay_steps} is more than the {end} steps until the decay ends"
            remedy = "Set fewer, or more MAX_STEPS"
            yield Contradiction("config.conflict", "LR_DECAY_STEPS", problem, remedy)
        elif config.ramp_end > decay_start:
            problem = (
                f"its decay begins at step {decay_start}, but the warm-up ends at {config.ramp_end}"
            )
            remedy = "Set a shorter warm-up, fewer LR_DECAY_STEPS, or more MAX_STEPS"
            yield Contradiction("config.conflict", f"SCHEDULE={config.schedule}", problem, remedy)

    def decayed(self, t: float) -> float:
        """Return the rate on the plateau or the line."""
        done = min(t, self.decay_end) - (self.decay_end - self.decay_steps)
        return self.base_lr + max(done, 0) / self.decay_steps * (self.end_lr - self.base_lr)

    def hyperparameters(self, event: Callable[[str, int | float | str], None]) -> None:
        """Log as in `Schedule`, plus the line's length and end rate."""
        super().hyperparameters(event)
        event("opt_learning_rate_decay_steps", self.decay_steps)
        event("opt_end_learning_rate", self.end_lr)


@dataclass(frozen=True, kw_only=True)
class WarmupStableRoot(WarmupStableDecay):
    """A plateau, then 1 - sqrt over the last `decay_steps`: with the share s of the decay done,

        rate = end_lr + (base_lr - end_lr) (1 - sqrt(s))

    Source: Haegele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training
    Durations", arXiv 2405.18392, the cooldown named 1-sqrt.
    """

    def decayed(self, t: float) -> float:
        """Return the rate on the plateau or the root."""
        done = min(t, self.decay_end) - (self.decay_end - self.decay_steps)
        share = max(done, 0) / self.decay_steps
        return self.end_lr + (self.base_lr - self.end_lr) * (1.0 - math.sqrt(share))


@dataclass(frozen=True, kw_only=True)
class MultiStep(Schedule):
    """`base_lr` times `gamma` for each milestone (a step) reached;
    milestones inside the ramp take effect when it ends.
    """

    milestones: Sequence[float]
    gamma: float

    @classmethod
    def of(cls, config: ScheduleConfig, **numbers: Any) -> Self:
        """See `Schedule.of`."""
        return super().of(config, milestones=config.milestones, gamma=config.lr_gamma, **numbers)

    @staticmethod
    def contradictions(config: ScheduleConfig) -> Iterator[Contradiction]:
        """Yield a contradiction if LR_MILESTONES are no ascending steps."""
        try:
            _ = config.milestones
        except ValueError:
            problem = f"{config.lr_milestones!r} is not a comma-separated list of ascending steps"
            yield Contradiction(
                "config.value", "LR_MILESTONES", problem, "Give for example 800,1200"
            )

    @staticmethod
    def oddities(config: ScheduleConfig) -> Iterator[str]:
        """Yield a sentence if the warm-up hides the first milestone."""
        milestones = config.milestones
        if milestones and config.ramp_end > 0 and milestones[0] <= config.ramp_end:
            yield (
                f"LR_MILESTONES begin at step {milestones[0]}, "
                f"but the warm-up ends at {config.ramp_end}: "
                "LR is never reached"
            )

    def decayed(self, t: float) -> float:
        """Return the rate after the milestones reached so far."""
        return self.base_lr * self.gamma ** sum(t >= milestone for milestone in self.milestones)

    def hyperparameters(self, event: Callable[[str, int | float | str], None]) -> None:
        """Log as in `Schedule`, plus milestones and multiplier."""
        super().hyperparameters(event)
        event("opt_learning_rate_decay_boundary_steps", ",".join(map(str, self.milestones)))
        event("opt_learning_rate_decay_factor", self.gamma)


@dataclass(frozen=True)
class InSequences:
    """A schedule while batches grow: its ramp and decay are straight in sequences, not in steps.

    All places of the schedule are mapped from steps to `BatchGrowth.full_batches`, so that it
    begins, turns and ends at the configured steps.

    Attributes:
        in_steps: the schedule as configured, which is logged.
        in_full_batches: the same with its places in full batches.
        growth: of the batch.
    """

    in_steps: Schedule
    in_full_batches: Schedule
    growth: BatchGrowth

    def __call__(self, step: float) -> float:
        """Return the rate of the update after `step` completed updates."""
        t = max(0, int(step) + self.in_steps.first_step)
        return self.in_full_batches.at(self.growth.full_batches(t))

    def hyperparameters(self, event: Callable[[str, int | float | str], None]) -> None:
        """Log the schedule in steps."""
        self.in_steps.hyperparameters(event)

    @classmethod
    def of(cls, schedule: Schedule, growth: BatchGrowth) -> InSequences:
        """Return a schedule for a batch that grows."""

        def place(step: float) -> float:
            return growth.full_batches(int(step))

        start = schedule.start_warmup_step
        changes: dict[str, Any] = {
            "start_warmup_step": place(start),
            "warmup_steps": place(start + schedule.warmup_steps) - place(start),
            "decay_end": place(schedule.decay_end),
        }
        if isinstance(schedule, WarmupStableDecay):
            decay_start = schedule.decay_end - schedule.decay_steps
            changes["decay_steps"] = place(schedule.decay_end) - place(decay_start)
        if isinstance(schedule, MultiStep):
            changes["milestones"] = [place(milestone) for milestone in schedule.milestones]
        return cls(schedule, replace(schedule, **changes), growth)


def make(config: ScheduleConfig) -> Schedule:
    """Return the schedule that SCHEDULE names, with the configured hyperparameters."""
    schedule = SCHEDULES.load(config.schedule).of(config)
    assert isinstance(schedule, Schedule)
    return schedule
