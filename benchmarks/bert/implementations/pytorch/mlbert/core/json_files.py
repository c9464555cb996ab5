"""JSON of unknown origin: how it is read, and whether its values are what a dataclass says."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from mlbert.core.errors import UserError
from mlbert.core.files import read_plain
from mlbert.core.setting import Limits

_MOST_DEPTH, _MOST_DIGITS = 64, 100
_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_SHOWN = 60  # characters of a wrong value in a message
Record = TypeVar("Record")


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
        raise UserError(path, f"line {number} is not JSON ({error})", remedy) from None
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise UserError(path, f'line {number} has no "text"', remedy)
    return whole_characters(text)


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError: it cannot be read, is no JSON (`parse_json`), or no object."""
    content = read_plain(path, remedy)
    try:
        value = parse_json(content)
    except ValueError as error:
        raise UserError(path, f"is not JSON ({error})", remedy) from None
    if not isinstance(value, dict):
        raise UserError(path, "holds no JSON object", remedy)
    return value


def reason_against(kind: type, values: Mapping[str, Any]) -> str | None:
    """Why no dataclass of this kind can be made of the values, by the types of its fields and their `Limits`
    (``Annotated[int, Limits(at_least=1)]``); None where one can. A whole number is a number."""
    known = _rows(kind)
    for name in values:
        if name not in known:
            return f"unknown key {shown(name)}. Known keys: {', '.join(known)}"
    for name, (wanted, limits, needed) in known.items():
        if name not in values:
            if needed:
                return f"key {name!r} is missing"
            continue
        value = values[name]
        if not any(_is_a(value, one) for one in wanted):
            words = " or ".join(map(_words, wanted))
            return f"{name} is {shown(value)}, not {words}"
        if limits and (why_not := limits.reason_against(value)):
            return f"{name} is {shown(value)}, it {why_not}"
    return None


def read_record(kind: type[Record], path: Path, remedy: str) -> Record:
    """The dataclass that a JSON file holds. Raises UserError: as `read_json`, or an entry is missing or wrong."""
    values = read_json(path, remedy)
    if why_not := reason_against(kind, values):
        raise UserError(path, why_not, remedy)
    return kind(**values)


def shown(value: object) -> str:
    """A value as a message shows it: of a long one the beginning."""
    text = ascii(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


@cache
def _rows(kind: Any) -> dict[str, tuple[tuple[Any, ...], Limits | None, bool]]:
    """Field name to its types, limits, and whether it has to be there."""
    hints = typing.get_type_hints(kind, include_extras=True)
    rows = {}
    for one in fields(kind):
        is_annotated = typing.get_origin(hints[one.name]) is typing.Annotated
        hint, *rest = typing.get_args(hints[one.name]) if is_annotated else (hints[one.name],)
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        limits = next((word for word in rest if isinstance(word, Limits)), None)
        needed = one.default is MISSING and one.default_factory is MISSING
        rows[one.name] = (kinds, limits, needed)
    return rows


def _is_a(value: object, kind: Any) -> bool:
    """Whether JSON's value is of the type: int, float, str, bool, None, or dict, list or tuple of one of them."""
    if (container := typing.get_origin(kind)) is not None:
        inner = typing.get_args(kind)[-1 if container is dict else 0]
        container = list if container is tuple else container
        return type(value) is container and all(_is_a(one, inner) for one in _members(value))
    if kind is float:
        return type(value) is int or (type(value) is float and math.isfinite(value))
    return kind is Any or type(value) is kind


def _words(kind: Any) -> str:
    """As `_is_a`."""
    if container := typing.get_origin(kind):
        inner = typing.get_args(kind)[-1 if container is dict else 0]
        plain = "an object" if container is dict else "a list"
        return plain if inner is Any else f"{plain} of {_words(inner)}"
    return _NAMES.get(kind, "null")


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
