"""Looking things up in the code of a tree by its syntax: who reads a setting, what sets a name, where one is defined.

Names are followed as text, not as types: what is found is every place where the name can come from.
"""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

from mlbert.core.provenance import PACKAGE_HOME, TENSORFLOW2_HOME
from mlbert.submission.call_sites import Sources, terminal_name

_FOLDERS = ("recipes", "train", "models", "optim", "feed", "dist", "core")
_CHECKS = ("core/config.py", "core/plan.py")  # read every setting, decide nothing
_SETTINGS = f"{PACKAGE_HOME}/core/settings.py"
_MOST_DEFINITIONS = 6  # of one name; more of them tell a reader nothing


class CodeSearch:
    """Searches in the Python files of one tree that a recipe, a file of it, can run; a place is (``file:line``, the
    line's text)."""

    def __init__(self, sources: Sources, recipe: str) -> None:
        self._sources, self._recipe = sources, recipe

    def lines(self, name: str, matches: Callable[[ast.AST], bool]) -> list[tuple[str, str]]:
        """The lines of a file where a node of its syntax tree matches, each once and in order."""
        nodes = (node for node in self._sources.nodes(name) if isinstance(node, ast.expr | ast.stmt) and matches(node))
        return [self._place(name, number) for number in sorted({node.lineno for node in nodes})]

    def constants(self, text: str, name: str) -> list[tuple[str, str]]:
        """The lines of a file that hold a text as a constant, such as the entry of a mapping."""
        return self.lines(name, lambda node: isinstance(node, ast.Constant) and node.value == text)

    def readers(self, field: str) -> list[tuple[str, str]]:
        """Where ``config.<field>``, or a property of the configuration made of it, is read: in the recipe, else in the
        rest of the package; else where it is named in a text."""
        fields = {field}
        for node in self._sources.nodes(_SETTINGS):
            if isinstance(node, ast.FunctionDef) and any(reads(part, "self", {field}) for part in ast.walk(node)):
                fields.add(node.name)
        files = self._files()
        found = self.lines(self._recipe, lambda node: reads(node, "config", fields))
        found = found or [p for name in files for p in self.lines(name, lambda node: reads(node, "config", fields))]
        # Or by its name: getattr(config, name). A recipe that names it gives its default.
        return found or [p for name in files if "/recipes/" not in name for p in self.constants(field, name)]

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
            homes = [TENSORFLOW2_HOME, *(f"{PACKAGE_HOME}/{folder}" for folder in ("store", "core"))]
        names = (name for home in homes for name in self._sources.python_files(home))
        return [name for name in names if not name.endswith(_CHECKS)]

    def _place(self, name: str, line: int) -> tuple[str, str]:
        return f"{name}:{line}", self._sources.line(name, line) or ""


def reads(node: ast.AST, owner: str, fields: set[str]) -> bool:
    """Whether a node is ``owner.field``, or ``x.owner.field``, of one of the fields."""
    return isinstance(node, ast.Attribute) and node.attr in fields and terminal_name(node.value) == owner


def _names_in(values: Iterable[ast.expr]) -> tuple[set[str], set[str]]:
    """What expressions are made of, by the last part of each dotted name: variables, and functions that are called."""
    nodes = [node for value in values for node in ast.walk(value)]
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    ends = [node for node in nodes if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner]
    functions = {str(terminal_name(node)) for node in ends if id(node) in called}
    return {str(terminal_name(node)) for node in ends if id(node) not in called}, functions


def _set_by(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str | None, ast.expr]]:
    """Line, name and value of whatever gives a name a value."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                    yield node.lineno, terminal_name(part), node.value
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
