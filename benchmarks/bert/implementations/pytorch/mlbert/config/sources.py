"""Read configuration files: YAML with ``extends:``, and the exports of a ``config_*.sh``."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlbert.config.configuration import Catalog
from mlbert.config.words import unknown_name
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain
from mlbert.host.provenance import tree_relative

_SITE_FILE = "env.sh"
_MOST_YAML_BYTES = 1 << 20
_MOST_YAML_DEPTH = 64
_EXPORT = re.compile(r"export\s+([A-Za-z_]\w*)=(.*)")
_EXPANSION = re.compile(r"\$\(.*\)|\$\{[^}]*\}|\$\w+|`.*`")
_SOURCE = re.compile(r"(?:source|\.)\s+(.+)")
_CONFIG_NAME = re.compile(r"config_(\w+?)_(\d+)x(\d+)x(\d+)x(\d+)(_\w+)?\.sh")


@dataclass(frozen=True)
class ConfigName:
    """Parts of a name ``config_<system>_<nodes>x<ranks>x<batch>x<accumulation>[_<variant>].sh``."""

    system: str  # machine name, up to the first number
    nodes: int
    ranks: int  # per node
    batch: int  # packs per rank and optimizer step
    accumulation: int  # micro-batches per step
    variant: str = ""  # the rest with its underscore, such as _pack

    @property
    def shape(self) -> str:
        """The numbers as written in the name, with the variant."""
        return f"{self.nodes}x{self.ranks}x{self.batch}x{self.accumulation}{self.variant}"


def parse_config_name(name: str) -> ConfigName | None:
    """Return the parts of a config's file name, or None if the name has another form."""
    match = _CONFIG_NAME.fullmatch(name)
    if match is None:
        return None
    nodes, ranks, batch, accumulation = map(int, match.group(2, 3, 4, 5))
    return ConfigName(match[1], nodes, ranks, batch, accumulation, match[6] or "")


@dataclass(frozen=True)
class Export:
    """One ``export NAME=text`` of a shell file."""

    text: str  # the right-hand side without quotes; shell expansions are kept as written
    place: str  # file:line, relative to the tree

    def gives(self, value: str) -> bool:
        """Return True if this line can have produced the value; an expansion matches any text."""
        first, *others = _EXPANSION.split(self.text)
        if not others:
            return value == first
        *middle, last = others
        end = len(value) - len(last)
        if not value.startswith(first) or not value.endswith(last):
            return False
        at = len(first)
        for part in middle:
            found = value.find(part, at, end)
            if found < 0:
                return False
            at = found + len(part)
        return at <= end


def read_yaml(
    catalog: Catalog, path: Path, files: list[Path], children: tuple[Path, ...] = ()
) -> dict[str, tuple[object, str]]:
    """Return field name to (value, ``file:line``) for a file merged over its parents.

    Args:
        catalog: of the known settings.
        path: the file.
        files: every file read is appended, a child before its parents.
        children: files that extend this one.

    Raises:
        UserError: a file is unreadable, is not a list of names with values, or extends itself;
            or a key is unknown.
    """
    path = path.absolute()
    if path in children:
        chain = " -> ".join(child.name for child in (*children, path))
        raise UserError("config.file", path, f"extends itself ({chain})", "Break the cycle")
    tree, parents, lines = _load_mapping(path)
    files.append(path)
    merged: dict[str, tuple[object, str]] = {}
    for parent in parents:
        merged.update(read_yaml(catalog, path.parent / parent, files, (*children, path)))
    for name, value in tree.items():
        if name not in catalog.by_key:
            reason = f"{name} is an unknown key"
            raise UserError(
                "config.unknown-name",
                path,
                reason,
                unknown_name(catalog, name, "key", catalog.by_key).remedy,
            )
        if isinstance(value, dict | list):
            reason = f"{name} is not a single value"
            raise UserError("config.file", path, reason, "Write one value per line, name: value")
        merged[name] = (value, f"{tree_relative(path)}:{lines[name]}")
    return merged


def check_exports(
    catalog: Catalog, config_file: Path, files: list[Path] | None = None
) -> dict[str, Export]:
    """Return the exports of a ``config_*.sh`` and of the files it sources;
    the last export of a name counts.

    A config contains comments, ``source`` lines and ``export NAME=value``, nothing else. Sourced
    configs are found by name in the same folder and checked likewise. A site file ``env.sh`` next
    to it may contain logic: only its exports are read. Other sourced files are ignored.

    Args:
        catalog: of the known settings.
        config_file: the config.
        files: every file read is appended, a config before the files it sources.

    Raises:
        UserError: a line of another kind, or an unknown setting.
    """
    return _read_exports(catalog, Path(config_file), [] if files is None else files, ())


def load_yaml(path: Path) -> tuple[Any, dict[str, int]]:
    """Return a file as an OmegaConf tree, and the line of each dotted name.

    Raises UserError if it is unreadable, not valid YAML, or not a mapping of names.
    """
    # Imported here because kernels and benchmarks need no YAML and must run without these packages.
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    remedy = "Write one value per line, name: value"
    content = read_plain(path, "Name a readable YAML file", _MOST_YAML_BYTES)
    try:
        text = content.decode()
        check_yaml_depth(text)
        tree = OmegaConf.load(io.StringIO(text))
        nodes = yaml.compose(text)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError) as error:
        raise UserError(
            "config.file", path, f"is not valid YAML ({' '.join(str(error).split())})", remedy
        ) from error
    is_mapping = isinstance(tree, DictConfig) and (nodes is None or nodes.id == "mapping")
    if not is_mapping or not all(isinstance(name, str) for name in tree):
        raise UserError("config.file", path, "is not a list of names with values", remedy)
    return tree, dict(_lines(nodes, "")) if nodes else {}


def check_yaml_depth(text: str, depth: int = 0) -> None:
    """Raise ValueError if YAML text, itself at ``depth``, is nested so deep that a recursive parser
    could exhaust the stack, which ends the process; or yaml.YAMLError.
    """
    import yaml

    for event in yaml.parse(
        io.StringIO(text), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    ):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > _MOST_YAML_DEPTH:
            raise ValueError(f"nested more than {_MOST_YAML_DEPTH} deep")


def _lines(node: Any, above: str) -> Iterator[tuple[str, int]]:
    for key, value in node.value:
        yield above + key.value, key.start_mark.line + 1
        if value.id == "mapping":
            yield from _lines(value, f"{above}{key.value}.")


def _load_mapping(path: Path) -> tuple[dict[str, object], list[str], dict[str, int]]:
    """Return a file's names and values, the files that it extends, and the line of each name."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    loaded, lines = load_yaml(path)
    try:
        tree = OmegaConf.to_container(loaded, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        reason = f"is not valid YAML ({' '.join(str(error).split())})"
        raise UserError(
            "config.file", path, reason, "Write one value per line, name: value"
        ) from error
    assert isinstance(tree, dict)
    parents = tree.pop("extends", [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise UserError(
            "config.file", path, "extends does not name a file", "Write extends: parent.yaml"
        )
    return {str(name): value for name, value in tree.items()}, parents, lines


def _read_exports(
    catalog: Catalog, path: Path, files: list[Path], readers: tuple[Path, ...]
) -> dict[str, Export]:
    path = path.absolute()
    if path in readers:
        raise UserError("config.file", path, "sources itself", "Break the cycle")
    content = read_plain(path, "Name a config_<system>.sh")
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError as error:
        raise UserError(
            "file.unreadable", path, f"cannot be read ({error})", "Name a config_<system>.sh"
        ) from error
    files.append(path)
    is_site = path.name == _SITE_FILE
    exports: dict[str, Export] = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if match := _EXPORT.fullmatch(line):
            if match[1] in catalog.by_env:
                exports[match[1]] = Export(_right_side(match[2]), f"{tree_relative(path)}:{number}")
            elif not is_site:
                hint = unknown_name(catalog, match[1], "setting", catalog.by_env).remedy
                raise UserError(
                    "config.unknown-name",
                    f"{path}:{number}",
                    f"{match[1]} is an unknown setting",
                    hint,
                )
        elif match := _SOURCE.fullmatch(line):
            sibling = path.parent / match[1].strip("\"'").rsplit("/", 1)[-1]
            if sibling.name.startswith(("config_", _SITE_FILE)) and sibling.is_file():
                exports |= _read_exports(catalog, sibling, files, (*readers, path))
        elif line and not line.startswith("#") and not is_site:
            reason = f"{line!r} is neither export NAME=value nor source FILE"
            raise UserError("config.file", f"{path}:{number}", reason, "Keep logic out of it")
    return exports


def _right_side(text: str) -> str:
    """Return the text after the equals sign, without quotes and comment."""
    try:
        words = shlex.split(re.sub(r"(^|\s)#.*", "", text))
    except ValueError:
        words = []
    return words[0] if len(words) == 1 else text.strip().strip("\"'")
