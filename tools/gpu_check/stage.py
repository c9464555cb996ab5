"""A stage of a call: parts that run at the same time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Parts that run at the same time.

    Attributes:
        seconds: after which they are stopped.
        parts: names in `gpu_check.parts.parts_by_name`.
    """

    seconds: int
    parts: tuple[str, ...]
