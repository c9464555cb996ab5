"""Typed access to the leaves of a nested YAML, and the layer of settings that is made of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mlbert.host.errors import UserError
from mlbert.programs.nested_yaml import Value

Default = Value | str | float | bool | None


class Leaves(Mapping[str, Value]):
    """The leaves of one file; a getter raises UserError for a value of another type, and for one that is missing and
    has no default (None)."""

    def __init__(self, path: Path, found: Mapping[str, Value]) -> None:
        self.path, self._found, self._read = path, found, set[str]()

    def __getitem__(self, name: str) -> Value:
        self._read.add(name)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def is_given(self, name: str) -> bool:
        """Whether it is there and not null."""
        return name in self._found and self._found[name].value is not None

    def unread(self) -> list[str]:
        """Names with a value that nobody has asked for."""
        return [name for name in self._found if self.is_given(name) and name not in self._read]

    def text(self, name: str, default: Default) -> Value:
        """A text; numbers are taken as they are written."""
        value = self._get(name, default)
        if isinstance(value.value, bool | dict | list) or not str(value.value).strip():
            raise UserError("config.value", value.origin, f"{name} {value.value!r} is no text", f"Write {name}: ...")
        return Value(str(value.value), value.origin)

    def optional_text(self, name: str, default: str | None) -> str | None:
        """A text, or None."""
        return str(self.text(name, None).value) if self.is_given(name) else default

    def number(self, name: str, default: Default) -> Value:
        """A whole number or not; text such as 5e-4, which YAML takes for text, too."""
        value = self._get(name, default)
        is_number = isinstance(value.value, int | float) and not isinstance(value.value, bool)
        try:
            number = value.value if is_number else float(str(value.value).replace("_", ""))
            if not math.isfinite(number):
                raise ValueError
            return Value(number, value.origin)
        except (ValueError, OverflowError):
            raise UserError(
                "config.value", value.origin, f"{name} {value.value!r} is no number", "Write a number"
            ) from None

    def optional_number(self, name: str) -> float | None:
        """A number, or None where none is given."""
        return self.number(name, None).value if self.is_given(name) else None

    def flag(self, name: str, default: bool) -> Value:
        """true or false."""
        value = self._get(name, default)
        if not isinstance(value.value, bool):
            raise UserError(
                "config.value", value.origin, f"{name} {value.value!r} is neither true nor false", "Write one of them"
            )
        return value

    def choice(self, name: str, known: Sequence[str], default: str) -> Value:
        """One of some texts."""
        value = self.text(name, default)
        if value.value not in known:
            raise UserError(
                "config.choice", value.origin, f"{name} {value.value!r} is unknown", f"Write one of {', '.join(known)}"
            )
        return value

    def _get(self, name: str, default: Default) -> Value:
        if self.is_given(name):
            return self[name]
        if default is None:
            raise UserError(
                "config.missing", self.path, f"{name} is not set", f"Add it, or give {name}=... on the command line"
            )
        return default if isinstance(default, Value) else Value(default, f"default of {name}")


class Layer(dict[str, tuple[object, str]]):
    """Settings by field name, with their origins."""

    def put(self, field: str, value: object, name: str = "", origin: str | None = None) -> None:
        """Enters a value; of a `Value` the origin is its own, otherwise it is given, or the YAML's ``name``."""
        given = value if isinstance(value, Value) else Value(value, origin or name or "main.py")
        self[field] = (given.value, given.origin)
