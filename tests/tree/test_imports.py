"""Imports form no circle, not even for types only, and take no private name of another package."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
IMPLEMENTATIONS = ROOT / "benchmarks" / "bert" / "implementations"
# Products and the folders that hold their packages.
FOLDERS = {
    "mlbert": IMPLEMENTATIONS / "pytorch",
    "tf2_bert": IMPLEMENTATIONS / "tensorflow2",
    "mlaudit": ROOT / "audit",
    "mosaic_yaml": ROOT / "benchmarks" / "mosaic_bert",
}
PACKAGES = {name: folder for name, folder in FOLDERS.items() if (folder / name).is_dir()}
# A config.py declares settings only: it needs nothing but how to declare one.
DECLARATIONS = "mlbert.config.section"
# Public in spite of the underscore: of named tuples.
OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}

# What training must not know, except for their declarations of settings:
# it has protocols for the rest.
HIDDEN_FROM_TRAINING = (
    "mlbert.recipes",
    "mlbert.models",
    "mlbert.optim",
    "mlbert.ops",
    "mlbert.data.loading",
    "mlbert.data.formats",
    "mlbert.data.prepare",
)
# What the auditor may know of mlbert: helpers, how settings are declared, and their names.
SEEN_BY_AUDITOR = ("mlbert.host.", "mlbert.config.", "mlbert.recipes.sections")


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import one another, each sorted (Tarjan 1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_modules: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        open_modules.append(module)
        for imported in imports[module]:
            if imported not in order:
                visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in open_modules:
                lowest[module] = min(lowest[module], order[imported])
        if lowest[module] == order[module]:
            start = open_modules.index(module)
            group = open_modules[start:]
            del open_modules[start:]
            if len(group) > 1:
                found.append(sorted(group))

    for module in imports:
        if module not in order:
            visit(module)
    return found


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Return each module's imports of other modules, those inside functions and for types too."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def sources() -> Iterator[tuple[str, Path]]:
    """Yield the name and file of each module of the products."""
    for folder in PACKAGES.values():
        for package in PACKAGES:
            for path in sorted((folder / package).rglob("*.py")):
                parts = path.relative_to(folder).with_suffix("").parts
                yield ".".join(parts).removesuffix(".__init__"), path


def imported_names(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each ``from module import name`` of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.module, alias.name


def borrowed_private_names(path: Path) -> Iterator[str]:
    """Yield the private names that a file imports from our modules,
    or reads as ``module._name``.
    """
    modules = set()
    for module, name in imported_names(path):
        if module.partition(".")[0] not in PACKAGES:
            continue
        modules.add(name)
        if name.startswith("_"):
            yield f"{module}.{name}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            is_private = node.attr.startswith("_") and not node.attr.startswith("__")
            is_private = is_private and node.attr not in OF_NAMED_TUPLES
            if is_private and node.value.id in modules:
                yield f"{node.value.id}.{node.attr}"


def test_a_circle_is_found() -> None:
    imports = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set(), "e": {"e", "d"}}
    assert circles(imports) == [["a", "b", "c"]]


def test_no_modules_import_one_another(imports: dict[str, set[str]]) -> None:
    assert len(imports) > 200
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10 * len(imports)))
    assert circles(imports) == []


def test_no_private_name_is_imported() -> None:
    found = {module: [*borrowed_private_names(path)] for module, path in sources()}
    assert {module: names for module, names in found.items() if names} == {}


def test_declarations_of_settings_need_nothing_else(imports: dict[str, set[str]]) -> None:
    declaring: Iterable[str] = [name for name in imports if name.endswith(".config")]
    declaring = [name for name in declaring if name != "mlbert.config"]
    assert len(declaring) > 5
    assert {name: imports[name] - {DECLARATIONS} for name in declaring if imports[name]} == {
        name: set() for name in declaring
    }


def test_training_knows_protocols(imports: dict[str, set[str]]) -> None:
    found = {
        f"{module} -> {imported}"
        for module in imports
        if module.startswith("mlbert.training")
        for imported in imports[module]
        if imported.startswith(HIDDEN_FROM_TRAINING) and not imported.endswith(".config")
    }
    assert found == set()


def test_the_auditor_knows_helpers_and_names_of_settings(imports: dict[str, set[str]]) -> None:
    found = {
        f"{module} -> {imported}"
        for module in imports
        if module.startswith("mlaudit")
        for imported in imports[module]
        if imported.startswith("mlbert") and not imported.startswith(SEEN_BY_AUDITOR)
    }
    assert found == set()


def test_the_linter_has_no_exceptions() -> None:
    assert "ignore_imports" not in (ROOT / ".importlinter").read_text()
