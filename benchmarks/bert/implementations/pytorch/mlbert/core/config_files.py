"""Reading configuration files: YAML with ``extends:``, and the exports of a ``config_*.sh``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mlbert.core.errors import UserError
from mlbert.core.settings import settings_by_env, train_settings

_EXPORT = re.compile(r"export\s+([A-Za-z_]\w*)=(.*)")
_SOURCE = re.compile(r"(?:source|\.)\s+(.+)")
_CONFIG_NAME = re.compile(r"config_(\w+?)_(\d+)x(\d+)x(\d+)x(\d+)(_\w+)?\.sh")


@dataclass(frozen=True)
class ConfigName:
    """What the name ``config_<system>_<nodes>x<ranks>x<batch>x<accumulation>[_<variant>].sh`` tells.

    Attributes:
        system: name of the machine, as far as the first number.
        nodes, ranks: nodes of the job, ranks on each.
        batch: packs per rank and optimizer step.
        accumulation: micro-batches of a step.
        variant: the rest with its underscore, such as ``_pack``; may be empty.
    """

    system: str
    nodes: int
    ranks: int
    batch: int
    accumulation: int
    variant: str = ""

    @property
    def shape(self) -> str:
        """The numbers as the name writes them, with the variant."""
        return f"{self.nodes}x{self.ranks}x{self.batch}x{self.accumulation}{self.variant}"


def parse_config_name(name: str) -> ConfigName | None:
    """The parts of a config's file name; ``None`` for a name of another form."""
    match = _CONFIG_NAME.fullmatch(name)
    if match is None:
        return None
    nodes, ranks, batch, accumulation = (int(match[group]) for group in range(2, 6))
    return ConfigName(match[1], nodes, ranks, batch, accumulation, match[6] or "")


def read_yaml(path: Path, children: tuple[Path, ...] = ()) -> dict[str, tuple[object, str]]:
    """Field name to (value, origin) of one file on top of its parents."""
    path = path.absolute()
    if path in children:
        chain = " -> ".join(child.name for child in (*children, path))
        raise UserError(path, f"extends itself ({chain})", "Break the circle")
    tree, parents = _load_mapping(path)
    merged: dict[str, tuple[object, str]] = {}
    for parent in parents:
        merged.update(read_yaml(path.parent / parent, (*children, path)))
    for name, value in tree.items():
        if name not in train_settings():
            hint = unknown_name(name, "key", train_settings()).remedy
            raise UserError(path, f"{name} is an unknown key", hint)
        if isinstance(value, dict | list):
            raise UserError(path, f"{name} is not a single value", "Write one value a line, name: value")
        merged[name] = (value, path.name)
    return merged


def check_exports(config_file: Path) -> dict[str, str]:
    """The exports of a ``config_*.sh``, name to raw text, with those of the files that it sources.

    A config holds comments, ``source`` lines and ``export NAME=value``, nothing else. Sourced files are looked for by
    name beside the config and checked in the same way; others (site files such as ``env.sh`` may hold logic) are left.

    Raises:
        UserError: a line of another kind, or a name that is not in the table.
    """
    return _read_exports(Path(config_file), ())


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name``, ignoring case, dashes and underscores; ``None`` if none is near."""
    by_shape = {name_shape(candidate): candidate for candidate in known}
    close = difflib.get_close_matches(name_shape(name), by_shape, n=1, cutoff=0.5)
    return by_shape[close[0]] if close else None


def unknown_name(name: str, what: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not in the table, with the nearest one that is."""
    near = nearest(name, known)
    hint = f"The nearest known one is {near}" if near else "See mlbert train --help for the known ones"
    return UserError(name, f"is an unknown {what}", hint)


def name_shape(name: str) -> str:
    """The name without case, dashes and underscores."""
    return re.sub(r"[-_]", "", name).lower()


def _load_mapping(path: Path) -> tuple[dict[str, object], list[str]]:
    """The names and values of one file, and the files that it extends."""
    # Here and not above: kernels and benchmarks need no YAML, so they run where these packages are missing.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    remedy = "Write one value a line, name: value"
    try:
        loaded = OmegaConf.load(path)
        tree = OmegaConf.to_container(loaded, resolve=True)
    except OSError as error:
        raise UserError(path, error.strerror or "cannot be read", "Name a readable YAML file") from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise UserError(path, f"is not valid YAML ({' '.join(str(error).split())})", remedy) from error
    if not isinstance(tree, dict) or not all(isinstance(name, str) for name in tree):
        raise UserError(path, "is not a list of names with values", remedy)
    parents = tree.pop("extends", [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise UserError(path, "extends names no file", "Write extends: parent.yaml")
    return {str(name): value for name, value in tree.items()}, parents


def _read_exports(path: Path, readers: tuple[Path, ...]) -> dict[str, str]:
    path = path.absolute()
    if path in readers:
        raise UserError(path, "sources itself", "Break the circle")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(path, f"cannot be read ({error})", "Name a config_<system>.sh") from error
    exports: dict[str, str] = {}
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if match := _SOURCE.fullmatch(line):
            sibling = path.parent / match[1].strip("\"'").rsplit("/", 1)[-1]
            if sibling.name.startswith("config_") and sibling.is_file():
                exports.update(_read_exports(sibling, (*readers, path)))
            continue
        match = _EXPORT.fullmatch(line)
        if match is None:
            raise UserError(
                f"{path}:{number}", f"{line!r} is neither export NAME=value nor source FILE", "Keep logic out of it"
            )
        if match[1] not in settings_by_env():
            hint = unknown_name(match[1], "setting", settings_by_env()).remedy
            raise UserError(f"{path}:{number}", f"{match[1]} is an unknown setting", hint)
        exports[match[1]] = match[2].strip("\"'")
    return exports
