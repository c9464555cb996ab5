"""Convert Composer's durations to steps: ``10ba``, ``286720000sp``, ``3ep``, ``5e9tok``, ``0.06dur``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from mlbert.host.errors import UserError
from mosaic_yaml.nested_yaml import Leaves, YamlValue

# Batches over all ranks (steps), sequences, passes over the data, tokens, and a fraction of max_duration.
UNITS = ("ba", "sp", "ep", "tok", "dur")
_FORM = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d+)?|\.\d+)\s*([A-Za-z]+)\s*", re.ASCII)
_MOST_STEPS = 2**40


@dataclass(frozen=True)
class Durations:
    """Convert durations to steps.

    Attributes:
        sequences_per_step: sequences per step over all ranks.
        max_seq_length: maximum sequence length, tokens.
        steps_per_epoch: called only for durations in epochs; may read data.
        max_steps: steps of the training; None while max_duration itself is converted.
    """

    sequences_per_step: int
    max_seq_length: int
    steps_per_epoch: Callable[[], int]
    max_steps: int | None = None

    def steps(self, name: str, text: object, *, least: int = 1) -> int:
        """Return a duration in steps, rounded up; a fraction of the training is rounded down, as in Composer.

        Raises:
            UserError: not a number and a unit, a unit that is not allowed here, or a number out of range.
        """
        match = _FORM.fullmatch(str(text))
        units = [unit for unit in UNITS if unit != "dur" or self.max_steps is not None]
        remedy = f"Write a number and one of {', '.join(units)}, such as 1000ba"
        if match is None or match[2] not in units:
            raise UserError("config.value", f"{name}={text}", "is not a duration", remedy)
        number = float(match[1].replace("_", ""))
        unit = match[2]
        if unit == "dur":
            assert self.max_steps is not None
            steps = math.floor(min(number, _MOST_STEPS) * self.max_steps)
        else:
            amounts = {
                "ba": 1,
                "sp": self.sequences_per_step,
                "tok": self.sequences_per_step * self.max_seq_length,
            }
            amount = 1.0 / self.steps_per_epoch() if unit == "ep" else float(amounts[unit])
            steps = math.ceil(min(number / amount, 2 * _MOST_STEPS))  # 1e999 is infinite
        if not least <= steps <= _MOST_STEPS:
            raise UserError(
                "config.range",
                f"{name}={text}",
                f"is {steps} steps, not {least} to {_MOST_STEPS}",
                remedy,
            )
        return steps

    def share(self, text: object) -> float | None:
        """Return the number of a duration in ``dur`` above 0 and at most 1, or None for any other text."""
        match = _FORM.fullmatch(str(text))
        if match is None or match[2] != "dur":
            return None
        number = float(match[1].replace("_", ""))
        return number if 0 < number <= 1 else None

    def read(self, leaves: Leaves, name: str, default: str | None, *, least: int = 1) -> YamlValue:
        """Return a duration of a YAML in steps, with its origin."""
        given = leaves.text(name, default)
        return YamlValue(self.steps(name, given.value, least=least), given.origin)
