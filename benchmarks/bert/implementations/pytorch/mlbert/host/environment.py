"""The process environment. Nothing else reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping


def environment() -> Mapping[str, str]:
    """Return the process environment."""
    return os.environ
