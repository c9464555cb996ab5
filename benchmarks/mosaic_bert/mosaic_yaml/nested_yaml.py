"""Read nested YAML of other programs: apply ``k=v`` words, resolve ``${name}``,
and reject unknown names.

`Leaves` gives typed access to the values; `Layer` collects the settings made from them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlbert.config.sources import check_yaml_depth, load_yaml
from mlbert.host.errors import UserError, nearest
from mlbert.host.json_files import shown
from mlbert.host.provenance import tree_relative
from mlbert.host.texts import parse_number

_REFERENCE = re.compile(r"\$\{([\w.-]+)\}")
_ARGUMENT = re.compile(r"argument (.+)=")
_WORD = re.compile(r"([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class YamlValue:
    """One leaf: a plain value, a list or an empty mapping, and its origin:
    ``file:line`` or ``argument``.

    ``uses`` are the dotted names that the value takes from elsewhere by ``${...}``,
    directly or through another one.
    """

    value: Any
    origin: str
    uses: tuple[str, ...] = field(default=(), compare=False)


def read_nested(path: Path, words: Sequence[str], known: Collection[str]) -> dict[str, YamlValue]:
    """Return the leaves of a YAML file overridden by words, by dotted name, in the file's order.

    Args:
        path: the file.
        words: such as ``model.name=mosaic_bert``; values are parsed as YAML, later ones win.
        known: legal dotted names; ``*`` matches one part of a name,
            ``.**`` at the end everything below.

    Raises:
        UserError: an unreadable file, a malformed word, an unknown name, a value in place of names,
            or a ``${...}`` that does not resolve.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    tree, lines = load_yaml(path)
    for word in words:
        match = _WORD.fullmatch(word)
        if match is None:
            remedy = "Write for example model.name=mosaic_bert"
            raise UserError("config.syntax", word, "is not of the form name=value", remedy)
        _check(match[1], known, word)
        try:
            check_yaml_depth(match[2], depth=match[1].count("."))
            tree = OmegaConf.merge(tree, OmegaConf.from_dotlist([word]))
        except (OmegaConfBaseException, yaml.YAMLError, TypeError, ValueError) as error:
            reason = f"is not a value for {shown(match[1])[1:-1]} ({' '.join(str(error).split())})"
            raise UserError(
                "config.value", shown(word)[1:-1], reason, "Write it as in the YAML file"
            ) from None
    try:
        content = OmegaConf.to_container(tree, resolve=True)
        unresolved = dict(_leaves(OmegaConf.to_container(tree), "", known))
    except (OmegaConfBaseException, yaml.YAMLError, RecursionError) as error:
        reason = f"cannot be resolved ({' '.join(str(error).split())})"
        raise UserError(
            "config.file", path, reason, "Define the name in ${...}, or write the value"
        ) from None
    given = {name.split("=", 1)[0] for name in words}
    found = {}
    for name, value in _leaves(content, "", known):
        uses = _used_names(name, unresolved)
        source = name
        while _REFERENCE.fullmatch(str(unresolved.get(source))):  # its value was given there
            (source,) = _references(source, unresolved)
        override = next(
            (word for word in given if source == word or source.startswith(f"{word}.")), None
        )
        place = f"{tree_relative(path.absolute())}:{lines.get(source, 1)}"
        found[name] = YamlValue(value, f"argument {override}=" if override else place, uses)
        _check(name, known, found[name].origin)
        if not isinstance(value, dict | None) and not _takes_value(name, known):
            reason = f"{name} is {shown(value)}, not names with values"
            raise UserError(
                "config.value", found[name].origin, reason, f"Write {name}.NAME=VALUE, or remove it"
            )
    return found


def _used_names(name: str, unresolved: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names that a leaf's value is taken from by ``${...}``,
    directly or through another name.
    """
    found = _references(name, unresolved)
    for used in found:  # grows: a reference may lead to a reference
        found += [further for further in _references(used, unresolved) if further not in found]
    return tuple(found)


def _references(name: str, unresolved: Mapping[str, Any]) -> list[str]:
    """Return the names in the ``${...}`` of a leaf,
    or below those of the mapping that it belongs to.
    """
    place = name
    below = ""
    while place not in unresolved and "." in place:
        place, _, last = place.rpartition(".")
        below = f".{last}{below}"
    references = _REFERENCE.findall(str(unresolved.get(place)))
    return [_absolute(reference, place) + below for reference in references]


def _absolute(reference: str, place: str) -> str:
    """Return the dotted name that a reference in ``place`` means:
    leading dots count from there upwards.
    """
    relative = reference.lstrip(".")
    dots = len(reference) - len(relative)
    if not dots:
        return reference
    return ".".join([*place.split(".")[:-dots], relative])


def _leaves(value: Any, name: str, known: Collection[str]) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or (name and (not value or f"{name}.**" in known)):
        yield name, value
        return
    for key, item in value.items():
        yield from _leaves(item, f"{name}.{key}" if name else str(key), known)


def _check(name: str, known: Collection[str], place: str) -> None:
    if any(_matches(name, pattern) for pattern in known):
        return
    whole = (pattern.removesuffix(".**") for pattern in known)
    near = nearest(name, [pattern for pattern in whole if "*" not in pattern])
    hint = f"Did you mean {near}?" if near else "Remove it"
    raise UserError("config.unknown-name", place, f"{name} is an unknown name", hint)


def _matches(name: str, pattern: str) -> bool:
    """Return True if a pattern allows a name or anything below it:
    an override may replace a whole mapping.
    """
    parts = name.split(".")
    wanted = pattern.split(".")
    if wanted[-1] == "**" and len(parts) >= len(wanted) - 1:
        wanted = wanted[:-1]
        parts = parts[: len(wanted)]
    if len(parts) < len(wanted):
        wanted = wanted[: len(parts)]
    return len(parts) == len(wanted) and all(
        w in ("*", p) for w, p in zip(wanted, parts, strict=True)
    )


def _takes_value(name: str, known: Collection[str]) -> bool:
    """Return True if a pattern is as long as the name:
    otherwise the name stands for what is below it.
    """
    return any(
        pattern.count(".") == name.count(".") and _matches(name, pattern) for pattern in known
    )


Default = YamlValue | str | float | bool | None


class Leaves(Mapping[str, YamlValue]):
    """The leaves of one file.

    The getters raise UserError for a value of the wrong type,
    or a missing one without default (None).
    """

    def __init__(self, path: Path, found: Mapping[str, YamlValue]) -> None:
        self.path = path
        self._found = found
        self._read = set[str]()

    def __getitem__(self, name: str) -> YamlValue:
        value = self._found[name]
        self._read.update((name, *value.uses))
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def is_given(self, name: str) -> bool:
        """Return True if the name exists and is not null."""
        return name in self._found and self._found[name].value is not None

    def unread(self) -> list[str]:
        """Return the names with values that were never read."""
        return [name for name in self._found if self.is_given(name) and name not in self._read]

    def typed_name(self, *names: str) -> str:
        """Return the first of these names that is given, or the one whose value it takes by
        ``${...}``; the first if none is given. A user who writes another value there changes it.
        """
        for name in names:
            if self.is_given(name):
                leaf = self._found[name]
                sources = [used for used in leaf.uses if self.is_given(used)]
                return next(
                    (used for used in sources if self._found[used].value == leaf.value), name
                )
        return names[0]

    def text(self, name: str, default: Default) -> YamlValue:
        """Return a text; numbers are returned as text."""
        value = self._get(name, default)
        if isinstance(value.value, bool | dict | list) or not str(value.value).strip():
            reason = f"{_as_typed(name, value)} is not text"
            raise UserError("config.value", value.origin, reason, f"Write {name}: TEXT")
        return YamlValue(str(value.value), value.origin)

    def optional_text(self, *names: str) -> str | None:
        """Return the text of the first name that is given, or None."""
        return next(
            (str(self.text(name, None).value) for name in names if self.is_given(name)), None
        )

    def number(self, name: str, default: Default) -> YamlValue:
        """Return a number; also parses text such as 5e-4, which YAML reads as text."""
        value = self._get(name, default)
        is_number = isinstance(value.value, int | float) and not isinstance(value.value, bool)
        try:
            number = value.value if is_number else parse_number(str(value.value), float)
            if not math.isfinite(number):
                raise ValueError
            return YamlValue(number, value.origin)
        except (ValueError, OverflowError):
            reason = f"{_as_typed(name, value)} is not a number"
            raise UserError("config.value", value.origin, reason, "Write a number") from None

    def flag(self, name: str, default: bool) -> YamlValue:
        """Return true or false."""
        value = self._get(name, default)
        if not isinstance(value.value, bool):
            reason = f"{_as_typed(name, value)} is neither true nor false"
            raise UserError("config.value", value.origin, reason, "Write one of them")
        return value

    def refuse(self, name: str, why: str = "") -> None:
        """Raise UserError if a flag that is not supported is true."""
        if (value := self.flag(name, False)).value:
            raise UserError(
                "config.unsupported", value.origin, f"{name} is not supported{why}", "Remove it"
            )

    def sequence(
        self, name: str, default: Default, example: str, size: int | None = None
    ) -> YamlValue:
        """Return a list, of ``size`` items if that is given."""
        value = self._get(name, default)
        if not isinstance(value.value, list) or (size is not None and len(value.value) != size):
            reason = f"{_as_typed(name, value)} is not a list{f' of {size}' if size else ''}"
            raise UserError("config.value", value.origin, reason, f"Write {example}")
        return value

    def choice(self, name: str, known: Sequence[str], default: str) -> YamlValue:
        """Return one of the known texts."""
        value = self.text(name, default)
        if value.value not in known:
            reason = f"{_as_typed(name, value)} is unknown"
            raise UserError("config.choice", value.origin, reason, "Use a valid one", known)
        return value

    def _get(self, name: str, default: Default) -> YamlValue:
        if self.is_given(name):
            return self[name]
        if default is None:
            remedy = f"Add it, or give {name}=... on the command line"
            raise UserError("config.missing", self.path, f"{name} is not set", remedy)
        return (
            default if isinstance(default, YamlValue) else YamlValue(default, f"default of {name}")
        )


def _as_typed(name: str, value: YamlValue) -> str:
    """Return the name and value of a leaf, with the name on the command line if
    that gave the value.
    """
    argument = _ARGUMENT.fullmatch(value.origin)
    return f"{argument[1] if argument else name} {value.value!r}"


class Layer(dict[str, tuple[object, str]]):
    """Settings with their origins, by field name."""

    def put(self, field: str, value: object, origin: str = "main.py") -> None:
        """Set a value; ``origin`` is where it comes from if it is not a `YamlValue`."""
        given = value if isinstance(value, YamlValue) else YamlValue(value, origin)
        self[field] = (given.value, given.origin)
