"""Read untrusted JSON, and write the program's own JSON with a checksum
that detects edits and truncation.
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

_CHECKSUM = "sha256"  # key of the checksum in the program's own files
_MOST_DEPTH = 64
_MOST_DIGITS = 100
_SHOWN = 60  # characters of a wrong value in a message


def problem_in_line(error: ValueError) -> str:
    """Return what `parse_json` found wrong with one line, and where in it."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, column {error.colno}"
    return str(error)


def parse_json(content: bytes | str, finite: bool = True) -> Any:
    """Return the value of JSON text; with ``finite=False`` NaN and infinity are allowed.

    Raises:
        ValueError: not UTF-8, not JSON, NaN or another non-finite number, a repeated name in an
            object, or nested so deep that processing it could exhaust Python's stack.
    """
    text = content.decode() if isinstance(content, bytes) else content
    if text.startswith("\ufeff"):
        raise ValueError("begins with a byte order mark")
    try:
        number = _finite if finite else float
        value = json.loads(
            text,
            object_pairs_hook=_unique_names,
            parse_constant=number,
            parse_float=number,
            parse_int=_integer,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level = [value]
    depth = 0
    while level:
        depth += 1
        if depth > _MOST_DEPTH:
            raise ValueError(f"nested more than {_MOST_DEPTH} deep")
        level = [
            inner for one in level for inner in _members(one) if isinstance(inner, dict | list)
        ]
    return value


def whole_characters(text: str) -> str:
    """Replace each unpaired surrogate, which JSON can contain, by a question mark:
    surrogates cannot be encoded.
    """
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def text_in_line(path: Path, number: int, line: str, remedy: str, name: str = "text") -> str:
    """Return the text of this name in a JSON object, one line of a file.

    Raises UserError if it is not JSON or has no such text.
    """
    try:
        value = parse_json(line)
    except ValueError as error:
        raise UserError(
            "data.row", path, f"line {number} is not JSON ({problem_in_line(error)})", remedy
        ) from None
    text = value.get(name) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise UserError("data.row", path, f'line {number} has no "{name}"', remedy)
    return whole_characters(text)


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises UserError if it cannot be read, or as `parse_object`.
    """
    return parse_object(path, read_plain(path, remedy), remedy)


def parse_object(subject: Path | str, content: bytes, remedy: str) -> dict[str, Any]:
    """Return the object in JSON text.

    Raises UserError if it is not JSON (`parse_json`) or not an object.
    """
    try:
        value = parse_json(content)
    except ValueError as error:
        raise UserError("file.json", subject, f"is not JSON ({error})", remedy) from None
    if not isinstance(value, dict):
        raise UserError("file.json", subject, "is not a JSON object", remedy)
    return value


def as_json(value: Any) -> Any:
    """Return a value as JSON gives it back: with lists for tuples, and text for all keys."""
    return json.loads(json.dumps(value))


def shown(value: object) -> str:
    """Return a value as shown in messages, shortened if long."""
    text = ascii(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _members(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object without repeated names: programs would read the last value,
    people the first.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {shown(name)} is given twice")
        found[name] = value
    return found


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:_SHOWN]} is not a finite number")
    return number


def add_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON-able values with their checksum."""
    return {**values, _CHECKSUM: json_sha256(values)}


def parse_checksummed(text: str) -> dict[str, Any] | None:
    """Return the values without their checksum; None if the text is not JSON
    or the checksum does not match.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    expected = found.pop(_CHECKSUM, None)
    return found if expected == json_sha256(found) else None


def json_sha256(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON-able values; the same before writing and after reading."""
    as_read = as_json(values)
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()
