"""A range of plausible values."""

from __future__ import annotations

from typing import NamedTuple


class ValueRange(NamedTuple):
    """The range of values that a key can have."""

    low: float
    high: float
    has_low: bool = True
    has_high: bool = True

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int | float)
        above = self.low <= value if self.has_low else self.low < value
        return above and (value <= self.high if self.has_high else value < self.high)

    def __str__(self) -> str:
        low = "at least" if self.has_low else "above"
        high = "at most" if self.has_high else "below"
        return f"{low} {self.low:g}, {high} {self.high:g}"
