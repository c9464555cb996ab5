"""Reading the nested YAML of other programs: ``k=v`` words on top, ``${name}`` filled in, nothing unknown passes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlbert.config.sources import load_yaml
from mlbert.host.errors import UserError
from mlbert.host.names import nearest
from mlbert.host.provenance import tree_relative

_WORD = re.compile(r"([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Value:
    """One leaf: a plain value, a list, or an empty mapping; and where it was given, ``file:line`` or ``argument``."""

    value: Any
    origin: str


def read_nested(path: Path, words: Sequence[str], known: Collection[str]) -> dict[str, Value]:
    """The leaves of a YAML file with words on top, by their dotted names, in the file's order.

    Args:
        path: the file.
        words: ``model.name=mosaic_bert``; values are read as YAML. A later one wins.
        known: legal dotted names; ``*`` stands for one part of a name, ``.**`` at the end for everything below.

    Raises:
        UserError: a file that cannot be read, a word of another form, an unknown name, ``${...}`` that names nothing.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    tree, lines = load_yaml(path)
    for word in words:
        match = _WORD.fullmatch(word)
        if match is None:
            raise UserError(
                "config.syntax", word, "is not of the form name=value", "Write for example model.name=mosaic_bert"
            )
        _check(match[1], known, word)
    try:
        merged = OmegaConf.merge(tree, OmegaConf.from_dotlist(list(words)))
        content = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        reason = f"cannot be resolved ({' '.join(str(error).split())})"
        raise UserError("config.file", path, reason, "Give what ${...} names, or write the value") from None
    given = {name.split("=", 1)[0] for name in words}
    found = {}
    for name, value in _leaves(content, "", known):
        said = next((word for word in given if name == word or name.startswith(f"{word}.")), None)
        place = f"{tree_relative(path.absolute())}:{lines.get(name, 1)}"
        if said is None:
            _check(name, known, place)
        found[name] = Value(value, f"argument {said}=" if said else place)
    return found


def _leaves(value: Any, name: str, known: Collection[str]) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or (name and (not value or f"{name}.**" in known)):
        yield name, value
        return
    for key, item in value.items():
        yield from _leaves(item, f"{name}.{key}" if name else str(key), known)


def _check(name: str, known: Collection[str], place: str) -> None:
    if any(_matches(name, pattern) for pattern in known):
        return
    near = nearest(name, [pattern for pattern in known if "*" not in pattern])
    hint = f"The nearest known one is {near}" if near else "Remove it"
    raise UserError("config.unknown-name", place, f"{name} is an unknown name", hint)


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern allows a name, or names something below it, which an override may replace as a whole."""
    parts, wanted = name.split("."), pattern.split(".")
    if wanted[-1] == "**" and len(parts) >= len(wanted) - 1:
        wanted = wanted[:-1]
        parts = parts[: len(wanted)]
    if len(parts) < len(wanted):
        wanted = wanted[: len(parts)]
    return len(parts) == len(wanted) and all(w in ("*", p) for w, p in zip(wanted, parts, strict=True))
