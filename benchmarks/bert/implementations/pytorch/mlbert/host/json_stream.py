"""Read a JSON object with a long array without holding the array in memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mlbert.host.json_files import parse_json, shown

_BLOCK = 1 << 20  # bytes that are decoded at once
_MOST_BYTES = 1 << 24  # of an item of the array, or of another value
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class Item(NamedTuple):
    """A value, and the bytes of the text that it is in."""

    value: Any
    start: int
    end: int  # one past its last byte


def parse_long_object(content: np.ndarray, array: str, take: Callable[[Item], None]) -> Any:
    """Return an object in JSON text, but pass the items of one of its arrays to ``take``.

    Args:
        content: uint8 [B], the text.
        array: name of the member whose items are passed on, in order. In the object that is
            returned, its value is an empty list.
        take: called with each item.

    Returns the value that the text has if that is not an object.

    Raises ValueError as `mlbert.host.json_files.parse_json`, or if a value other than the array is
    longer than 16 MiB.
    """
    text = _Text(content)
    found = _members(text, array, take) if text.next_character() == "{" else text.value().value
    if text.next_character():
        raise ValueError(f"Extra data at byte {text.place:,}")
    return found


def _members(text: _Text, array: str, take: Callable[[Item], None]) -> dict[str, Any]:
    text.skip("{")
    members: dict[str, Any] = {}
    while text.next_character() != "}" or members:
        name = text.name()
        if name in members:
            raise ValueError(f"the name {shown(name)} is given twice")
        text.skip(":")
        if name == array and text.next_character() == "[":
            members[name] = []
            _take_items(text, take)
        else:
            members[name] = text.value().value
        if text.next_character() != ",":
            break
        text.skip(",")
    text.skip("}")
    return members


def _take_items(text: _Text, take: Callable[[Item], None]) -> None:
    text.skip("[")
    is_first = True
    while text.next_character() != "]" or not is_first:
        take(text.value())
        is_first = False
        if text.next_character() != ",":
            break
        text.skip(",")
    text.skip("]")


class _Text:
    """A place in JSON text, which is read in blocks.

    The blocks are decoded as Latin-1, so that each character is a byte of the text: it finds where
    values end. The bytes of a value are then parsed as UTF-8.
    """

    def __init__(self, content: np.ndarray) -> None:
        self._content = content
        self._block = ""
        self._start = 0  # byte of the block's first character
        self._at = 0  # character of the block

    @property
    def place(self) -> int:
        """The next byte."""
        return self._start + self._at

    @property
    def _is_last(self) -> bool:
        return self._start + len(self._block) == len(self._content)

    def _read_on(self) -> None:
        """Extend the block by its length or more, and drop what is behind the place."""
        end = self._start + len(self._block)
        self._start = self.place
        kept = self._block[self._at :]
        more = self._content[end : end + max(_BLOCK, len(kept))]
        self._block = kept + more.tobytes().decode("latin-1")
        self._at = 0

    def next_character(self) -> str:
        """Move to the next character that is not white space, and return it; "" at the end."""
        while True:
            space = _SPACE.match(self._block, self._at)
            assert space is not None, "it matches the empty string"
            self._at = space.end()
            if self._at < len(self._block):
                return self._block[self._at]
            if self._is_last:
                return ""
            self._read_on()

    def skip(self, character: str) -> None:
        """Pass a character. Raises ValueError if another one is there."""
        if self.next_character() != character:
            raise ValueError(f"Expecting '{character}' at byte {self.place:,}")
        self._at += 1

    def name(self) -> str:
        """Pass the name of a member, and return it. Raises ValueError if there is none."""
        if self.next_character() != '"':
            raise ValueError(
                f"Expecting property name enclosed in double quotes at byte {self.place:,}"
            )
        name: str = self.value().value
        return name

    def value(self) -> Item:
        """Pass a value, and return it. Raises ValueError as `parse_long_object`."""
        self.next_character()
        while True:
            problem = None
            length = 0
            try:
                length = _DECODER.raw_decode(self._block, self._at)[1] - self._at
            except json.JSONDecodeError as error:
                problem = f"{error.msg} at byte {self._start + error.pos:,}"
            except RecursionError:
                raise ValueError("nested too deeply") from None
            # A value that ends with the block may have more digits in the next one.
            is_whole = problem is None and self._at + length < len(self._block)
            if is_whole or self._is_last:
                break
            if len(self._block) - self._at > _MOST_BYTES:
                raise ValueError(f"a value of more than {_MOST_BYTES >> 20} MiB")
            self._read_on()
        if problem is not None:
            raise ValueError(problem)
        start = self.place
        self._at += length
        return Item(parse_json(self._content[start : self.place].tobytes()), start, self.place)
