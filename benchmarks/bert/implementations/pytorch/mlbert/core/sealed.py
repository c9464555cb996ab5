"""Notes that a program keeps for itself, as JSON with a checksum: what was changed or cut is not taken for its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_SEAL = "sha256"


def seal(notes: Mapping[str, Any]) -> dict[str, Any]:
    """JSON-able notes with their checksum."""
    return {**notes, _SEAL: digest(notes)}


def unseal(text: str) -> dict[str, Any] | None:
    """What was sealed; None where the text is not that."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    told = found.pop(_SEAL, None)
    return found if told == digest(found) else None


def digest(notes: Mapping[str, Any]) -> str:
    """SHA-256 of JSON-able notes, the same when they have been written and read."""
    as_read = json.loads(json.dumps(notes))  # where all keys are text
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()
