"""Settings of the optimizer and the learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from mlbert.config.section import (
    Contradiction,
    Ranges,
    Section,
    fixed_setting,
    parse_number,
    setting,
)

# Update rules and their classes; `mlbert.optim.optimizers` imports them.
OPTIMIZERS: Mapping[str, str] = {
    "lamb": "mlbert.optim.lamb:Lamb",
    "adamw": "mlbert.optim.adamw:AdamW",
    "decoupled_adamw": "mlbert.optim.adamw:DecoupledAdamW",
    "stableadamw": "mlbert.optim.adamw:StableAdamW",
    "decoupled_stableadamw": "mlbert.optim.adamw:DecoupledStableAdamW",
    "acclip": "mlbert.optim.acclip:ACClip",
    "madgrad": "mlbert.optim.madgrad:Madgrad",
    "sgd": "mlbert.optim.sgd:SGD",
    "muon": "mlbert.optim.muon:Muon",
}
# Schedules and their classes; `mlbert.optim.schedules` imports them.
SCHEDULES: Mapping[str, str] = {
    "polynomial": "mlbert.optim.schedules:Polynomial",
    "linear": "mlbert.optim.schedules:Linear",
    "cosine": "mlbert.optim.schedules:Cosine",
    "wsd": "mlbert.optim.schedules:WarmupStableDecay",
    "wsd_sqrt": "mlbert.optim.schedules:WarmupStableRoot",
    "multistep": "mlbert.optim.schedules:MultiStep",
    "constant": "mlbert.optim.schedules:Schedule",
}
# Settings that only some schedules read.
SCHEDULE_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "polynomial": ("poly_power", "end_lr", "lr_decay_end"),
    "linear": ("end_lr", "lr_decay_end"),
    "cosine": ("end_lr", "lr_decay_end"),
    "wsd": ("lr_decay_steps", "lr_decay_proportion", "end_lr", "lr_decay_end"),
    "wsd_sqrt": ("lr_decay_steps", "lr_decay_proportion", "end_lr", "lr_decay_end"),
    "multistep": ("lr_milestones", "lr_gamma"),
    "constant": (),
}


class OptimizerConfig(Section):
    """The update rule and its numbers."""

    optimizer: Literal[tuple(OPTIMIZERS)] = fixed_setting(  # type: ignore[valid-type]
        "OPTIMIZER",
        "Update rule; in the decoupled ones the decay does not depend on the size of LR.",
        default="lamb",
    )
    beta1: float = fixed_setting(
        "OPT_LAMB_BETA_1",
        "Decay rate of the first moment, for every optimizer; the momentum of madgrad and sgd.",
        key="opt_lamb_beta_1",
        **Ranges.PROBABILITY,
    )
    beta2: float = fixed_setting(
        "OPT_LAMB_BETA_2",
        "Decay rate of the second moment, for every optimizer except madgrad and sgd.",
        key="opt_lamb_beta_2",
        **Ranges.PROBABILITY,
    )
    epsilon: float = fixed_setting(
        "OPT_EPSILON",
        "Added to the denominator of the update; unused by sgd.",
        key="opt_epsilon",
        default=1e-06,
        gt=0,
        le=1e9,
    )
    weight_decay_rate: float = fixed_setting(
        "WEIGHT_DECAY_RATE",
        "Weight decay; not applied to biases and LayerNorm unless DECAY_ALL is set.",
        **Ranges.RATE,
    )
    decay_all: bool | None = fixed_setting(
        "DECAY_ALL", "Also decay biases and LayerNorm.", default=None
    )
    max_grad_norm: float | None = fixed_setting(
        "MAX_GRAD_NORM",
        "Limit of the global gradient norm; none disables clipping.",
        default=1.0,
        gt=0,
        le=1e9,
    )
    optimizer_implementation: Literal["ops", "auto", "plain", "native", "triton", "apex"] = setting(
        "OPTIMIZER_IMPLEMENTATION",
        "Implementation of the optimizer; ops selects the one that matches OPS.",
        default="ops",
    )


class ScheduleConfig(Section):
    """The learning rate of each step, and how many steps there are."""

    learning_rate: float = fixed_setting("LR", "Base learning rate.", gt=0, le=100)
    max_steps: int = setting(
        "MAX_STEPS", "Length of the schedule; training ends there.", **Ranges.STEPS
    )
    warmup_steps: int = fixed_setting(
        "WARMUP_STEPS", "Length of the warm-up.", default=0, **Ranges.STEPS_FROM_0
    )
    warmup_proportion: float | None = fixed_setting(
        "WARMUP_PROPORTION",
        "Length of the warm-up; replaces WARMUP_STEPS.",
        default=None,
        unit="share of MAX_STEPS",
        ge=0,
        le=1,
    )
    start_warmup_step: int = fixed_setting(
        "START_WARMUP_STEP",
        "First step of the warm-up ramp; negative to start partway up the ramp.",
        default=0,
        **Ranges.STEPS_TO_0,
    )
    schedule: Literal[tuple(SCHEDULES)] = fixed_setting(  # type: ignore[valid-type]
        "SCHEDULE",
        "Learning rate after the warm-up; polynomial is the benchmark's and decays from step 0.",
        default="polynomial",
    )
    poly_power: float = fixed_setting(
        "LR_POLY_POWER", "Exponent of the polynomial decay.", default=1.0, gt=0, le=100
    )
    end_lr: float | None = fixed_setting(
        "END_LR",
        "Learning rate at the end of the decay (all but multistep, constant); none means 0.",
        default=None,
        **Ranges.RATE,
    )
    lr_decay_end: int | None = fixed_setting(
        "LR_DECAY_END",
        "Step at which the decay ends (all but multistep, constant); none means MAX_STEPS.",
        default=None,
        **Ranges.STEPS,
    )
    lr_decay_steps: int | None = fixed_setting(
        "LR_DECAY_STEPS",
        "Length of the decay after the plateau of wsd and wsd_sqrt.",
        default=None,
        **Ranges.STEPS,
    )
    lr_decay_proportion: float | None = fixed_setting(
        "LR_DECAY_PROPORTION",
        "Length of the decay after the plateau of wsd and wsd_sqrt; replaces LR_DECAY_STEPS.",
        default=None,
        unit="share of MAX_STEPS",
        gt=0,
        le=1,
    )
    lr_milestones: str | None = fixed_setting(
        "LR_MILESTONES",
        "Steps at which multistep multiplies the rate, separated by commas.",
        default=None,
        unit="steps",
    )
    lr_gamma: float | None = fixed_setting(
        "LR_GAMMA", "Factor by which multistep multiplies the rate.", default=None, gt=0, le=1
    )
    lr_first_step: int = fixed_setting(
        "LR_FIRST_STEP",
        "Number of the first update in the schedule; with -1 the first two use 0, as in Composer.",
        default=0,
        ge=-1,
        le=1,
    )

    @property
    def num_warmup_steps(self) -> int:
        """Length of the warm-up in steps, from whichever of the two settings gives it."""
        return (
            int(self.max_steps * self.warmup_proportion)
            if self.warmup_proportion
            else self.warmup_steps
        )

    @property
    def ramp_end(self) -> int:
        """First step after the warm-up; not above 0 without one."""
        return self.start_warmup_step + self.num_warmup_steps

    @property
    def num_decay_steps(self) -> int | None:
        """Length of the decay after a plateau in steps, from whichever of the two settings gives
        it.
        """
        if self.lr_decay_proportion is None:
            return self.lr_decay_steps
        return max(int(self.max_steps * self.lr_decay_proportion), 1)

    @property
    def milestones(self) -> tuple[int, ...] | None:
        """LR_MILESTONES as numbers.

        Raises ValueError: they are not ascending whole numbers above 0.
        """
        if self.lr_milestones is None:
            return None
        steps = tuple(parse_number(word, int) for word in self.lr_milestones.split(","))
        if list(steps) != sorted(set(steps)) or steps[0] <= 0:
            raise ValueError(self.lr_milestones)
        return steps

    def contradictions(self) -> Iterator[Contradiction]:
        """Yield contradictions of warm-up and decay, and missing settings of the schedule."""
        if self.warmup_steps and self.warmup_proportion:
            problem = f"is {self.warmup_proportion:g} while WARMUP_STEPS is {self.warmup_steps}"
            yield Contradiction(
                "config.conflict", "WARMUP_PROPORTION", problem, "Set one of the two to 0"
            )
        reads = SCHEDULE_SETTINGS[self.schedule]
        if self.lr_decay_steps is not None and self.lr_decay_proportion is not None:
            problem = (
                f"is {self.lr_decay_proportion:g} while LR_DECAY_STEPS is {self.lr_decay_steps}"
            )
            remedy = "Set one of the two to none"
            yield Contradiction("config.conflict", "LR_DECAY_PROPORTION", problem, remedy)
        needed = {
            "lr_decay_steps": self.num_decay_steps,
            "lr_milestones": self.lr_milestones,
            "lr_gamma": self.lr_gamma,
        }
        for key, value in needed.items():
            if key in reads and value is None:
                problem = f"is not set, and SCHEDULE={self.schedule} needs it"
                env = key.upper()
                yield Contradiction(
                    "config.missing", env, problem, f"Export {env}, or give --{key}"
                )
        yield from self._contradictions_of_decay()
        if "lr_milestones" in reads:
            try:
                _ = self.milestones
            except ValueError:
                problem = f"{self.lr_milestones!r} is not a comma-separated list of ascending steps"
                yield Contradiction(
                    "config.value", "LR_MILESTONES", problem, "Give for example 800,1200"
                )

    def _contradictions_of_decay(self) -> Iterator[Contradiction]:
        """Yield contradictions if the decay ends, or should have begun, before the warm-up ends."""
        end = self.lr_decay_end or self.max_steps
        name = f"SCHEDULE={self.schedule}"
        # The decay of linear and cosine begins at num_warmup_steps, wherever the ramp ends. That of
        # polynomial, the benchmark's, ignores the warm-up.
        decays_after_warmup = self.schedule in ("linear", "cosine")
        if decays_after_warmup and self.num_warmup_steps >= end:
            problem = f"ends at step {end}, but the warm-up takes {self.num_warmup_steps} steps"
            remedy = "Set a shorter warm-up, or a later LR_DECAY_END"
            yield Contradiction("config.conflict", name, problem, remedy)
        has_plateau = "lr_decay_steps" in SCHEDULE_SETTINGS[self.schedule]
        if not has_plateau or self.num_decay_steps is None:
            return
        decay_start = end - self.num_decay_steps
        if decay_start < 0:
            problem = f"{self.num_decay_steps} is more than the {end} steps until the decay ends"
            remedy = "Set fewer, or more MAX_STEPS"
            yield Contradiction("config.conflict", "LR_DECAY_STEPS", problem, remedy)
        elif self.ramp_end > decay_start:
            problem = (
                f"its decay begins at step {decay_start}, but the warm-up ends at {self.ramp_end}"
            )
            remedy = "Set a shorter warm-up, fewer LR_DECAY_STEPS, or more MAX_STEPS"
            yield Contradiction("config.conflict", name, problem, remedy)

    def oddities(self) -> Iterator[str]:
        """Yield a sentence if the warm-up never ends, or hides a milestone or the decay."""
        if self.ramp_end > self.max_steps:
            yield (
                f"the warm-up ends at step {self.ramp_end}, after MAX_STEPS {self.max_steps}: "
                "LR is never reached"
            )
        elif self.schedule == "polynomial" and self.ramp_end > (
            self.lr_decay_end or self.max_steps
        ):
            yield (
                f"the warm-up ends at step {self.ramp_end}, "
                f"after LR_DECAY_END {self.lr_decay_end}: "
                "the rate falls to its end when the warm-up ends"
            )
        milestones = self.milestones if self.schedule == "multistep" else None
        if milestones and self.ramp_end > 0 and milestones[0] <= self.ramp_end:
            yield (
                f"LR_MILESTONES begin at step {milestones[0]}, "
                f"but the warm-up ends at {self.ramp_end}: "
                "LR is never reached"
            )
