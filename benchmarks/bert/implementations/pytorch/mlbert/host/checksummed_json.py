"""JSON that a program keeps for itself, with a checksum: an edited or truncated file is not taken for its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_CHECKSUM = "sha256"


def add_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON-able values with their checksum."""
    return {**values, _CHECKSUM: json_sha256(values)}


def parse_checksummed(text: str) -> dict[str, Any] | None:
    """Return the values without their checksum; None if the text is not JSON or the checksum does not match."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    expected = found.pop(_CHECKSUM, None)
    return found if expected == json_sha256(found) else None


def json_sha256(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON-able values, the same before they are written and after they are read."""
    as_read = json.loads(json.dumps(values))  # where all keys are text
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()
