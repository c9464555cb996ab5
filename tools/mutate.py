"""Change one operator, number or decision of a module at a time,
and run its tests against each change.

    pip install cosmic-ray
    python tools/mutate.py MODULE --tests TEST... [--but TEST] [--draw N] [--again LOG] [--jobs N]

MODULE is the path of a module below the implementations, such as
``mlbert/data/formats/packing.py``. The changes are those of cosmic-ray
(https://cosmic-ray.readthedocs.io): another operator, comparison, number or truth value, a negated
condition, a loop that ends early or never starts, an except clause that catches nothing, a removed
decorator. Of several changes of one kind at the same place, such as from ``+`` to each other
operator, one is drawn. Changes of annotations and docstrings are excluded, because they have no
effect.

Each job has a copy of the repository, writes the changed module there and runs the tests in a fork
that has torch and pytest loaded. A change is killed if a test fails or the tests take too long. The
output has a line per change, the diffs of the surviving ones, and the totals.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from forked import run_forked

ROOT = Path(__file__).resolve().parents[1]
HOMES = (
    Path("benchmarks/bert/implementations/pytorch"),
    Path("benchmarks/bert/implementations/tensorflow2"),
    Path("benchmarks/mosaic_bert"),
)
SEED = 0
# Tests of a change may take three times as long as without it, plus this many seconds.
PATIENCE = 20.0
# Imported once for all forks.
PRELOADED = (
    "torch",
    "pytest",
    "hypothesis",
    "numpy",
    "h5py",
    "pydantic",
    "omegaconf",
    "tokenizers",
    "typer",
    "rich",
)


@dataclass(frozen=True)
class Mutant:
    """A changed module.

    Attributes:
        kind: operator of cosmic-ray.
        line: line of the change, from 1.
        text: text of the module.
    """

    kind: str
    line: int
    text: str


def mutants(text: str) -> list[Mutant]:
    """Return the changes of a module that affect its behavior, ordered by line."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    unchanged = _meaning(text)
    found: dict[tuple[str, int], list[Mutant]] = {}
    for name in sorted(operator_names()):
        if name.endswith(("NoOp", "VariableInserter", "VariableReplacer", "KeywordReplacer")):
            continue
        occurrence = 0
        while changed := mutate_code(text, get_operator(name)(), occurrence):
            occurrence += 1
            try:
                if _meaning(changed) == unchanged:
                    continue
            except SyntaxError:
                continue
            place = next(
                n
                for n, pair in enumerate(zip(text, changed + text, strict=False))
                if pair[0] != pair[1]
            )
            line = text.count("\n", 0, place) + 1
            kind = name.partition("/")[2]
            mutant = Mutant(kind, line, changed)
            found.setdefault((kind.split("_")[0], place), []).append(mutant)
    draw = random.Random(SEED)
    return sorted((draw.choice(same) for same in found.values()), key=lambda mutant: mutant.line)


def _meaning(text: str) -> str:
    """Return a module's syntax tree without annotations, docstrings and markers in signatures."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Name("T")
        elif isinstance(node, ast.arguments):  # ignore / and *
            node.args = node.posonlyargs + node.args + node.kwonlyargs
            node.posonlyargs = []
            node.kwonlyargs = []
            node.kw_defaults = [default for default in node.kw_defaults if default]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return ast.dump(tree)


def module_path(root: Path, module: str) -> Path:
    """Return the path of a module in a tree."""
    return next(path for home in HOMES if (path := root / home / module).exists())


class Copy:
    """A copy of the tree in which one module changes.

    Attributes:
        root: root of the copy.
        module: path of the module in it.
        tests: paths of test files, and options of pytest.
    """

    def __init__(self, module: str, tests: list[str]) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="mutate-")) / "tree"
        listed = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True
        ).stdout
        for name in listed.splitlines():
            if not name.startswith("records/"):
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        (self.root / ".venv").symlink_to(sys.prefix)
        self.module = module_path(self.root, module)
        self.tests = tests

    def run(self, text: str, seconds: float = 1e9) -> tuple[int | None, str]:
        """Return pytest's exit status with this text as the module, None if it took too long,
        and its output.
        """
        self.module.write_text(text, encoding="utf-8")
        output = self.root.parent / "output"
        status, _ = run_forked(self._run_tests, output, seconds)
        return status, output.read_text(encoding="utf-8", errors="replace")

    def _run_tests(self) -> None:
        os.chdir(self.root)
        homes = [str(self.root / home) for home in HOMES]
        sys.path[:0] = homes
        os.environ["PYTHONPATH"] = os.pathsep.join(homes)
        import pytest
        from hypothesis import HealthCheck, Phase, settings

        # The first failing example is enough.
        phases = [Phase.explicit, Phase.generate]
        settings.register_profile(
            "mutants",
            deadline=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        options = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--hypothesis-profile=mutants",
            "--hypothesis-seed=0",
        ]
        sys.exit(pytest.main([*options, *self.tests]))


def _work(job: tuple[str, list[str], list[Mutant], int]) -> list[tuple[Mutant, str]]:
    module, tests, share, number = job
    copy = Copy(module, tests)
    started = time.monotonic()
    status, output = copy.run(copy.module.read_text(encoding="utf-8"))
    if status != 0:
        raise RuntimeError(f"the tests fail without changes:\n{output}")
    seconds = time.monotonic() - started
    print(f"{number} without a change: passed in {seconds:.1f} s", flush=True)
    results = []
    for mutant in share:
        status, output = copy.run(mutant.text, 3 * seconds + PATIENCE)
        outcome = {0: "SURVIVED", None: "too long"}.get(status, "killed")
        test = next(
            (line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), ""
        )
        print(
            f"{number} {outcome} {mutant.kind} line {mutant.line} {test.partition(' - ')[0]}",
            flush=True,
        )
        results.append((mutant, outcome))
    shutil.rmtree(copy.root.parent)
    return results


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("module")
    parser.add_argument("--tests", nargs="+", required=True, metavar="TEST", help="files")
    parser.add_argument(
        "--but", action="append", default=[], metavar="TEST", help="a test to leave out"
    )
    parser.add_argument(
        "--draw", type=int, metavar="N", help="try N changes, drawn at random (default: all)"
    )
    parser.add_argument(
        "--again",
        type=Path,
        metavar="LOG",
        help="try only what survived in the run with this output",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args()
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    sys.dont_write_bytecode = True
    for name in PRELOADED:
        __import__(name)
    text = module_path(ROOT, given.module).read_text(encoding="utf-8")
    chosen = mutants(text)
    total = len(chosen)
    if given.draw and given.draw < total:
        chosen = sorted(
            random.Random(SEED).sample(chosen, given.draw), key=lambda mutant: mutant.line
        )
    if given.again:
        survived = set(
            re.findall(r"SURVIVED (\S+ line \d+)", given.again.read_text(encoding="utf-8"))
        )
        chosen = [mutant for mutant in chosen if f"{mutant.kind} line {mutant.line}" in survived]
    print(f"{given.module}: {len(chosen)} of {total} changes", flush=True)
    left_out = [f"--deselect={test}" for test in given.but]
    shares = [
        (given.module, [*given.tests, *left_out], chosen[n :: given.jobs], n)
        for n in range(given.jobs)
    ]
    # Tests start processes, which the workers of multiprocessing.Pool may not.
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("fork")) as pool:
        results = [result for share in pool.map(_work, shares) for result in share]
    for mutant, outcome in sorted(results, key=lambda result: result[0].line):
        if outcome == "SURVIVED":
            old = text.splitlines()
            new = mutant.text.splitlines()
            difference = list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:]
            print("\n".join(["", *difference]))
    counts = Counter(outcome for _, outcome in results)
    killed = counts["killed"] + counts["too long"]
    print(
        f"\n{given.module} | {len(results)} of {total} | {killed} killed | "
        f"{killed / max(1, len(results)):.1%}"
    )


if __name__ == "__main__":
    main()
