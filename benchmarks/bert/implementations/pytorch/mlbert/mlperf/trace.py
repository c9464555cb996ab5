"""From a line of a log to what decided it: the call that logged it, its settings, the recipe, the Python behind it.

The links are read off the code of the log's commit: the arguments of the call, what sets them in the same file, the
functions of those names, the lines that read the setting. Only which settings decide a key of MLPerf's is a
table (`mlbert.mlperf.keys`); a value that differs from its setting is a broken link.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlbert.config.sections import settings_by_key
from mlbert.config.words import unknown_name
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain
from mlbert.host.provenance import PACKAGE_HOME, recipe_file
from mlbert.mlperf.call_sites import Sources, is_key, line_of
from mlbert.mlperf.code_search import CodeSearch, reads
from mlbert.mlperf.keys import FUNCTIONS_OF, SETTINGS_OF, is_hyperparameter, is_number_of
from mlbert.mlperf.logs import Log

_LONGEST_VALUE = 70  # characters that a line for each key shows


@dataclass(frozen=True)
class Link:
    """One step of a chain."""

    step: str  # what it is to the one before
    place: str  # file:line, or where else the value came from
    text: str = ""  # that stands there
    broken: str = ""  # why the chain ends here; empty where it holds

    def __str__(self) -> str:
        verdict = f"   BROKEN: {self.broken}" if self.broken else ""
        return f"{self.step:11} {self.place}   {self.text}".rstrip() + verdict


@dataclass(frozen=True)
class Chain:
    """What leads from a key of a log to the code, in order."""

    key: str
    value: Any
    links: Sequence[Link]

    @property
    def broken(self) -> list[Link]:
        """The links that do not hold."""
        return [link for link in self.links if link.broken]

    def summary(self) -> str:
        """One line: the value, the call that logged it, and where its settings came from."""
        text = json.dumps(self.value)
        value = text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
        places = dict.fromkeys(link.place for link in self.links if link.step in ("logged by", "file", "setting"))
        return f"{self.key} = {value}   <- {' <- '.join(places)}".replace(f"{PACKAGE_HOME}/", "")


class Tracer:
    """Follows the keys of one log through a tree as of the log's commit."""

    def __init__(self, log: Log, tree: Path) -> None:
        self.log = log
        self.sources = Sources(tree, log)
        self.keys = list(dict.fromkeys(event.key for event in log.events))
        self._configuration: dict[str, dict[str, Any]] = log.value("configuration") or {}
        self._recipe = recipe_file(str(log.value("recipe")))
        self._search = CodeSearch(self.sources, self._recipe)

    def chain(self, key: str) -> Chain:
        """The chain of a key's last line. Raises UserError for a key that the log does not have."""
        if key not in self.keys:
            raise unknown_name(key, f"key in {self.log.path}", self.keys)
        event = self.log.all(key)[-1]
        links = [Link("log", f"{self.log.path}:{event.line}")]
        name, number = event.call_site or ("no file named", 0)
        text, place = self.sources.line(name, number), f"{name}:{number}"
        call = self.sources.call_of(name, number, key)
        if text is None or call is None:
            broken = "is not in the tree" if text is None else f"does not log {key}"
            return Chain(key, event.value, [*links, Link("logged by", place, text or "", broken)])
        links.append(Link("logged by", place, ast.unparse(call)))
        if (file_key := key.removesuffix("_sha256")) in ("config_file", "model_shape"):
            links.append(self._file(file_key))
        arguments = [*call.args, *(word.value for word in call.keywords if word.arg == "value")]
        values = [argument for argument in arguments if not is_key(argument, key)][:1]  # behind it are the metadata
        fields = self._fields(key, values)
        needs_reader = is_hyperparameter(key) and not any(isinstance(value, ast.Constant) for value in values)
        links += [link for field in fields for link in self._setting(key, field, event.value, needs_reader)]
        links += self._computation(key, name, values)
        is_decided = any(link.step in ("setting", "set by") for link in links)
        if is_number_of(key, event.value) and not is_decided and not isinstance(values[0], ast.Constant):
            links.append(Link("setting", "?", "", f"nothing is known to set {key}"))
        return Chain(key, event.value, links)

    def _fields(self, key: str, values: list[ast.expr]) -> list[str]:
        """Return the settings that decide a key: read by its call, named like it, or in `SETTINGS_OF`."""
        known = settings_by_key()
        key_of = {one.field: one.key for one in known.values()}
        nodes = [node for value in values for node in ast.walk(value) if isinstance(node, ast.Attribute)]
        read = [node.attr for node in nodes if reads(node, "config", {node.attr})]
        read += [key_of[node.attr] for node in nodes if node.attr in key_of and isinstance(node.value, ast.Name)]
        return [field for field in dict.fromkeys([*read, key, *SETTINGS_OF.get(key, ())]) if field in known]

    def _setting(self, key: str, field: str, logged: Any, needs_reader: bool) -> Iterator[Link]:
        env = settings_by_key()[field].env
        if env not in self._configuration:
            yield Link("setting", env, "", "is not in the log's configuration")
            return
        value, origin = self._configuration[env]["value"], str(self._configuration[env]["origin"])
        yield self._origin(env, field, value, origin)
        if is_number_of(key, logged) and len(SETTINGS_OF.get(key, ())) < 2 and value not in (None, logged):
            yield Link("setting", env, f"{env} = {value}", f"the log says {logged}")
        readers = [Link("read by", *place) for place in self._search.readers(field)]
        yield from readers
        if needs_reader and not readers:
            yield Link("read by", "?", "", f"nothing reads {field}")

    def _origin(self, env: str, field: str, value: Any, origin: str) -> Link:
        """Where a setting got its value: a line of a file, which must name it, or the command line or environment."""
        text = f"{env} = {value}"
        if origin.startswith("recipe "):
            recipe = recipe_file(origin.removeprefix("recipe "))
            for place, line in self._search.default_of(settings_by_key()[field], recipe):
                return Link("setting", place, line)
            return Link("setting", origin, text, f"{recipe} has no default for {field}")
        name, _, number = origin.rpartition(":")
        if not number.isdecimal():
            return Link("setting", origin, text)
        line = line_of(self._text(name), int(number)) or ""
        sets_it = re.match(rf"export\s+{env}=|['\"]?{field}['\"]?\s*:", line)
        return Link("setting", origin, line, "" if sets_it else f"does not set {env}")

    def _file(self, key: str) -> Link:
        """A file that the log names with its SHA-256."""
        name = str(self.log.value(key))
        text = self._text(name)
        if name == "none":
            return Link("file", "none", "nothing was sourced or given")
        if text is None:
            return Link("file", name, "", "is not in the tree")
        is_same = hashlib.sha256(text.encode()).hexdigest() == self.log.value(f"{key}_sha256")
        return Link("file", name, "", "" if is_same else f"is not the file of {key}_sha256")

    def _computation(self, key: str, name: str, values: list[ast.expr]) -> Iterator[Link]:
        """What sets the logged value in the file of its call (a hyper-parameter's also in the recipe) or, where nothing
        does, elsewhere; and the functions of the names that lead there."""
        names, places = set(FUNCTIONS_OF.get(key, ())), []
        for file in (name, self._recipe) if is_hyperparameter(key) else (name,):
            found, parts = self._search.origins(file, values)
            places += found
            names |= parts
        if not places and values and isinstance(values[0], ast.Attribute):
            places = self._search.setters(values[0].attr)
        yield from (Link("set by", *place) for place in places)
        functions = dict(place for part in sorted(names) for place in self._search.definitions(part))
        yield from (Link("computed by", *place) for place in functions.items())
        if key in FUNCTIONS_OF and not functions:
            yield Link("computed by", "?", "", f"no function is called {' or '.join(FUNCTIONS_OF[key])}")

    def _text(self, name: str) -> str | None:
        """A file of the tree, or one outside of it where it still lies."""
        if Path(name).is_absolute():
            with contextlib.suppress(UserError):
                return read_plain(Path(name), "").decode(errors="replace")
        return self.sources.text(name)
