"""Trace a log line back to its causes: the call that logged it, its settings, the recipe and the Python behind it.

The links come from the source at the log's commit: the arguments of the call, the assignments to them in the same
file, the functions with those names, and the lines that read the setting. Only the settings behind an MLPerf key are
listed in a table (`mlbert.mlperf.keys`). A logged value that differs from its setting is a broken link.

`CodeSearch` matches names in syntax trees as text, without types, so it finds every place a name could come from.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlbert.config.section import Setting
from mlbert.config.sections import SECTIONS, settings_by_key
from mlbert.config.words import unknown_name
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain
from mlbert.host.provenance import PACKAGE_HOME, TENSORFLOW2_HOME, recipe_file
from mlbert.mlperf.call_sites import Sources, is_key, line_of, terminal_name
from mlbert.mlperf.keys import FUNCTIONS_OF, SETTINGS_OF, is_hyperparameter, is_number_of
from mlbert.mlperf.logs import Log

_OLD_FOLDERS = ("train", "feed", "dist", "core")  # older names of these folders, for logs from older commits
_SHARED_FOLDERS = ("runs", "mlperf", "config", "host", "data/formats", *_OLD_FOLDERS)
_FOLDERS = ("recipes", "training", "models", "optim", "distributed", "ops", "data/loading", *_SHARED_FOLDERS)
# These files read every setting but decide nothing.
_CHECKS = ("core/plan.py", "core/config.py", "report/run_plan.py", "config/contradictions.py")
_SETTINGS = f"{PACKAGE_HOME}/core/settings.py"  # in older trees, where one class held all settings
_SECTION_NAMES = {section.__name__ for section in SECTIONS}
_CONFIG = "config"  # the variable that held all settings in those trees
_MOST_DEFINITIONS = 6  # of one name; a longer list does not help the reader


class CodeSearch:
    """Search the Python files of a tree that a recipe can run.

    A place is a pair: ``file:line`` and the text of that line.
    """

    def __init__(self, sources: Sources, recipe: str) -> None:
        build = f"{recipe.removesuffix('.py')}_build.py"
        self._sources, self._recipe = sources, recipe if sources.text(build) is None else build

    def lines(self, name: str, matches: Callable[[ast.AST], bool]) -> list[tuple[str, str]]:
        """Return the lines of a file with a matching syntax node, in order and without duplicates."""
        nodes = (node for node in self._sources.nodes(name) if isinstance(node, ast.expr | ast.stmt) and matches(node))
        return [self._place(name, number) for number in sorted({node.lineno for node in nodes})]

    def constants(self, text: str, name: str) -> list[tuple[str, str]]:
        """Return the lines of a file that contain a string constant, such as a key of a mapping."""
        return self.lines(name, lambda node: isinstance(node, ast.Constant) and node.value == text)

    def readers(self, key: str) -> list[tuple[str, str]]:
        """Return where a setting is read, directly or through a property of its section.

        Searches the recipe and the code that all recipes share. If nothing reads it there, returns the places that
        name it in a string.
        """
        setting = settings_by_key()[key]
        fields = {key, setting.field}
        for name in (self.section_file(setting), _SETTINGS):
            for node in self._sources.nodes(name):
                if isinstance(node, ast.FunctionDef) and any(reads(part, "self", fields) for part in ast.walk(node)):
                    fields.add(node.name)
        owner = setting.section.__name__ if self._has_sections else _CONFIG
        found = [
            self._place(name, line)
            for name, attributes in self._reads.items()
            for line in sorted({line for of, field, line in attributes if of == owner and field in fields})
        ]
        # It may be read by name: getattr(config, name). Recipes are excluded: there the name sets a default.
        return found or [p for n in self._reads if "/recipes/" not in n for p in self.constants(key, n)]

    @cached_property
    def _has_sections(self) -> bool:
        return self._sources.text(_SETTINGS) is None

    @cached_property
    def _reads(self) -> dict[str, list[tuple[str, str, int]]]:
        """Map each file to the (owner, attribute, line) it reads, excluding other recipes and declarations."""
        names = [name for name in self._files() if not name.endswith("/config.py")]
        names = [name for name in names if f"{PACKAGE_HOME}/config/" not in name and "/recipes/" not in name]
        reads_of = _reads_of_sections if self._has_sections else _reads_of_config
        return {name: list(reads_of(self._sources.nodes(name))) for name in dict.fromkeys([self._recipe, *names])}

    def default_of(self, setting: Setting, recipe: str) -> list[tuple[str, str]]:
        """Return the line that sets a setting's default, in the recipe or else in its section.

        Empty if the recipe does not exist.
        """
        if not self._has_sections:
            return self.constants(setting.key, recipe)
        if self._sources.text(recipe) is None:
            return []
        if setting.env == "RECIPE":
            return self._given_name(recipe)
        return self._entries(setting.env, recipe) or self._declared_default(setting)

    def _given_name(self, recipe: str) -> list[tuple[str, str]]:
        """Return the line ``name=...`` of a recipe, which sets RECIPE."""
        calls = (node for node in self._sources.nodes(recipe) if isinstance(node, ast.Call))
        words = (word for call in calls if terminal_name(call.func) == "Recipe" for word in call.keywords)
        return [self._place(recipe, word.value.lineno) for word in words if word.arg == "name"]

    def _entries(self, text: str, name: str) -> list[tuple[str, str]]:
        """Return the lines of a file where a string is the key of a dict literal."""
        mappings = (node for node in self._sources.nodes(name) if isinstance(node, ast.Dict))
        keys = (key for mapping in mappings for key in mapping.keys)
        found = {key.lineno for key in keys if isinstance(key, ast.Constant) and key.value == text}
        return [self._place(name, line) for line in sorted(found)]

    def _declared_default(self, setting: Setting) -> list[tuple[str, str]]:
        name = self.section_file(setting)
        calls = (node for node in self._sources.nodes(name) if isinstance(node, ast.Call) and node.args)
        declared = (call for call in calls if getattr(call.args[0], "value", None) == setting.env)
        defaults = (word.value.lineno for call in declared for word in call.keywords if word.arg == "default")
        return [self._place(name, line) for line in defaults]

    @staticmethod
    def section_file(setting: Setting) -> str:
        """Return the file that declares a setting."""
        return f"{PACKAGE_HOME}/{setting.section.__module__.partition('.')[2].replace('.', '/')}.py"

    def origins(self, name: str, values: list[ast.expr]) -> tuple[list[tuple[str, str]], set[str]]:
        """Return the lines of a file that set the names in some expressions, and all names found.

        Follows two levels of assignment. The names include those of called functions.
        """
        wanted, called = _names_in(values)
        places: dict[str, str] = {}
        for _ in range(2):  # the names themselves, then the names they are set from
            setting = [(line, value) for line, target, value in _set_by(self._sources.nodes(name)) if target in wanted]
            places.update(self._place(name, line) for line in sorted(line for line, _ in setting))
            variables, functions = _names_in(value for _, value in setting)
            wanted, called = wanted | variables, called | functions
        return list(places.items()), wanted | called

    def setters(self, attribute: str) -> list[tuple[str, str]]:
        """Return the lines of the package that assign to an attribute of this name, on any object."""

        def sets(node: ast.AST) -> bool:
            return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == attribute

        return [place for name in self._files() for place in self.lines(name, sets)]

    def definitions(self, name: str) -> list[tuple[str, str]]:
        """Return the functions and module constants with this name; empty if the name is too common to be useful."""
        found = self._definitions.get(name, [])
        return found if len(found) <= _MOST_DEFINITIONS and not hasattr(builtins, name) else []

    @cached_property
    def _definitions(self) -> dict[str, list[tuple[str, str]]]:
        """Map each name to its definitions: functions and module-level assignments.

        Functions with nothing but a docstring, as in protocols, are left out.
        """
        found: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for file in self._files():
            for node in self._sources.nodes(file):
                if isinstance(node, ast.FunctionDef) and not all(map(_is_text, node.body)):
                    found[node.name].append(self._place(file, node.lineno))
                for line, defined, _ in _set_by(node.body) if isinstance(node, ast.Module) else ():
                    found[str(defined)].append(self._place(file, line))
        return found

    def _files(self) -> list[str]:
        homes = [f"{PACKAGE_HOME}/{folder}" for folder in _FOLDERS]
        if self._recipe.startswith(TENSORFLOW2_HOME):
            homes = [TENSORFLOW2_HOME, *(f"{PACKAGE_HOME}/{folder}" for folder in _SHARED_FOLDERS)]
        names = (name for home in homes for name in self._sources.python_files(home))
        return [name for name in names if not name.endswith(_CHECKS)]

    def _place(self, name: str, line: int) -> tuple[str, str]:
        return f"{name}:{line}", self._sources.line(name, line) or ""


def reads(node: ast.AST, owner: str, fields: set[str]) -> bool:
    """Return True if a node is ``owner.field`` or ``x.owner.field`` for one of the fields."""
    return isinstance(node, ast.Attribute) and node.attr in fields and terminal_name(node.value) == owner


def _reads_of_config(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str, int]]:
    """Yield each attribute of ``config`` that a file reads, as (``config``, attribute, line)."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and terminal_name(node.value) == _CONFIG:
            yield _CONFIG, node.attr, node.lineno


def _reads_of_sections(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str, int]]:
    """Yield each section attribute that the functions of a file read, as (section, attribute, line)."""
    for function in (node for node in nodes if isinstance(node, ast.FunctionDef)):
        parts = list(ast.walk(function))
        names = dict(_section_names(parts))
        for part in (part for part in parts if isinstance(part, ast.Attribute)):
            section = _section_in(part.value) or names.get(terminal_name(part.value) or "")
            if section:
                yield section, part.attr, part.lineno


def _section_names(parts: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield (name, section) for parameters and variables that hold a section (``name = config[Section]``)."""
    for part in parts:
        if isinstance(part, ast.arg):
            kinds = [node for node in _alternatives(part.annotation) if terminal_name(node) in _SECTION_NAMES]
            yield from ((part.arg, str(terminal_name(kind))) for kind in kinds)
        elif isinstance(part, ast.Assign):
            for target, value in _assigned(part):
                if section := _section_in(value):
                    yield str(terminal_name(target)), section


def _alternatives(annotation: ast.expr | None) -> list[ast.expr]:
    """Return the types of an annotation such as ``A | None``."""
    if isinstance(annotation, ast.BinOp):
        return [*_alternatives(annotation.left), *_alternatives(annotation.right)]
    return [] if annotation is None else [annotation]


def _section_in(node: ast.AST) -> str | None:
    """Return the section name of a ``config[Section]`` expression, or None for other expressions."""
    name = terminal_name(node.slice) if isinstance(node, ast.Subscript) else None
    return name if name in _SECTION_NAMES else None


def _assigned(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each target of an assignment with its value, splitting ``a, b = c, d`` into pairs."""
    for target in node.targets:
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        values = node.value.elts if isinstance(node.value, ast.Tuple) and len(targets) > 1 else []
        yield from zip(targets, values if len(values) == len(targets) else [node.value] * len(targets), strict=True)


def _names_in(values: Iterable[ast.expr]) -> tuple[set[str], set[str]]:
    """Return the variables and the called functions in some expressions, each as the last part of its dotted name."""
    nodes = [node for value in values for node in ast.walk(value)]
    sections = {part for node in nodes if _section_in(node) for part in ast.walk(node)}
    nodes = [node for node in nodes if node not in sections]
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    ends = [node for node in nodes if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner]
    functions = {str(terminal_name(node)) for node in ends if id(node) in called}
    return {str(terminal_name(node)) for node in ends if id(node) not in called}, functions


def _set_by(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str | None, ast.expr]]:
    """Yield (line, name, value) for everything that gives a name a value."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target, value in _assigned(node):
                yield node.lineno, terminal_name(target), value
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            yield node.lineno, terminal_name(node.target), node.value
        elif isinstance(node, ast.keyword):
            yield node.value.lineno, node.arg, node.value
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and not isinstance(value, ast.Constant):
                    yield key.lineno, str(key.value), value


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


_LONGEST_VALUE = 70  # characters of a value in a one-line summary


@dataclass(frozen=True)
class Link:
    """One step of a chain."""

    step: str  # relation to the previous link
    place: str  # file:line, or another origin of the value
    text: str = ""  # the source text at that place
    broken: str = ""  # why the link is broken; empty if it is not

    def __str__(self) -> str:
        verdict = f"   BROKEN: {self.broken}" if self.broken else ""
        return f"{self.step:11} {self.place}   {self.text}".rstrip() + verdict


@dataclass(frozen=True)
class Trace:
    """The chain of links from a log key to the code, in order."""

    key: str
    value: Any
    links: Sequence[Link]

    @property
    def broken(self) -> list[Link]:
        """Return the broken links."""
        return [link for link in self.links if link.broken]

    def summary(self) -> str:
        """Return one line: the value, the call that logged it, and the origin of its settings."""
        text = json.dumps(self.value)
        value = text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
        places = dict.fromkeys(link.place for link in self.links if link.step in ("logged by", "file", "setting"))
        return f"{self.key} = {value}   <- {' <- '.join(places)}".replace(f"{PACKAGE_HOME}/", "")


class Tracer:
    """Trace the keys of one log through a tree at the log's commit."""

    def __init__(self, log: Log, tree: Path) -> None:
        self.log = log
        self.sources = Sources(tree, log)
        self.keys = list(dict.fromkeys(event.key for event in log.events))
        self._configuration: dict[str, dict[str, Any]] = log.value("configuration") or {}
        self._recipe = recipe_file(str(log.value("recipe")))
        self._search = CodeSearch(self.sources, self._recipe)

    def chain(self, key: str) -> Trace:
        """Return the chain of the last line with a key. Raises UserError if the log does not have the key."""
        if key not in self.keys:
            raise unknown_name(key, f"key in {self.log.path}", self.keys)
        event = self.log.all(key)[-1]
        links = [Link("log", f"{self.log.path}:{event.line}")]
        name, number = event.call_site or ("no file named", 0)
        text, place = self.sources.line(name, number), f"{name}:{number}"
        call = self.sources.call_of(name, number, key)
        if text is None or call is None:
            broken = "is not in the tree" if text is None else f"does not log {key}"
            return Trace(key, event.value, [*links, Link("logged by", place, text or "", broken)])
        links.append(Link("logged by", place, ast.unparse(call)))
        if (file_key := key.removesuffix("_sha256")) in ("config_file", "model_shape"):
            links.append(self._file(file_key))
        arguments = [*call.args, *(word.value for word in call.keywords if word.arg == "value")]
        values = [argument for argument in arguments if not is_key(argument, key)][:1]  # the rest are metadata
        fields = self._fields(key, values)
        needs_reader = is_hyperparameter(key) and not any(isinstance(value, ast.Constant) for value in values)
        links += [link for field in fields for link in self._setting(key, field, event.value, needs_reader)]
        links += self._computation(key, name, values)
        is_decided = any(link.step in ("setting", "set by") for link in links)
        if is_number_of(key, event.value) and not is_decided and not isinstance(values[0], ast.Constant):
            links.append(Link("setting", "?", "", f"nothing is known to set {key}"))
        return Trace(key, event.value, links)

    def _fields(self, key: str, values: list[ast.expr]) -> list[str]:
        """Return the settings that decide a key: read in its call, with the same name, or listed in `SETTINGS_OF`."""
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
        """Return where a setting got its value: the command line, the environment, or a file line that must name it."""
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
        """Check a file that the log names against the SHA-256 it logs."""
        name = str(self.log.value(key))
        text = self._text(name)
        if name == "none":
            return Link("file", "none", "nothing was sourced or given")
        if text is None:
            return Link("file", name, "", "is not in the tree")
        is_same = hashlib.sha256(text.encode()).hexdigest() == self.log.value(f"{key}_sha256")
        return Link("file", name, "", "" if is_same else f"is not the file of {key}_sha256")

    def _computation(self, key: str, name: str, values: list[ast.expr]) -> Iterator[Link]:
        """Yield the lines that set the logged value, and the functions that compute it.

        Searches the file of the call, and the recipe for hyper-parameters. If nothing is found there, searches the
        whole package for assignments to the attribute.
        """
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
        """Return the text of a file in the tree, or of an absolute path outside it if that still exists."""
        if Path(name).is_absolute():
            with contextlib.suppress(UserError):
                return read_plain(Path(name), "").decode(errors="replace")
        return self.sources.text(name)
