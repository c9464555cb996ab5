"""Settings of the optimizer and the learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from mlbert.config.section import (
    Choice,
    Contradiction,
    Ranges,
    Registry,
    Section,
    fixed_setting,
    parse_number,
    setting,
)

OPTIMIZERS = Registry(
    {
        "lamb": Choice("mlbert.optim.lamb:Lamb", in_closed=True),
        "adamw": Choice("mlbert.optim.adamw:AdamW"),
        "decoupled_adamw": Choice("mlbert.optim.adamw:DecoupledAdamW"),
        "stableadamw": Choice("mlbert.optim.adamw:StableAdamW"),
        "decoupled_stableadamw": Choice("mlbert.optim.adamw:DecoupledStableAdamW"),
        "acclip": Choice("mlbert.optim.acclip:ACClip"),
        "madgrad": Choice("mlbert.optim.madgrad:Madgrad"),
        "sgd": Choice("mlbert.optim.sgd:SGD"),
        "muon": Choice("mlbert.optim.muon:Muon"),
    }
)
_DECAY = ("end_lr", "lr_decay_end")
_PLATEAU = ("lr_decay_steps", "lr_decay_proportion", *_DECAY)
_MILESTONES = ("lr_milestones", "lr_gamma")
SCHEDULES = Registry(
    {
        "polynomial": Choice(
            "mlbert.optim.schedules:Polynomial", reads=("poly_power", *_DECAY), in_closed=True
        ),
        "linear": Choice("mlbert.optim.schedules:Linear", reads=_DECAY),
        "cosine": Choice("mlbert.optim.schedules:Cosine", reads=_DECAY),
        "wsd": Choice(
            "mlbert.optim.schedules:WarmupStableDecay", reads=_PLATEAU, needs=("lr_decay_steps",)
        ),
        "wsd_sqrt": Choice(
            "mlbert.optim.schedules:WarmupStableRoot", reads=_PLATEAU, needs=("lr_decay_steps",)
        ),
        "multistep": Choice(
            "mlbert.optim.schedules:MultiStep", reads=_MILESTONES, needs=_MILESTONES
        ),
        "constant": Choice("mlbert.optim.schedules:Schedule"),
    }
)


class OptimizerConfig(Section):
    """The update rule and its numbers."""

    optimizer: str = fixed_setting(
        "OPTIMIZER",
        "Update rule; in the decoupled ones the decay does not depend on the size of LR.",
        default="lamb",
        choices=OPTIMIZERS,
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
    schedule: str = fixed_setting(
        "SCHEDULE",
        "Learning rate after the warm-up; polynomial is the benchmark's and decays from step 0.",
        default="polynomial",
        choices=SCHEDULES,
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
        if self.lr_decay_steps is not None and self.lr_decay_proportion is not None:
            problem = (
                f"is {self.lr_decay_proportion:g} while LR_DECAY_STEPS is {self.lr_decay_steps}"
            )
            remedy = "Set one of the two to none"
            yield Contradiction("config.conflict", "LR_DECAY_PROPORTION", problem, remedy)
        # What else gives the value of a setting that a schedule needs.
        given = {"lr_decay_steps": self.num_decay_steps}
        for key in SCHEDULES[self.schedule].needs:
            if given.get(key, getattr(self, key)) is None:
                problem = f"is not set, and SCHEDULE={self.schedule} needs it"
                env = key.upper()
                flag = key.replace("_", "-")
                yield Contradiction(
                    "config.missing", env, problem, f"Export {env}, or give --{flag}"
                )
        yield from SCHEDULES.load(self.schedule).contradictions(self)

    def oddities(self) -> Iterator[str]:
        """Yield a sentence if the warm-up never ends, or hides a milestone or the decay."""
        if self.ramp_end > self.max_steps:
            yield (
                f"the warm-up ends at step {self.ramp_end}, after MAX_STEPS {self.max_steps}: "
                "LR is never reached"
            )
        yield from SCHEDULES.load(self.schedule).oddities(self)
