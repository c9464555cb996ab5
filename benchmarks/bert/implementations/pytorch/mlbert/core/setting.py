"""What a row of the settings table is; `mlbert.core.settings` has the rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METADATA_KEY = "setting"


@dataclass(frozen=True)
class Limits:
    """The legal range of a value; ``None`` leaves a side open. Numbers are always finite."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()

    def reason_against(self, value: object) -> str | None:
        """Why a value of the right type is illegal, in plain words; ``None`` when it is legal."""
        if self.choices and value is not None:
            return None if value in self.choices else f"must be one of {', '.join(self.choices)}"
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        if self.at_least is not None and value < self.at_least:
            return f"must be at least {self.at_least:g}"
        if self.at_most is not None and value > self.at_most:
            return f"must be at most {self.at_most:.15g}"
        if self.above is not None and value <= self.above:
            return f"must be above {self.above:g}"
        if self.below is not None and value >= self.below:
            return f"must be below {self.below:g}"
        return None


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    env: str  # name of the environment variable
    name: str  # field of TrainConfig and YAML key; empty for what only launchers read, as is the flag
    flag: str
    kind: type  # str, int, float, bool or Path
    optional: bool  # whether "none" (or an empty export) is a value
    unit: str  # empty where it has none
    meaning: str  # one sentence
    limits: Limits

    @property
    def type_name(self) -> str:
        """The type in words, such as ``integer or none``."""
        words = {str: "text", int: "integer", float: "number", bool: "yes/no", Path: "path"}[self.kind]
        if self.limits.choices:
            words = " | ".join(self.limits.choices)
        return f"{words} or none" if self.optional else words


def row(env: str, meaning: str, unit: str = "", **limits: Any) -> Any:
    """A dataclass field that is a row of the table: see `Setting`, and `Limits` for the rest of the words."""
    return field(metadata={METADATA_KEY: (env, meaning, unit, Limits(**limits))})
