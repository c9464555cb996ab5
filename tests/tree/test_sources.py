"""Limits on the sources: length, nesting, who reads the environment, what must not be in the tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

MOST_FILE_LINES = 600
MOST_FUNCTION_LINES = 120
# The training loop reads as one piece.
MOST_LOOP_LINES = 180
MOST_NESTING = 4
ENVIRONMENT_READERS = {"mlbert/core/config.py", "mlbert/dist/world.py"}
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
C_SUFFIXES = {".c", ".h", ".cpp", ".cu", ".cuh"}
HOME_PATH = re.compile(r"/(?:home|root|Users|work|mnt|raid|lustre|scratch)/[\w.-]+/[\w./-]*")
BUILT = {".so", ".o", ".a", ".pyc", ".pt", ".ckpt", ".safetensors"}


def depth(node: ast.AST) -> int:
    """Deepest nesting of blocks below a node; `elif` does not count as a level of its own."""
    deepest = 0
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for child in children:
            if not isinstance(child, ast.AST) or isinstance(child, FUNCTIONS):
                continue
            is_elif = name == "orelse" and isinstance(node, ast.If) and isinstance(child, ast.If) and len(children) == 1
            deepest = max(deepest, depth(child) + (isinstance(child, BLOCKS) and not is_elif))
    return deepest


def functions(python_file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(python_file.read_text(encoding="utf-8"))):
        if isinstance(node, FUNCTIONS):
            yield node


def code(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def test_file_is_short(python_file: Path) -> None:
    assert len(code(python_file).splitlines()) <= MOST_FILE_LINES


def test_functions_are_short(python_file: Path) -> None:
    is_loop = python_file.as_posix().endswith("mlbert/train/loop.py")
    most = MOST_LOOP_LINES if is_loop else MOST_FUNCTION_LINES
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in functions(python_file)}
    assert {name: lines for name, lines in lengths.items() if lines > most} == {}


def test_nesting_is_shallow(python_file: Path) -> None:
    deep = {node.name: depth(node) for node in functions(python_file)}
    assert {name: levels for name, levels in deep.items() if levels > MOST_NESTING} == {}


def test_package_modules_say_what_they_are_for(python_file: Path) -> None:
    if "mlbert" in python_file.parts or "tools" in python_file.parts:
        assert ast.get_docstring(ast.parse(code(python_file)))


def test_environment_is_read_in_two_places(python_file: Path) -> None:
    if any(python_file.as_posix().endswith(name) for name in ENVIRONMENT_READERS) or "mlbert" not in python_file.parts:
        return
    tree = ast.parse(code(python_file))
    reads = [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")]
    assert reads == []


def test_c_files_are_short(tracked: list[Path]) -> None:
    lengths = {path.name: len(code(path).splitlines()) for path in tracked if path.suffix in C_SUFFIXES}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_FILE_LINES} == {}


def test_no_path_of_a_machine(tracked: list[Path]) -> None:
    looked_at = {".py", ".sh", ".sub", ".toml", ".json", ".md", ".c", ".h", ".txt", ".yaml"}
    found = {}
    for path in tracked:
        # Logs of real runs say where they ran; the suite's own pattern is not a path.
        if path.suffix not in looked_at or {"results", "records", "golden", "assets"} & set(path.parts):
            continue
        if path != Path(__file__).resolve() and (paths := HOME_PATH.findall(code(path))):
            found[str(path)] = paths
    assert found == {}


def test_nothing_built_is_in_the_tree(tracked: list[Path]) -> None:
    built = [path for path in tracked if path.suffix in BUILT and "assets" not in path.parts]
    assert built == []


def test_names_pass_the_official_repository_check(tracked: list[Path], tree_root: Path) -> None:
    names = [path.relative_to(tree_root) for path in tracked]
    assert [str(name) for name in names if " " in str(name)] == []
    assert [str(path) for path in tracked if path.stat().st_size > 50_000_000] == []
    assert [str(path) for path in tracked if path.is_symlink()] == []
