"""Which texts are numbers, in settings, options and files; words and short texts for people."""

from __future__ import annotations

import math
import re
from typing import TypeVar

Number = TypeVar("Number", int, float)

_DECIMAL_COMMA = re.compile(r"\s*[-+]?\d+,\d+\s*", re.ASCII)
_NUMBER = re.compile(r"\s*[-+]?(\d+(?:\.\d*)?|\.\d+)(e[-+]?\d+)?\s*", re.ASCII | re.IGNORECASE)

# What pydantic says of a value, and how we say it. Longer words come first.
_PLAIN_WORDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid dictionary": "an object",
    "a valid list": "a list",
    "match pattern": "have the form",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
}


def plain_words(wanted: str) -> str:
    """Return pydantic's words for what a value must be in ours, such as "at least 1"."""
    for theirs, ours in _PLAIN_WORDS.items():
        wanted = wanted.replace(theirs, ours)
    return wanted


def parse_number(text: str, kind: type[Number]) -> Number:
    """Return a number that is written in ASCII digits;
    Python also reads underscores and digits of other scripts.

    Raises ValueError if the text is not one of this kind, or is nan or infinite.
    """
    number = kind(text) if is_number(text) else None
    if number is None or (isinstance(number, float) and not math.isfinite(number)):
        raise ValueError(f"{text!r} is not a number")
    return number


def is_number(text: str) -> bool:
    """Return True for an integer or a decimal number."""
    return _NUMBER.fullmatch(text) is not None


def has_decimal_comma(text: str) -> bool:
    """Return True for a number with a comma in place of the point."""
    return _DECIMAL_COMMA.fullmatch(text) is not None


def is_count(text: str) -> bool:
    """Return True for digits without sign."""
    return text.isascii() and text.isdecimal()


def shortened(text: str, most: int) -> str:
    """Return the text, or its beginning and an ellipsis: at most ``most`` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as ``1 file`` or ``2,000 files``."""
    plural = "" if count == 1 else "s"
    return f"{count:,} {noun}{plural}"
