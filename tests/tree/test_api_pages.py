"""The API pages show calls as a reader types them: no default that has no public name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

HOMES = {"mlbert": Path("benchmarks/bert/implementations/pytorch"), "mlaudit": Path("audit")}
PAGES = sorted((Path(__file__).parents[2] / "docs/api").glob("*.md"))
PRIVATE = re.compile(r"(?:.*\.)?_[A-Za-z]")


def source_of(root: Path, dotted: str) -> tuple[Path, list[str]]:
    """Return the file of a module, class or function, and the names inside it.

    A module may import the name; then the file is that of its definition.
    """
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        module = root / HOMES[parts[0]] / Path(*parts[:count])
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if file.is_file():
                tree = ast.parse(file.read_text(encoding="utf-8"))
                origin = imported_from(tree, parts[count:])
                return source_of(root, origin) if origin else (file, parts[count:])
    raise AssertionError(dotted)


def imported_from(tree: ast.Module, names: list[str]) -> str | None:
    """Return where a module imports a name from, dotted, or None if it does not."""
    if not names:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and names[0] in [one.name for one in node.names]:
            return ".".join([str(node.module), *names])
    return None


def named(tree: ast.Module, names: list[str]) -> ast.AST:
    found: ast.AST = tree
    for name in names:
        found = next(node for node in found.body if getattr(node, "name", None) == name)
    return found


def shown(node: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield the public functions and constructors in a node."""
    for one in ast.walk(node):
        if isinstance(one, ast.FunctionDef) and (one.name == "__init__" or one.name[0] != "_"):
            yield one


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_signatures_have_no_private_defaults(page: Path, tree_root: Path) -> None:
    entries = re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert entries
    for entry in entries:
        file, names = source_of(tree_root, entry)
        for function in shown(named(ast.parse(file.read_text(encoding="utf-8")), names)):
            arguments = function.args
            defaults = [*arguments.defaults, *filter(None, arguments.kw_defaults)]
            for default in map(ast.unparse, defaults):
                assert not PRIVATE.match(default), f"{entry}: {function.name}(... = {default})"
