"""Numbers as users write them: ASCII digits only. Python also reads underscores and the digits of other scripts."""

from __future__ import annotations

import re
from typing import TypeVar

_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*", re.ASCII | re.IGNORECASE)
Number = TypeVar("Number", int, float)


def parse_number(text: str, kind: type[Number]) -> Number:
    """Return a number. Raises ValueError if the text is not one of this kind, or is nan or infinite."""
    if not is_number(text):
        raise ValueError(f"{text!r} is not a number")
    return kind(text)


def is_number(text: str) -> bool:
    """Return True for an integer or a decimal number."""
    return _NUMBER.fullmatch(text) is not None


def is_count(text: str) -> bool:
    """Return True for digits without sign."""
    return text.isascii() and text.isdecimal()
