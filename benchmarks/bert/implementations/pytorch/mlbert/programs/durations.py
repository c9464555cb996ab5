"""Lengths of training as Composer writes them: ``10ba``, ``286720000sp``, ``3ep``, ``5e9tok``, ``0.06dur``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from mlbert.host.errors import UserError

UNITS = {
    "ba": "batches of all ranks, that is steps",
    "sp": "sequences",
    "ep": "passes over the data",
    "tok": "tokens, counted as max_seq_len for each sequence",
    "dur": "a share of max_duration",
}
_FORM = re.compile(r"\s*([\d_]+(?:\.\d+)?(?:[eE]\+?\d+)?|\.\d+)\s*([A-Za-z]+)\s*")
_MOST_STEPS = 2**40


@dataclass(frozen=True)
class Durations:
    """What durations are converted to steps with.

    Attributes:
        sequences_per_step: of all ranks.
        max_seq_length: tokens.
        steps_per_epoch: called where a duration is in epochs; may take reading.
        max_steps: of the training; None while that is what is asked for.
    """

    sequences_per_step: int
    max_seq_length: int
    steps_per_epoch: Callable[[], int]
    max_steps: int | None = None

    def steps(self, name: str, text: object, *, least: int = 1) -> int:
        """Steps that ``text`` takes, rounded up; a share of the training is rounded down, as Composer does.

        Raises:
            UserError: not a number and a unit, a unit that cannot be used here, or a number out of range.
        """
        match = _FORM.fullmatch(str(text))
        units = [unit for unit in UNITS if unit != "dur" or self.max_steps is not None]
        remedy = f"Write a number and one of {', '.join(units)}, such as 1000ba"
        if match is None or match[2] not in units:
            raise UserError("config.value", f"{name}={text}", "is no duration", remedy)
        number, unit = float(match[1].replace("_", "")), match[2]
        if unit == "dur":
            assert self.max_steps is not None
            steps = math.floor(min(number, _MOST_STEPS) * self.max_steps)
        else:
            steps = math.ceil(min(number / self._size(unit), 2 * _MOST_STEPS))  # 1e999 is infinite
        if not least <= steps <= _MOST_STEPS:
            raise UserError("config.range", f"{name}={text}", f"is {steps} steps, not {least} to {_MOST_STEPS}", remedy)
        return steps

    def _size(self, unit: str) -> float:
        """How many of the unit a step takes."""
        if unit == "ba":
            return 1.0
        if unit == "ep":
            return 1.0 / self.steps_per_epoch()
        return float(self.sequences_per_step * (self.max_seq_length if unit == "tok" else 1))
