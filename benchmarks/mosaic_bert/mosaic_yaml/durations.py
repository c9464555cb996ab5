"""Convert Composer's durations to steps: ``10ba``, ``286720000sp``, ``3ep``,
``5e9tok``, ``0.06dur``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from mlbert.config.batch_growth import BatchGrowth
from mlbert.host.errors import UserError
from mosaic_yaml.nested_yaml import Leaves, YamlValue

# Batches over all ranks (steps), sequences, passes over the data, tokens,
# and a fraction of max_duration.
UNITS = ("ba", "sp", "ep", "tok", "dur")
_FORM = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d+)?|\.\d+)\s*([A-Za-z]+)\s*", re.ASCII)
_MOST_STEPS = 2**40
_ROUNDING = 1e-12  # relative: of a product of two numbers that should be a whole one


def unit_of(text: object) -> str | None:
    """Return the unit of a duration; None if the text is not one."""
    match = _FORM.fullmatch(str(text))
    return None if match is None else match[2]


@dataclass(frozen=True)
class Durations:
    """Convert durations to steps.

    Attributes:
        sequences_per_step: sequences of a full step over all ranks; rows if they are packed.
        max_seq_length: maximum sequence length, tokens.
        steps_per_epoch: called only for durations in epochs; may read data.
        max_steps: steps of the training; None while max_duration itself is converted.
        growth: of a rank's batch to the full one; None if it does not grow.
        knows_tokens: False if tokens are counted without padding, and rows are not full.
        is_packed: several sequences fill a row.
        step_tokens: tokens without padding that count as one step of the training and its learning
            rate (STEP_TOKENS); None if steps do. Intervals are in steps all the same.
        grows_with_tokens: the batch grows with the tokens without padding that were trained
            (BATCHSIZE_WARMUP_TOKENS), so only a training in steps has known places.
    """

    sequences_per_step: int
    max_seq_length: int
    steps_per_epoch: Callable[[], int]
    max_steps: int | None = None
    growth: BatchGrowth | None = None
    knows_tokens: bool = True
    is_packed: bool = False
    step_tokens: int | None = None
    grows_with_tokens: bool = False

    @property
    def counts_steps(self) -> bool:
        """True if limits and intervals cannot be counted in sequences: a step's number varies."""
        return self.is_packed or self.growth is not None

    def steps(self, name: str, text: object, *, least: int = 1) -> int:
        """Return the step at which a duration from the start of the training is over, rounded up.

        A fraction of the training is rounded down, as in Composer.

        Raises:
            UserError: not a number and a unit, a unit that is not allowed here,
                or a number out of range.
        """
        number, unit = self._parsed(name, text)
        self._check_unit(name, text, number, unit)
        if unit == "ba":
            steps = math.ceil(min(number, 2 * _MOST_STEPS))  # 1e999 is infinite
        elif self.growth is not None:
            steps = self._steps_for(self._full_batches(number, unit))
        else:
            steps = self._at_full_size(number, unit)
        return self._checked(name, text, steps, least)

    def interval(self, name: str, text: object, *, least: int = 1) -> int:
        """Return a duration as a number of full batches; raises UserError as `steps` does."""
        number, unit = self._parsed(name, text)
        return self._checked(name, text, self._at_full_size(number, unit), least)

    def last_steps(self, name: str, text: object, *, least: int = 1) -> int:
        """Return the steps of a duration at the end; raises UserError as `steps` does."""
        number, unit = self._parsed(name, text)
        self._check_unit(name, text, number, unit)
        if unit == "ba" or self.growth is None:
            return self.interval(name, text, least=least)
        assert self.max_steps is not None
        all_batches = self.growth.full_batches(self.max_steps)
        before = max(all_batches - self._full_batches(number, unit), 0.0)
        return self._checked(name, text, self.max_steps - self._steps_for(before), least)

    def _check_unit(self, name: str, text: object, number: float, unit: str) -> None:
        """Raise UserError unless a place in a training that counts tokens is in tokens, and one
        whose batch grows with them in steps.
        """
        if self.grows_with_tokens and unit in ("sp", "tok") and number:
            raise UserError(
                "config.conflict",
                f"{name}={text}",
                "is not in ba or dur, and the batch grows with tokens without padding",
                "Write it in ba, or max_duration in tok",
            )
        if self.step_tokens is None or unit in ("tok", "dur") or not number:
            return
        raise UserError(
            "config.conflict",
            f"{name}={text}",
            "is not in tok or dur, and max_duration counts tokens without padding",
            "Write it in tok, or max_duration in ba",
        )

    def _parsed(self, name: str, text: object) -> tuple[float, str]:
        """Return the number and the unit of a duration."""
        match = _FORM.fullmatch(str(text))
        if match is None or match[2] not in self._units:
            reason = "is not a duration"
            raise UserError("config.value", f"{name}={text}", reason, self._remedy)
        if match[2] == "tok" and not self.knows_tokens:
            raise UserError(
                "config.unsupported",
                f"{name}={text}",
                "counts tokens without padding, whose number in a step is not known",
                "Set count_padding_tokens=true, or train_loader.sequence_packing=true",
            )
        return float(match[1].replace("_", "")), match[2]

    @property
    def _units(self) -> list[str]:
        return [unit for unit in UNITS if unit != "dur" or self.max_steps is not None]

    @property
    def _remedy(self) -> str:
        return f"Write a number and one of {', '.join(self._units)}, such as 1000ba"

    def _checked(self, name: str, text: object, steps: int, least: int) -> int:
        if not least <= steps <= _MOST_STEPS:
            reason = f"is {steps} steps, not {least} to {_MOST_STEPS}"
            raise UserError("config.range", f"{name}={text}", reason, self._remedy)
        return steps

    def _steps_for(self, full_batches: float) -> int:
        """Return the steps until a growing batch has trained on this many full batches."""
        assert self.growth is not None
        sequences = full_batches * self.growth.last
        return self.growth.steps_for(math.ceil(sequences * (1.0 - _ROUNDING)))

    def _at_full_size(self, number: float, unit: str) -> int:
        full_batches = self._full_batches(number, unit)
        return math.floor(full_batches) if unit == "dur" else math.ceil(full_batches)

    def _full_batches(self, number: float, unit: str) -> float:
        """Return an amount of training in full batches."""
        if unit == "dur":
            assert self.max_steps is not None
            whole = (
                self.max_steps if self.growth is None else self.growth.full_batches(self.max_steps)
            )
            found = number * whole
        elif unit == "ep":
            found = number * self.steps_per_epoch()
        else:
            amounts = {
                "ba": 1,
                "sp": self.sequences_per_step,
                "tok": self.sequences_per_step * self.max_seq_length,
            }
            found = number / amounts[unit]
        return min(found, 2.0 * _MOST_STEPS)  # 1e999 is infinite

    def share(self, text: object) -> float | None:
        """Return the number of a duration in ``dur`` above 0 and at most 1.

        None for any other text, and for a number below 1 if the batch grows: then it is a share
        of the data, not of the steps.
        """
        match = _FORM.fullmatch(str(text))
        if match is None or match[2] != "dur":
            return None
        number = float(match[1].replace("_", ""))
        if self.growth is not None and number != 1:
            return None
        return number if 0 < number <= 1 else None

    def read(self, leaves: Leaves, name: str, default: str | None, *, least: int = 1) -> YamlValue:
        """Return a duration of a YAML in steps from the start, with its origin."""
        given = leaves.text(name, default)
        return YamlValue(self.steps(name, given.value, least=least), given.origin)

    def read_interval(self, leaves: Leaves, name: str, default: str) -> YamlValue:
        """Return an interval of a YAML in steps, with its origin."""
        given = leaves.text(name, default)
        return YamlValue(self.interval(name, given.value), given.origin)

    def read_last(self, leaves: Leaves, name: str, default: str, *, least: int) -> YamlValue:
        """Return a duration of a YAML at the end of the training in steps, with its origin."""
        given = leaves.text(name, default)
        return YamlValue(self.last_steps(name, given.value, least=least), given.origin)
