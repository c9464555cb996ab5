"""The shape of the package: how many modules, how small they may be, and that a name means one thing."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

import pytest

PACKAGE = Path("benchmarks/bert/implementations/pytorch/mlbert")
MOST_MODULES = 280
SMALL_LINES = 60  # a module with fewer and a single importer belongs in that importer
MOST_CLASS_NAMES_TWICE = 8
MOST_STEMS_TWICE = 12
# Each file is one of its kind, and is found through its folder's table.
PLUG_INS = ("cli", "recipes", "optim", "mlperf.checks", "ops.triton")
# Run as a program, or imported by the other implementation too.
ALONE = {"data.prepare.compiled_docs", "models.weights.model_card"}

Modules = dict[str, ast.Module]


@pytest.fixture(scope="module")
def package(syntax_trees: dict[Path, ast.Module], tree_root: Path) -> Modules:
    """Dotted name below mlbert to syntax tree, without ``__init__``."""
    home = tree_root / PACKAGE
    inside = {path: tree for path, tree in syntax_trees.items() if home in path.parents}
    names = {path: ".".join(path.relative_to(home).with_suffix("").parts) for path in inside}
    return {name: inside[path] for path, name in names.items() if not name.endswith("__init__")}


def imported(tree: ast.Module) -> set[str]:
    """Return the dotted names below mlbert that a module imports, functions and classes among them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mlbert":
            base = (node.module or "").removeprefix("mlbert").lstrip(".")
            found |= {base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)}
    return found


def test_there_are_not_too_many_modules(package: Modules) -> None:
    assert len(package) <= MOST_MODULES


def test_small_modules_have_several_importers(package: Modules, tree_root: Path) -> None:
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for name, tree in package.items():
        for other in imported(tree) & package.keys():
            importers[other].add(name)
    small = set()
    for name in package:
        lines = (tree_root / PACKAGE / f"{name.replace('.', '/')}.py").read_text().count("\n")
        if lines < SMALL_LINES and len(importers[name]) == 1 and not name.startswith(PLUG_INS):
            small.add(name)
    assert small - ALONE == set()
    assert small >= ALONE & package.keys() - {"data.prepare.compiled_docs"}


def test_class_names_mean_one_thing(package: Modules) -> None:
    classes = Counter(node.name for tree in package.values() for node in tree.body if isinstance(node, ast.ClassDef))
    assert len([name for name, count in classes.items() if count > 1]) <= MOST_CLASS_NAMES_TWICE, classes.most_common(
        20
    )


def test_module_names_mean_one_thing(package: Modules) -> None:
    stems = Counter(name.rpartition(".")[2] for name in package)
    assert len([stem for stem, count in stems.items() if count > 1]) <= MOST_STEMS_TWICE, stems.most_common(20)
