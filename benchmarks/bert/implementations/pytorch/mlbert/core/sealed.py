"""Notes that a program keeps for itself, as JSON with a checksum: what was changed or cut is not taken for its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_SEAL = "sha256"


def seal(notes: Mapping[str, Any]) -> dict[str, Any]:
    """JSON-able notes with their checksum."""
    return {**notes, _SEAL: _digest(notes)}


def unseal(text: str) -> dict[str, Any] | None:
    """What was sealed; None where the text is not that."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    digest = found.pop(_SEAL, None)
    return found if digest == _digest(found) else None


def _digest(notes: Mapping[str, Any]) -> str:
    as_read = json.loads(json.dumps(notes))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()
