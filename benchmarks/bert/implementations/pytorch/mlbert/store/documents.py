"""Files that come with data, read with suspicion: anybody may have written, cut or changed them.

    with judging(path, "is not a list", "Restore it"):
        found = parse_document(read_plain(path))
        size = found.number("size", 1, 10)

Every field is asked for with its type and bounds; what is wrong is told with its name, in one line.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlbert.core.errors import UserError
from mlbert.core.json_files import parse_json, shown

MOST = 1 << 53  # of any count: the integers that every JSON reader keeps
SHA256 = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[^./\\\0][^/\\\0]{0,254}")


@contextmanager
def reading(path: Path | str, remedy: str = "Check the path and its permissions") -> Iterator[None]:
    """Makes a UserError of the block's OSError: the system does not let us read this file or folder."""
    try:
        yield
    except OSError as error:
        raise UserError(path, f"cannot be read ({error.strerror})", remedy) from None


def plain_size(path: Path) -> int:
    """Bytes of a file. Raises UserError: it cannot be read, or is none (opening a pipe would wait for ever)."""
    with reading(path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise UserError(path, "is a folder" if stat.S_ISDIR(status.st_mode) else "is not a plain file", "Give a file")
    return status.st_size


@contextmanager
def judging(path: Path, what: str, remedy: str) -> Iterator[None]:
    """Makes a UserError, "<path>: <what> (<why>)", of anything that reading a document raises."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(path, f"{what} ({error})", remedy) from None


class Fields:
    """An object of a document; ``place`` says where it stands, for messages. All raise ValueError."""

    def __init__(self, values: object, place: str = "") -> None:
        if not isinstance(values, dict):
            raise ValueError(f"{place or 'it'} is {shown(values)}, not an object")
        self._values, self._place = values, f"{place}." if place else ""

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def any(self, name: str) -> Any:
        """A field of any type."""
        if name not in self._values:
            raise ValueError(f"there is no {self._place}{name}")
        return self._values[name]

    def number(self, name: str, low: int = 0, high: int = MOST) -> int:
        """A whole number within bounds."""
        value = self.any(name)
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{self._place}{name} is {shown(value)}, not a whole number from {low} to {high}")
        return value

    def numbers(self, name: str, low: int = 0, high: int = MOST) -> list[int]:
        """A list of them."""
        return [Fields({name: value}).number(name, low, high) for value in self._list(name)]

    def text(self, name: str, pattern: re.Pattern[str] | None = None) -> str:
        """Text, of a form where one is given."""
        value = self.any(name)
        if not isinstance(value, str) or (pattern and not pattern.fullmatch(value)):
            raise ValueError(f"{self._place}{name} is {shown(value)}")
        return value

    def file(self, name: str) -> str:
        """Name of a file or folder beside the document; never a path that leads elsewhere."""
        return self.text(name, _FILE_NAME)

    def part(self, name: str) -> Fields:
        """An object within."""
        return Fields(self.any(name), f"{self._place}{name}")

    def parts(self, name: str) -> list[Fields]:
        """A list of objects, at least one."""
        found = [Fields(value, f"{self._place}{name}[{place}]") for place, value in enumerate(self._list(name))]
        if not found:
            raise ValueError(f"{self._place}{name} is empty")
        return found

    def values(self) -> dict[str, Any]:
        """All that the object holds."""
        return dict(self._values)

    def _list(self, name: str) -> list[Any]:
        value = self.any(name)
        if not isinstance(value, list):
            raise ValueError(f"{self._place}{name} is {shown(value)}, not a list")
        return value


def parse_document(content: bytes) -> Fields:
    """A JSON object. Raises ValueError as `mlbert.core.json_files.parse_json`."""
    return Fields(parse_json(content))
