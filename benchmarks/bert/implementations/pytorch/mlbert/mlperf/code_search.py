"""Looking things up in the code of a tree by its syntax: who reads a setting, what sets a name, where one is defined.

Names are followed as text, not as types: what is found is every place where the name can come from.
"""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

from mlbert.config.section import Setting
from mlbert.config.sections import SECTIONS, settings_by_key
from mlbert.host.provenance import PACKAGE_HOME, TENSORFLOW2_HOME
from mlbert.mlperf.call_sites import Sources, terminal_name

_OLD_FOLDERS = ("train", "feed", "dist", "core")  # of trees in which the rooms had other names
_SHARED_FOLDERS = ("runs", "mlperf", "config", "host", "data/formats", *_OLD_FOLDERS)
_FOLDERS = ("recipes", "training", "models", "optim", "distributed", "ops", "data/loading", *_SHARED_FOLDERS)
# They read every setting and decide nothing.
_CHECKS = ("core/plan.py", "core/config.py", "report/run_plan.py", "config/contradictions.py")
_SETTINGS = f"{PACKAGE_HOME}/core/settings.py"  # in trees in which one class had all settings
_SECTION_NAMES = {section.__name__ for section in SECTIONS}
_CONFIG = "config"  # variable that holds all settings, in those trees
_MOST_DEFINITIONS = 6  # of one name; more of them tell a reader nothing


class CodeSearch:
    """Searches in the Python files of one tree that a recipe, a file of it, can run; a place is (``file:line``, the
    line's text)."""

    def __init__(self, sources: Sources, recipe: str) -> None:
        build = f"{recipe.removesuffix('.py')}_build.py"
        self._sources, self._recipe = sources, recipe if sources.text(build) is None else build

    def lines(self, name: str, matches: Callable[[ast.AST], bool]) -> list[tuple[str, str]]:
        """The lines of a file where a node of its syntax tree matches, each once and in order."""
        nodes = (node for node in self._sources.nodes(name) if isinstance(node, ast.expr | ast.stmt) and matches(node))
        return [self._place(name, number) for number in sorted({node.lineno for node in nodes})]

    def constants(self, text: str, name: str) -> list[tuple[str, str]]:
        """The lines of a file that hold a text as a constant, such as the entry of a mapping."""
        return self.lines(name, lambda node: isinstance(node, ast.Constant) and node.value == text)

    def readers(self, key: str) -> list[tuple[str, str]]:
        """Return where a setting, or a property of its section made of it, is read: in the recipe and in what all
        recipes share; else where it is named in a text."""
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
        # Or by its name: getattr(config, name). A recipe that names it gives its default.
        return found or [p for n in self._reads if "/recipes/" not in n for p in self.constants(key, n)]

    @cached_property
    def _has_sections(self) -> bool:
        return self._sources.text(_SETTINGS) is None

    @cached_property
    def _reads(self) -> dict[str, list[tuple[str, str, int]]]:
        """File to the settings that it reads, as owner, attribute and line; without other recipes and declarations."""
        names = [name for name in self._files() if not name.endswith("/config.py")]
        names = [name for name in names if f"{PACKAGE_HOME}/config/" not in name and "/recipes/" not in name]
        reads_of = _reads_of_sections if self._has_sections else _reads_of_config
        return {name: list(reads_of(self._sources.nodes(name))) for name in dict.fromkeys([self._recipe, *names])}

    def default_of(self, setting: Setting, recipe: str) -> list[tuple[str, str]]:
        """Return the line that gives a setting its default: of the recipe, else of its section; none if there is no
        such recipe."""
        if not self._has_sections:
            return self.constants(setting.key, recipe)
        if self._sources.text(recipe) is None:
            return []
        if setting.env == "RECIPE":
            return self._given_name(recipe)
        return self._entries(setting.env, recipe) or self._declared_default(setting)

    def _given_name(self, recipe: str) -> list[tuple[str, str]]:
        """Return the line ``name=...`` of a recipe, which is its own RECIPE."""
        calls = (node for node in self._sources.nodes(recipe) if isinstance(node, ast.Call))
        words = (word for call in calls if terminal_name(call.func) == "Recipe" for word in call.keywords)
        return [self._place(recipe, word.value.lineno) for word in words if word.arg == "name"]

    def _entries(self, text: str, name: str) -> list[tuple[str, str]]:
        """Return the lines of a file where a text is the key of a mapping."""
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
        """The lines of a file that set what values are made of, over two steps, and every name on the way, those of
        called functions among them."""
        wanted, called = _names_in(values)
        places: dict[str, str] = {}
        for _ in range(2):  # a name, and the names that it is set from
            setting = [(line, value) for line, target, value in _set_by(self._sources.nodes(name)) if target in wanted]
            places.update(self._place(name, line) for line in sorted(line for line, _ in setting))
            variables, functions = _names_in(value for _, value in setting)
            wanted, called = wanted | variables, called | functions
        return list(places.items()), wanted | called

    def setters(self, attribute: str) -> list[tuple[str, str]]:
        """The lines of the package that assign to an attribute of that name, of whatever object."""

        def sets(node: ast.AST) -> bool:
            return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == attribute

        return [place for name in self._files() for place in self.lines(name, sets)]

    def definitions(self, name: str) -> list[tuple[str, str]]:
        """The functions and module constants of a name; none where there are too many to mean one thing."""
        found = self._definitions.get(name, [])
        return found if len(found) <= _MOST_DEFINITIONS and not hasattr(builtins, name) else []

    @cached_property
    def _definitions(self) -> dict[str, list[tuple[str, str]]]:
        """Name to where it is defined: every function that does something (a protocol's have a docstring only), and
        what a module itself sets."""
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
    """Whether a node is ``owner.field``, or ``x.owner.field``, of one of the fields."""
    return isinstance(node, ast.Attribute) and node.attr in fields and terminal_name(node.value) == owner


def _reads_of_config(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str, int]]:
    """Yield what a file reads of ``config``, as that word, attribute and line."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and terminal_name(node.value) == _CONFIG:
            yield _CONFIG, node.attr, node.lineno


def _reads_of_sections(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str, int]]:
    """Yield what the functions of a file read of sections, as section, attribute and line."""
    for function in (node for node in nodes if isinstance(node, ast.FunctionDef)):
        parts = list(ast.walk(function))
        names = dict(_section_names(parts))
        for part in (part for part in parts if isinstance(part, ast.Attribute)):
            section = _section_in(part.value) or names.get(terminal_name(part.value) or "")
            if section:
                yield section, part.attr, part.lineno


def _section_names(parts: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield the names that hold a section in a function: parameters, and what ``config[Section]`` is assigned to."""
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
    """Return the section that ``config[Section]`` is; None for other expressions."""
    name = terminal_name(node.slice) if isinstance(node, ast.Subscript) else None
    return name if name in _SECTION_NAMES else None


def _assigned(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each target of an assignment with its value, that of ``a, b = c, d`` one by one."""
    for target in node.targets:
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        values = node.value.elts if isinstance(node.value, ast.Tuple) and len(targets) > 1 else []
        yield from zip(targets, values if len(values) == len(targets) else [node.value] * len(targets), strict=True)


def _names_in(values: Iterable[ast.expr]) -> tuple[set[str], set[str]]:
    """What expressions are made of, by the last part of each dotted name: variables, and functions that are called."""
    nodes = [node for value in values for node in ast.walk(value)]
    sections = {part for node in nodes if _section_in(node) for part in ast.walk(node)}
    nodes = [node for node in nodes if node not in sections]
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    ends = [node for node in nodes if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner]
    functions = {str(terminal_name(node)) for node in ends if id(node) in called}
    return {str(terminal_name(node)) for node in ends if id(node) not in called}, functions


def _set_by(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str | None, ast.expr]]:
    """Line, name and value of whatever gives a name a value."""
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
