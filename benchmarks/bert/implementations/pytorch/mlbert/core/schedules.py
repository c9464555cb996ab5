"""Learning rate schedules as pure functions of the step.

``step`` counts the updates done before this one: the first update has step 0. All arithmetic is in double precision.
"""

from __future__ import annotations

from collections.abc import Sequence


def polynomial_with_warmup(
    step: int, base_lr: float, warmup_steps: int, start_warmup_step: int, max_steps: int, power: float
) -> float:
    """The benchmark's schedule: a warm-up ramp, then polynomial decay to zero.

    The ramp runs over the ``warmup_steps`` updates from ``start_warmup_step`` on. The decay counts from step 0
    whatever the ramp, so that the rate can drop at the ramp's end. With ``start_warmup_step`` above 0 the rate is
    negative before that step, as in the benchmark's reference; configurations that ask for it are refused.

    Args:
        step: updates done so far.
        base_lr: learning rate at the end of the ramp.
        warmup_steps: length of the ramp, steps; 0 for none.
        start_warmup_step: where the ramp begins, steps; at most 0 in a legal configuration.
        max_steps: where the decay reaches zero, steps.
        power: exponent of the decay.
    """
    if step - start_warmup_step < warmup_steps:
        return base_lr * (step - start_warmup_step) / warmup_steps
    return base_lr * (1.0 - min(step, max_steps) / max_steps) ** power


def linear(step: int, base_lr: float, warmup_steps: int, max_steps: int, final_factor: float = 0.0) -> float:
    """A warm-up ramp from zero, then a straight line to ``final_factor * base_lr`` at ``max_steps``.

    Args:
        step: updates done so far.
        base_lr: learning rate at the end of the ramp.
        warmup_steps: length of the ramp, steps.
        max_steps: where the line ends, steps; constant after it.
        final_factor: share of ``base_lr`` at the end.
    """
    if step < warmup_steps:
        return base_lr * step / warmup_steps
    if step >= max_steps:
        return base_lr * final_factor
    done = (step - warmup_steps) / (max_steps - warmup_steps)
    return base_lr * (1.0 + done * (final_factor - 1.0))


def multistep(step: int, base_lr: float, warmup_steps: int, milestones: Sequence[int], gamma: float) -> float:
    """A warm-up ramp from zero, then ``base_lr`` times ``gamma`` for each milestone reached.

    Args:
        step: updates done so far.
        base_lr: learning rate at the end of the ramp.
        warmup_steps: length of the ramp, steps; milestones inside it act when it ends.
        milestones: steps at which the rate is multiplied.
        gamma: the multiplier.
    """
    if step < warmup_steps:
        return base_lr * step / warmup_steps
    return base_lr * gamma ** sum(step >= milestone for milestone in milestones)


def wsd(
    step: int, base_lr: float, warmup_steps: int, decay_steps: int, max_steps: int, final_factor: float = 0.0
) -> float:
    """Warm-up, stable, decay: a ramp from zero, a plateau, and a straight line over the last ``decay_steps``.

    Args:
        step: updates done so far.
        base_lr: learning rate of the plateau.
        warmup_steps: length of the ramp, steps.
        decay_steps: length of the line, steps; 0 for none.
        max_steps: where the line ends, steps; constant after it.
        final_factor: share of ``base_lr`` at the end of the line.
    """
    if step < warmup_steps:
        return base_lr * step / warmup_steps
    decay_done = min(step, max_steps) - (max_steps - decay_steps)
    if decay_done <= 0 or decay_steps == 0:
        return base_lr
    return base_lr * (1.0 + decay_done / decay_steps * (final_factor - 1.0))
