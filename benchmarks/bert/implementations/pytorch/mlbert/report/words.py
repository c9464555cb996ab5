"""Numbers and names as a reader wants them."""

from __future__ import annotations

import math

MINUTE, HOUR = 60.0, 3600.0
_LONGEST_NAME = 26


def time_unit(seconds: float) -> tuple[float, str]:
    """Seconds of the unit that suits an axis up to so many seconds, and its name."""
    if seconds < 3 * MINUTE:
        return 1.0, "seconds"
    return (MINUTE, "minutes") if seconds < 3 * HOUR else (HOUR, "hours")


def duration(seconds: float | None) -> str:
    """A time as people say it: 84.21 s, 5 min 0.5 s, 6 h 6 min."""
    if seconds is None or math.isinf(seconds):
        return "-"
    if round(seconds, 2) < MINUTE:
        return f"{seconds:.2f} s"
    if round(seconds, 1) < HOUR:
        minutes, rest = divmod(round(seconds, 1), MINUTE)
        return f"{minutes:.0f} min {rest:.1f} s"
    hours, minutes = divmod(round(seconds / MINUTE), 60)
    return f"{hours:,d} h {minutes} min"


def count(value: float | None, digits: int = 0) -> str:
    """A number with thousands separated; a dash for none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def speed(value: float | None) -> str:
    """Samples a second, with a digit behind the point where the number is small."""
    return count(value, 1 if value is not None and value < 1000 else 0)


def percent(value: float) -> str:
    """A share."""
    return f"{100 * value:.1f} %"


def shorten(name: str, longest: int = _LONGEST_NAME) -> str:
    """A name that fits beside a figure: its middle is left out, control characters are replaced."""
    name = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
    if len(name) <= longest:
        return name
    head = longest // 2
    return f"{name[:head]}…{name[-(longest - head - 1) :]}"
