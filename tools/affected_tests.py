"""Print the test files that a change affects, the nearest first.

    python tools/affected_tests.py [--since COMMIT] [--most N]

A test file is affected if it changed, or if it imports a changed module, directly or through other
modules. Its distance is the number of imports between them. All files up to a distance of 1 are
printed, then the nearest others up to ``--most`` in total. Tests of ranks, jobs and GPUs
(`tests/dist`, `tests/slurm`, `tests/gpu`) are excluded.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

HOMES = (
    "benchmarks/bert/implementations/pytorch",
    "benchmarks/bert/implementations/tensorflow2",
    "benchmarks/mosaic_bert",
    "audit",
    "tools",
    "tests",
)
MOST_FILES = 14
LEFT_OUT = ("tests/dist/", "tests/slurm/", "tests/gpu/")


def changed_files(root: Path, since: str) -> set[str]:
    """Return the paths below ``root`` that differ from a commit,
    including new files that git does not ignore.
    """
    found: set[str] = set()
    for words in (["diff", "--name-only", since], ["ls-files", "--others", "--exclude-standard"]):
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        )
        found |= set(done.stdout.splitlines())
    return found


def importers(root: Path) -> dict[str, set[str]]:
    """Return {file: files that import it} for the repository's Python files;
    paths are relative to ``root``.
    """
    listed = [
        "git",
        "-C",
        str(root),
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "*.py",
    ]
    files = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
    modules: dict[str, str] = {}
    for file in files:
        parts = Path(file).with_suffix("").parts
        for home in map(Path, HOMES):
            if parts[: len(home.parts)] == home.parts:
                name = ".".join(parts[len(home.parts) :]).removesuffix(".__init__")
                modules[name] = file
                if home.name in ("tools", "tests"):
                    # Their folders are on the path.
                    modules.setdefault(name.rpartition(".")[2], file)
    found: defaultdict[str, set[str]] = defaultdict(set)
    for file in (file for file in files if (root / file).is_file()):
        for name in _imported((root / file).read_text(encoding="utf-8")):
            if modules.get(name, file) != file:
                found[modules[name]].add(file)
    return found


def _imported(text: str) -> Iterable[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith("mlbert.")
        ):
            yield node.value.partition(":")[0]  # an entry point


def affected(changed: Iterable[str], graph: Mapping[str, set[str]]) -> list[tuple[int, str]]:
    """Return (distance, test file) of the affected test files, the nearest first."""
    distance = dict.fromkeys(changed, 0)
    pending = list(distance)
    for file in pending:
        for importer in sorted(graph.get(file, ())):
            if importer not in distance:
                distance[importer] = distance[file] + 1
                pending.append(importer)
    is_test = (
        file
        for file in distance
        if Path(file).name.startswith("test_") and file.startswith("tests/")
    )
    return sorted((distance[file], file) for file in is_test if not file.startswith(LEFT_OUT))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description="Print the test files that a change affects, the nearest first."
    )
    parser.add_argument(
        "--since", default="HEAD", metavar="COMMIT", help="compare with this commit"
    )
    parser.add_argument(
        "--most",
        type=int,
        default=MOST_FILES,
        help="files to print, unless more have a distance of 1",
    )
    given = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    found = affected(changed_files(root, given.since), importers(root))
    near = [file for distance, file in found if distance < 2]
    for file in [
        *near,
        *(file for _, file in found[len(near) :][: max(0, given.most - len(near))]),
    ]:
        print(file)


if __name__ == "__main__":
    main()
