"""Names that are nearly right: the known one that somebody most likely meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most like ``name``, ignoring case, dashes and underscores; None if none is near."""
    by_shape = {name_shape(candidate): candidate for candidate in known}
    close = difflib.get_close_matches(name_shape(name), by_shape, n=1, cutoff=0.5)
    return by_shape[close[0]] if close else None


def name_shape(name: str) -> str:
    """Return the name without case, dashes and underscores."""
    return re.sub(r"[-_]", "", name).lower()
