"""JSON of unknown origin: what is read, and what is refused before anybody looks at its values.

JSON that a program keeps for itself, with a checksum: an edited or truncated file is not taken for its own.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlbert.host.errors import UserError
from mlbert.host.files import read_plain

_MOST_DEPTH, _MOST_DIGITS = 64, 100
_SHOWN = 60  # characters of a wrong value in a message


def parse_json(content: bytes | str, finite: bool = True) -> Any:
    """What JSON text holds; where ``finite`` is false, NaN and infinity too.

    Raises:
        ValueError: no UTF-8, no JSON, NaN or another number that is not finite, a name twice in an object, or nested so
            deep that working on it could exhaust Python's stack.
    """
    text = content.decode() if isinstance(content, bytes) else content
    if text.startswith("\ufeff"):
        raise ValueError("begins with a byte order mark")
    try:
        number = _finite if finite else float
        value = json.loads(
            text, object_pairs_hook=_said_once, parse_constant=number, parse_float=number, parse_int=_whole
        )
    except RecursionError:
        raise ValueError("nested too deep") from None
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > _MOST_DEPTH:
            raise ValueError(f"nested more than {_MOST_DEPTH} deep")
        level = [inner for one in level for inner in _members(one) if isinstance(inner, dict | list)]
    return value


def whole_characters(text: str) -> str:
    """A text of JSON, which can name halves of surrogate pairs, with a sign in place of each: they have no bytes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def text_in_line(path: Path, number: int, line: str, remedy: str) -> str:
    """The "text" of the JSON object in a file's line. Raises UserError: the line is no JSON (`parse_json`), or has
    none."""
    try:
        value = parse_json(line)
    except ValueError as error:
        raise UserError("data.row", path, f"line {number} is not JSON ({error})", remedy) from None
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise UserError("data.row", path, f'line {number} has no "text"', remedy)
    return whole_characters(text)


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UserError: it cannot be read, or as `parse_object`."""
    return parse_object(path, read_plain(path, remedy), remedy)


def parse_object(subject: Path | str, content: bytes, remedy: str) -> dict[str, Any]:
    """Return the object that JSON text contains. Raises UserError: it is not JSON (`parse_json`), or not an object."""
    try:
        value = parse_json(content)
    except ValueError as error:
        raise UserError("file.json", subject, f"is not JSON ({error})", remedy) from None
    if not isinstance(value, dict):
        raise UserError("file.json", subject, "holds no JSON object", remedy)
    return value


def shown(value: object) -> str:
    """A value as a message shows it: of a long one the beginning."""
    text = ascii(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _members(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _said_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of a name that is there twice a program reads the last value, a person the first."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {shown(name)} is there twice")
        found[name] = value
    return found


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:_SHOWN]} is not a finite number")
    return number


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
