"""Limits on the package: number of modules, small modules with one importer, and reused names."""

import ast
import functools
from collections import Counter, defaultdict
from pathlib import Path

import pytest

PACKAGE = Path("benchmarks/bert/implementations/pytorch/mlbert")
MAX_MODULES = 280
SMALL_LINES = 60  # a shorter module with a single importer belongs in that importer
MAX_REPEATED_CLASS_NAMES = 8
MAX_REPEATED_STEMS = 12
# Each file is a plug-in that its folder's registry finds.
PLUG_INS = ("cli", "recipes", "optim", "mlperf.checks", "ops.triton")
# Run as a program, or also imported by the TensorFlow implementation.
STANDALONE = {"data.prepare.compiled_docs", "models.weights.model_card"}

Modules = dict[str, ast.Module]


@pytest.fixture(scope="module")
def package(syntax_trees: dict[Path, ast.Module], tree_root: Path) -> Modules:
    """Return {dotted name below mlbert: syntax tree}, without ``__init__`` modules."""
    home = tree_root / PACKAGE
    inside = {path: tree for path, tree in syntax_trees.items() if home in path.parents}
    names = {path: ".".join(path.relative_to(home).with_suffix("").parts) for path in inside}
    return {name: inside[path] for path, name in names.items() if not name.endswith("__init__")}


def imported(tree: ast.Module) -> set[str]:
    """Return the dotted names below mlbert that a module imports, including functions and classes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mlbert":
            base = (node.module or "").removeprefix("mlbert").lstrip(".")
            found |= {base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)}
    return found


def test_modules_are_few_and_small_ones_have_several_importers(package: Modules, tree_root: Path) -> None:
    assert len(package) <= MAX_MODULES
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for name, tree in package.items():
        for other in imported(tree) & package.keys():
            importers[other].add(name)
    small = set()
    for name in package:
        lines = (tree_root / PACKAGE / f"{name.replace('.', '/')}.py").read_text().count("\n")
        if lines < SMALL_LINES and len(importers[name]) == 1 and not name.startswith(PLUG_INS):
            small.add(name)
    assert small - STANDALONE == set()
    assert small >= STANDALONE & package.keys() - {"data.prepare.compiled_docs"}


def test_few_names_of_classes_and_modules_are_reused(package: Modules) -> None:
    classes = [node.name for tree in package.values() for node in tree.body if isinstance(node, ast.ClassDef)]
    stems = [name.rpartition(".")[2] for name in package]
    for names, limit in ((classes, MAX_REPEATED_CLASS_NAMES), (stems, MAX_REPEATED_STEMS)):
        repeated = [name for name, count in Counter(names).items() if count > 1]
        assert len(repeated) <= limit, repeated


def test_imported_names_exist(syntax_trees: dict[Path, ast.Module], package: Modules, tree_root: Path) -> None:
    """Tools and launchers are not all run by tests, so a renamed definition could break one unnoticed."""
    inside = tree_root / PACKAGE
    missing = [
        f"{path.relative_to(tree_root)}: {node.module}.{alias.name}"
        for path, tree in syntax_trees.items()
        if not {inside, tree_root / "records", tree_root / "tests"} & set(path.parents)  # tests are run
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlbert.")
        for alias in node.names
        if f"{node.module}.{alias.name}".removeprefix("mlbert.") not in package
        if alias.name not in names(package.get(str(node.module).removeprefix("mlbert."), ast.Module([], [])))
    ]
    assert missing == []


@functools.cache
def names(module: ast.Module) -> set[str]:
    nodes = list(ast.walk(module))
    found = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return found | {a.asname or a.name for node in nodes if isinstance(node, ast.ImportFrom) for a in node.names}
