"""Trace a log line: what its value means, and what produced it.

The links come from the source at the log's commit. What a value means is read from the declarations
of its settings and fields and from the docstrings of the functions that compute it. What produced
it: the call that logged it, the assignments to the call's arguments, the functions with those
names, where its settings were set, and the lines that read them, within the code that the log's
recipe reaches (`mlaudit.reachable`). Only the settings behind an MLPerf key are listed in a table
(`mlbert.mlperf.keys`). A logged value that differs from its setting is a broken link.

`CodeSearch` matches names in syntax trees as text, without types,
so it finds every place a name could come from.
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

from mlaudit.call_sites import Sources, is_key, line_of, terminal_name
from mlaudit.keys import FUNCTIONS_OF, SETTINGS_OF, is_hyperparameter, is_number_of
from mlaudit.logs import Log
from mlaudit.reachable import ReachableCode, is_text
from mlaudit.settings import section_names, sections, settings_by_key, unknown_name
from mlbert.config.section import Section, Setting
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain
from mlbert.host.provenance import recipe_file
from mlbert.host.repository import PACKAGE_HOME, TENSORFLOW2_HOME

_MOST_DEFINITIONS = 6  # of one name; a longer list does not help the reader
_NO_CALL = ast.Call(ast.Name(""), [], [])  # a call without arguments, of nothing
_LONGEST_VALUE = 70  # characters of a value in a one-line summary


def _file_of(section: type[Section]) -> str:
    return f"{PACKAGE_HOME}/{section.__module__.partition('.')[2].replace('.', '/')}.py"


class CodeSearch:
    """Search the code that a recipe reaches.

    A place is a pair: ``file:line`` and the text of that line.
    """

    def __init__(self, sources: Sources, recipe: str) -> None:
        build = f"{recipe.removesuffix('.py')}_build.py"
        start = f"{PACKAGE_HOME}/training/experiment.py"
        if recipe.startswith(TENSORFLOW2_HOME):
            build = recipe
            start = f"{TENSORFLOW2_HOME}/experiment.py"
        self._sources = sources
        self._recipe = recipe if sources.text(build) is None else build
        self._roots = (recipe, build, start)

    @cached_property
    def reachable(self) -> ReachableCode:
        """The definitions that the recipe's code reaches."""
        return ReachableCode(self._sources, self._roots)

    def lines(self, name: str, kind: type, matches: Callable[[Any], bool]) -> list[tuple[str, str]]:
        """Return the reached lines of a file with a matching syntax node of a kind,
        in order and without duplicates.
        """
        numbers = {node.lineno for node in self.reachable.nodes(name, kind) if matches(node)}
        return [self._place(name, number) for number in sorted(numbers)]

    def readers(self, key: str) -> list[tuple[str, str]]:
        """Return where a setting is read, directly or through a property of its section.

        If nothing reads it as an attribute, returns the places that name it in a string.
        """
        setting = settings_by_key()[key]
        fields = {key, setting.field}
        for node in self._sources.nodes(self.section_file(setting)):
            if isinstance(node, ast.FunctionDef) and any(
                reads(part, "self", fields) for part in ast.walk(node)
            ):
                fields.add(node.name)
        owner = setting.section.__name__
        found = [
            self._place(name, line)
            for name, attributes in self._reads.items()
            for line in sorted(
                {line for of, field, line in attributes if of == owner and field in fields}
            )
        ]
        # It may be read by name: getattr(config, name).
        # Recipes are excluded: there the name sets a default.
        others = (name for name in self._reads if "/recipes/" not in name)
        return found or [
            place for n in others for place in self.lines(n, ast.Constant, lambda c: c.value == key)
        ]

    @cached_property
    def _reads(self) -> dict[str, list[tuple[str, str, int]]]:
        """Map each file, the recipe first, to the (section, attribute, line) it reads;
        declarations are left out.
        """
        names = (name for name in self.reachable.files if f"{PACKAGE_HOME}/config/" not in name)
        names = (name for name in names if not name.endswith("/config.py"))
        return {
            name: list(_reads_of(self.reachable.nodes(name)))
            for name in dict.fromkeys([self._recipe, *names])
        }

    def default_of(self, setting: Setting, recipe: str) -> list[tuple[str, str]]:
        """Return the line that sets a setting's default, in the recipe or else in its section.

        Empty if the recipe does not exist.
        """
        if self._sources.text(recipe) is None:
            return []
        if setting.env == "RECIPE":
            return self._given_name(recipe)
        return self._entries(setting.env, recipe) or self._declared_default(setting)

    def _given_name(self, recipe: str) -> list[tuple[str, str]]:
        """Return the line ``name=...`` of a recipe, which sets RECIPE."""
        calls = (node for node in self._sources.nodes(recipe) if isinstance(node, ast.Call))
        words = (
            word for call in calls if terminal_name(call.func) == "Recipe" for word in call.keywords
        )
        return [self._place(recipe, word.value.lineno) for word in words if word.arg == "name"]

    def _entries(self, text: str, name: str) -> list[tuple[str, str]]:
        """Return the lines of a file where a string is the key of a dict literal."""
        mappings = (node for node in self._sources.nodes(name) if isinstance(node, ast.Dict))
        keys = (key for mapping in mappings for key in mapping.keys)
        found = {key.lineno for key in keys if isinstance(key, ast.Constant) and key.value == text}
        return [self._place(name, line) for line in sorted(found)]

    def _declared_default(self, setting: Setting) -> list[tuple[str, str]]:
        defaults = (
            word.value.lineno
            for word in self._declaration(setting).keywords
            if word.arg == "default"
        )
        return [self._place(self.section_file(setting), line) for line in defaults]

    def _declaration(self, setting: Setting) -> ast.Call:
        """Return the call ``setting("ENV", "Meaning.", ...)`` that declares a setting;
        empty if there is none.
        """
        calls = (
            n
            for n in self._sources.nodes(self.section_file(setting))
            if isinstance(n, ast.Call) and n.args
        )
        return next(
            (c for c in calls if getattr(c.args[0], "value", None) == setting.env), _NO_CALL
        )

    def meaning_of(self, setting: Setting) -> tuple[str, str] | None:
        """Return where a setting is declared, with the sentence that says what it means."""
        words = [
            argument
            for argument in self._declaration(setting).args
            if isinstance(argument, ast.Constant)
        ]
        return (
            (f"{self.section_file(setting)}:{words[0].lineno}", str(words[1].value))
            if len(words) > 1
            else None
        )

    def fields(self, name: str) -> list[tuple[str, str]]:
        """Return the class fields of this name whose line carries a comment."""
        lines = (
            self.lines(f, ast.AnnAssign, lambda n: terminal_name(n.target) == name)
            for f in self.reachable.files
        )
        return [(place, text) for found in lines for place, text in found if "#" in text]

    def docstrings(self, name: str) -> list[tuple[str, str]]:
        """Return the first paragraph of each docstring of the functions with this name."""
        places = dict(self.definitions(name))
        found = {}
        for file in dict.fromkeys(place.rpartition(":")[0] for place in places):
            for node in self.reachable.nodes(file, ast.FunctionDef):
                if node.name == name and (text := ast.get_docstring(node)):
                    found[f"{file}:{node.lineno}"] = (
                        f"{name}: {' '.join(text.partition(chr(10) * 2)[0].split())}"
                    )
        return list(found.items())

    def enclosing(self, file: str, number: int) -> list[tuple[str, str]]:
        """Return the docstring's first line of the innermost function around a line of a file."""
        functions = [
            node for node in self._sources.nodes(file) if isinstance(node, ast.FunctionDef)
        ]
        around = [node for node in functions if node.lineno <= number <= (node.end_lineno or 0)]
        inner = max(around, key=lambda node: node.lineno, default=None)
        text = ast.get_docstring(inner) if inner else None
        return (
            [(f"{file}:{inner.lineno}", f"{inner.name}: {text.splitlines()[0]}")]
            if inner and text
            else []
        )

    def section_file(self, setting: Setting) -> str:
        """Return the file that declared a setting when the log was written.

        Its section may have been in the file of another one then.
        """
        own = _file_of(setting.section)
        files = dict.fromkeys([own, *(_file_of(section) for section in sections())])
        name = setting.section.__name__
        for file in files:
            classes = (n for n in self._sources.nodes(file) if isinstance(n, ast.ClassDef))
            if any(node.name == name for node in classes):
                return file
        return own

    def origins(self, name: str, values: list[ast.expr]) -> tuple[list[tuple[str, str]], set[str]]:
        """Return the lines of a file that set the names in some expressions, and all names found.

        Follows two levels of assignment. The names include those of called functions.
        """
        wanted, called = _names_in(values)
        places: dict[str, str] = {}
        for _ in range(2):  # the names themselves, then the names they are set from
            nodes = self.reachable.nodes(name) or self._sources.nodes(name)
            setting = [(line, value) for line, target, value in _set_by(nodes) if target in wanted]
            places.update(self._place(name, line) for line in sorted(line for line, _ in setting))
            variables, functions = _names_in(value for _, value in setting)
            wanted = wanted | variables
            called = called | functions
        return list(places.items()), wanted | called

    def computation(
        self, key: str, file: str, values: list[ast.expr]
    ) -> tuple[list[tuple[str, str]], list[str]]:
        """Return the lines that set a logged value, and the names of functions that may compute it.

        Searches the file of the call, and the recipe for hyper-parameters. If nothing is found
        there, searches for assignments to the attribute.
        """
        names = set(FUNCTIONS_OF.get(key, ()))
        places = []
        searched_files = [file]
        if is_hyperparameter(key):
            searched_files.append(self._recipe)
        for searched in searched_files:
            found, parts = self.origins(searched, values)
            places += found
            names |= parts
        if not places and values and isinstance(values[0], ast.Attribute):
            places = self.setters(values[0].attr)
        return places, sorted(names)

    def setters(self, attribute: str) -> list[tuple[str, str]]:
        """Return the lines of the package that assign to an attribute of this name,
        on any object.
        """

        def sets(node: ast.Attribute) -> bool:
            return isinstance(node.ctx, ast.Store) and node.attr == attribute

        return [
            place
            for name in self.reachable.files
            for place in self.lines(name, ast.Attribute, sets)
        ]

    def definitions(self, name: str) -> list[tuple[str, str]]:
        """Return the functions and module constants with this name;
        empty if the name is too common to be useful.
        """
        found = self._definitions.get(name, [])
        return found if len(found) <= _MOST_DEFINITIONS and not hasattr(builtins, name) else []

    @cached_property
    def _definitions(self) -> dict[str, list[tuple[str, str]]]:
        """Map each name to its definitions: functions and module-level assignments.

        Functions with nothing but a docstring, as in protocols, are left out.
        """
        found: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for file in self.reachable.files:
            for node in self.reachable.nodes(file, ast.FunctionDef):
                if not all(map(is_text, node.body)):
                    found[node.name].append(self._place(file, node.lineno))
            for line, defined, _ in _set_by(self.reachable.statements(file)):
                found[str(defined)].append(self._place(file, line))
        return found

    def _place(self, name: str, line: int) -> tuple[str, str]:
        return f"{name}:{line}", self._sources.line(name, line) or ""


def reads(node: ast.AST, owner: str, fields: set[str]) -> bool:
    """Return True if a node is ``owner.field`` or ``x.owner.field`` for one of the fields."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr in fields
        and terminal_name(node.value) == owner
    )


def _reads_of(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str, int]]:
    """Yield each section attribute that the functions of a file read, as (section, attribute,
    line).
    """
    for function in (node for node in nodes if isinstance(node, ast.FunctionDef)):
        parts = list(ast.walk(function))
        names = dict(_section_names(parts))
        for part in (part for part in parts if isinstance(part, ast.Attribute)):
            section = _section_in(part.value) or names.get(terminal_name(part.value) or "")
            if section:
                yield section, part.attr, part.lineno


def _section_names(parts: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield (name, section) for parameters and variables
    that hold a section (``name = config[Section]``).
    """
    for part in parts:
        if isinstance(part, ast.arg):
            kinds = [
                node
                for node in _alternatives(part.annotation)
                if terminal_name(node) in section_names()
            ]
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
    """Return the section name of a ``config[Section]`` expression,
    or None for other expressions.
    """
    name = terminal_name(node.slice) if isinstance(node, ast.Subscript) else None
    return name if name in section_names() else None


def _assigned(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each target of an assignment with its value, splitting ``a, b = c, d`` into pairs."""
    for target in node.targets:
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        values = node.value.elts if isinstance(node.value, ast.Tuple) and len(targets) > 1 else []
        yield from zip(
            targets,
            values if len(values) == len(targets) else [node.value] * len(targets),
            strict=True,
        )


def _names_in(values: Iterable[ast.expr]) -> tuple[set[str], set[str]]:
    """Return the variables and the called functions in some expressions,
    each as the last part of its dotted name.
    """
    nodes = [node for value in values for node in ast.walk(value)]
    sections = {part for node in nodes if _section_in(node) for part in ast.walk(node)}
    nodes = [node for node in nodes if node not in sections]
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    ends = [
        node
        for node in nodes
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner
    ]
    functions = {str(terminal_name(node)) for node in ends if id(node) in called}
    return {str(terminal_name(node)) for node in ends if id(node) not in called}, functions


def _set_by(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str | None, ast.expr]]:
    """Yield (line, name, value) for everything that gives a name a value."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target, value in _assigned(node):
                yield node.lineno, terminal_name(target), value
        elif (
            isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr)
            and node.value is not None
        ):
            yield node.lineno, terminal_name(node.target), node.value
        elif isinstance(node, ast.keyword):
            yield node.value.lineno, node.arg, node.value
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and not isinstance(value, ast.Constant):
                    yield key.lineno, str(key.value), value


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
    """Two answers about the last line with a key.

    Attributes:
        meaning: what the value means: declarations and docstrings.
        links: what produced it, from the log to the code, in order.
    """

    key: str
    value: Any
    links: Sequence[Link]
    meaning: Sequence[Link] = ()

    @property
    def broken(self) -> list[Link]:
        """Return the broken links."""
        return [link for link in self.links if link.broken]

    def lines(self) -> list[str]:
        """Return both answers, a line for each link."""
        found = [f"{self.key} = {self.value}", "what the value means:"]
        found += [f"  {link}" for link in self.meaning] or ["  nothing in the code describes it"]
        return [*found, "what produced it:", *(f"  {link}" for link in self.links)]

    def summary(self) -> str:
        """Return one line: the value, the call that logged it, and the origin of its settings."""
        text = json.dumps(self.value)
        value = text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
        places = dict.fromkeys(
            link.place for link in self.links if link.step in ("logged by", "file", "setting")
        )
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
        """Return the chain of the last line with a key.

        Raises UserError if the log does not have the key.
        """
        if key not in self.keys:
            raise unknown_name(key, f"key in {self.log.path}", self.keys)
        event = self.log.all(key)[-1]
        links = [Link("log", f"{self.log.path}:{event.line}")]
        name, number = event.call_site or ("no file named", 0)
        text = self.sources.line(name, number)
        place = f"{name}:{number}"
        call = self.sources.call_of(name, number, key)
        if text is None or call is None:
            broken = "is not in the tree" if text is None else f"does not log {key}"
            return Trace(key, event.value, [*links, Link("logged by", place, text or "", broken)])
        links.append(Link("logged by", place, ast.unparse(call)))
        if (file_key := key.removesuffix("_sha256")) in ("config_file", "model_shape"):
            links.append(self._file(file_key))
        arguments = [*call.args, *(word.value for word in call.keywords if word.arg == "value")]
        # The rest are metadata.
        values = [argument for argument in arguments if not is_key(argument, key)][:1]
        fields = self._fields(key, values)
        needs_reader = is_hyperparameter(key) and not any(
            isinstance(value, ast.Constant) for value in values
        )
        links += [
            link
            for field in fields
            for link in self._setting(key, field, event.value, needs_reader)
        ]
        places, functions = self._search.computation(key, name, values)
        links += [Link("set by", *place) for place in places]
        links += [
            Link("computed by", *place)
            for part in functions
            for place in self._search.definitions(part)
        ]
        if key in FUNCTIONS_OF and links[-1].step != "computed by":
            links.append(
                Link(
                    "computed by",
                    "?",
                    "",
                    f"no function is called {' or '.join(FUNCTIONS_OF[key])}",
                )
            )
        is_decided = any(link.step in ("setting", "set by") for link in links)
        if (
            is_number_of(key, event.value)
            and not is_decided
            and not isinstance(values[0], ast.Constant)
        ):
            links.append(Link("setting", "?", "", f"nothing is known to set {key}"))
        return Trace(key, event.value, links, list(self._meaning(fields, values, functions, place)))

    def _meaning(
        self, fields: list[str], values: list[ast.expr], functions: list[str], call: str
    ) -> Iterator[Link]:
        """Yield the declarations of settings and fields,
        and the docstrings of the functions that compute the value.

        If there are none, the docstring of the function that logs it.
        """
        known = settings_by_key()
        found = [
            (known[field].env, place)
            for field in fields
            if (place := self._search.meaning_of(known[field]))
        ]
        links = [Link("setting", place, f"{env}: {text}") for env, (place, text) in found]
        ends = [value.attr for value in values if isinstance(value, ast.Attribute)]
        links += [Link("field", *place) for end in ends for place in self._search.fields(end)]
        links += [
            Link("function", *place)
            for name in functions
            for place in self._search.docstrings(name)
        ]
        yield from dict.fromkeys(links)
        if not links:
            file, _, number = call.rpartition(":")
            yield from (
                Link("logged in", *place) for place in self._search.enclosing(file, int(number))
            )

    def _fields(self, key: str, values: list[ast.expr]) -> list[str]:
        """Return the settings that decide a key: read in its call, with the same name,
        or listed in `SETTINGS_OF`.
        """
        known = settings_by_key()
        key_of = {one.field: one.key for one in known.values()}
        nodes = [
            node for value in values for node in ast.walk(value) if isinstance(node, ast.Attribute)
        ]
        read = [node.attr for node in nodes if reads(node, "config", {node.attr})]
        read += [
            key_of[node.attr]
            for node in nodes
            if node.attr in key_of and isinstance(node.value, ast.Name)
        ]
        return [
            field
            for field in dict.fromkeys([*read, key, *SETTINGS_OF.get(key, ())])
            if field in known
        ]

    def _setting(self, key: str, field: str, logged: Any, needs_reader: bool) -> Iterator[Link]:
        env = settings_by_key()[field].env
        if env not in self._configuration:
            yield Link("setting", env, "", "is not in the log's configuration")
            return
        value = self._configuration[env]["value"]
        origin = str(self._configuration[env]["origin"])
        yield self._origin(env, field, value, origin)
        if (
            is_number_of(key, logged)
            and len(SETTINGS_OF.get(key, ())) < 2
            and value not in (None, logged)
        ):
            yield Link("setting", env, f"{env} = {value}", f"the log says {logged}")
        readers = [Link("read by", *place) for place in self._search.readers(field)]
        yield from readers
        if needs_reader and not readers:
            yield Link("read by", "?", "", f"nothing reads {field}")

    def _origin(self, env: str, field: str, value: Any, origin: str) -> Link:
        """Return where a setting got its value: the command line, the environment,
        or a file line that must name it.
        """
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

    def _text(self, name: str) -> str | None:
        """Return the text of a file in the repository, or of an absolute path outside it if
        that still exists.
        """
        if Path(name).is_absolute():
            with contextlib.suppress(UserError):
                return read_plain(Path(name), "").decode(errors="replace")
        return self.sources.text(name)
