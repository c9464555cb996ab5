"""The definitions that a recipe's code can reach, found by following names from its files through
the imports.

Names are followed definition by definition, not module by module: a module that is imported for one
function does not bring in its others. Type annotations are not followed, because they do not run.
Whatever decides at run time which name to use is not evaluated: everything that a reached table or
function names counts as reachable.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import PurePosixPath
from typing import Any

from mlaudit.call_sites import Sources
from mlbert.host.repository import HOMES

_ANNOTATIONS = ("annotation", "returns")
Target = tuple[str, str]  # file, and a name in it; an empty name is the module


class ReachableCode:
    """The definitions reachable from some files of a tree.

    Args:
        sources: the tree.
        roots: files of which every definition counts as reached;
            those that do not exist are ignored.
    """

    def __init__(self, sources: Sources, roots: Iterable[str]) -> None:
        self._sources = sources
        self._modules: set[str] = set()
        self._reached: defaultdict[str, list[ast.stmt]] = defaultdict(list)
        self._pending: list[tuple[str, ast.stmt]] = []
        self.nodes = cache(self._nodes)
        self.definitions_of = cache(self._definitions_of)
        self.imports_of = cache(lambda file: self._imported(self._body(file)))
        for root in roots:
            if root in self._files:
                self._import(root)
                self._pending += [
                    (root, node) for nodes in self.definitions_of(root).values() for node in nodes
                ]
        self._follow()

    @property
    def files(self) -> list[str]:
        """Return the files with a reached definition, sorted."""
        return sorted(self._reached)

    def _nodes(self, file: str, kind: type = ast.AST) -> list[Any]:
        """Return the syntax nodes of a kind, by default all,
        of the definitions reached in a file.
        """
        if kind is not ast.AST:
            return [node for node in self.nodes(file) if isinstance(node, kind)]
        return [node for statement in self._reached.get(file, ()) for node in ast.walk(statement)]

    def statements(self, file: str) -> list[ast.stmt]:
        """Return the module-level statements reached in a file, in order."""
        return sorted(self._reached.get(file, ()), key=lambda node: node.lineno)

    @cached_property
    def _files(self) -> frozenset[str]:
        return frozenset(
            name for home in HOMES.values() for name in self._sources.python_files(home)
        )

    def _module(self, dotted: str) -> str | None:
        """Return the file of a module or package of the tree."""
        package, _, rest = dotted.partition(".")
        base = (
            "/".join([HOMES[package], *rest.split(".")] if rest else [HOMES[package]])
            if package in HOMES
            else ""
        )
        return next(
            (name for name in (f"{base}.py", f"{base}/__init__.py") if name in self._files), None
        )

    def _body(self, file: str) -> list[ast.stmt]:
        tree = next(iter(self._sources.nodes(file)), None)
        return tree.body if isinstance(tree, ast.Module) else []

    def _definitions_of(self, file: str) -> dict[str, list[ast.stmt]]:
        """Map each module-level name of a file to the statements that define it."""
        found: defaultdict[str, list[ast.stmt]] = defaultdict(list)
        for node in self._body(file):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name].append(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (
                    part
                    for target in targets
                    for part in ast.walk(target)
                    if isinstance(part, ast.Name)
                ):
                    found[name.id].append(node)
        return found

    def _imported(self, statements: Iterable[ast.AST]) -> dict[str, Target]:
        """Map each name that ``from ... import`` statements bind to what it stands for;
        other packages are left out.
        """
        found: dict[str, Target] = {}
        for node in (node for node in statements if isinstance(node, ast.ImportFrom)):
            owner = self._module(node.module or "")
            for alias in node.names:
                inner = self._module(f"{node.module}.{alias.name}")
                if inner or owner:
                    found[alias.asname or alias.name] = (
                        (inner, "") if inner else (owner or "", alias.name)
                    )
        return found

    def _import(self, file: str) -> None:
        """Reach what an import of the file runs: its packages, its imports,
        and statements that define no name.
        """
        if file in self._modules:
            return
        self._modules.add(file)
        for parent in PurePosixPath(file).parents:
            if f"{parent}/__init__.py" in self._files:
                self._import(f"{parent}/__init__.py")
        for module, _ in self.imports_of(file).values():
            self._import(module)
        defined = {id(node) for nodes in self.definitions_of(file).values() for node in nodes}
        self._pending += [
            (file, node)
            for node in self._body(file)
            if id(node) not in defined and not _is_inert(node)
        ]

    def _use(self, file: str, name: str) -> None:
        """Reach a name in a file, through the import that binds it if it is not defined there."""
        self._import(file)
        if name in self.definitions_of(file):
            self._pending += [(file, node) for node in self.definitions_of(file)[name]]
        elif name in self.imports_of(file):
            self._use(*self.imports_of(file)[name])

    def _follow(self) -> None:
        seen: set[int] = set()
        while self._pending:
            file, statement = self._pending.pop()
            if id(statement) in seen:
                continue
            seen.add(id(statement))
            self._reached[file].append(statement)
            parts = list(_without_annotations(statement))
            bound = self.imports_of(file) | self._imported(parts)
            for part in parts:
                if isinstance(part, ast.Name):
                    self._use(*bound.get(part.id, (file, part.id)))
                elif (
                    isinstance(part, ast.Attribute)
                    and isinstance(part.value, ast.Name)
                    and part.value.id in bound
                ):
                    module, name = bound[part.value.id]
                    self._use(module, name or part.attr)
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    # An entry point such as mlbert.recipes.x_build:build.
                    dotted, _, name = part.value.partition(":")
                    if module_file := self._module(dotted):
                        self._use(module_file, name)


def _is_inert(node: ast.stmt) -> bool:
    """Return True for a docstring, an import, and a block that only type checkers read."""
    is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    return is_typing or isinstance(node, ast.Import | ast.ImportFrom) or is_text(node)


def is_text(node: ast.stmt) -> bool:
    """Return True for a docstring or another constant that stands alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _without_annotations(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and everything below it except type annotations."""
    yield node
    for field, value in ast.iter_fields(node):
        if field not in _ANNOTATIONS:
            children = value if isinstance(value, list) else [value]
            for child in children:
                if isinstance(child, ast.AST):
                    yield from _without_annotations(child)
