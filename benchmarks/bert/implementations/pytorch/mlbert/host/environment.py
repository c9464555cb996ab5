"""The process environment. Nothing else reads it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


def environment() -> Mapping[str, str]:
    """Return the process environment."""
    return os.environ


@contextmanager
def default_variable(name: str, value: str) -> Iterator[None]:
    """Set a variable that is not set within the block,
    for a library that reads it while it is imported.
    """
    is_set = name in os.environ
    os.environ.setdefault(name, value)
    yield
    if not is_set:
        del os.environ[name]
