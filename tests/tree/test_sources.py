"""Rules for the sources: paths, names of modules in docs, files that do not belong here,
unused definitions.
"""

import ast
import re
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path

import pytest

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
HOME_PATH = re.compile(r"/(?:home|root|Users|work|mnt|raid|lustre|scratch)/[\w.-]+/[\w./-]*")
# Published by Inventec; not paths of our machines.
PUBLISHED_PATHS = ("/mnt/mlperf/bert_data", "/mnt/sqsh/bert_ngc23.09_pyt.sqsh")
HOME = "benchmarks/bert/implementations"
IMPLEMENTATIONS = {
    "mlbert": f"{HOME}/pytorch",
    "tf2_bert": f"{HOME}/tensorflow2",
    "mosaic_yaml": "benchmarks/mosaic_bert",
    "mlaudit": "audit",
}
_NAMES = "|".join(IMPLEMENTATIONS)
DOTTED = re.compile(rf"(?<=`)(?:{_NAMES})(?:\.\w+)+(?=`)")
MODULE_FILE = re.compile(rf"\b(?:{_NAMES})/[\w/]+\.py\b")
Trees = dict[Path, ast.Module]
BUILT = {".so", ".o", ".a", ".pyc", ".pt", ".ckpt", ".safetensors"}
PACKAGES = [Path(IMPLEMENTATIONS[name]) / name for name in ("mlbert", "mosaic_yaml", "mlaudit")]
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
# PyTorch calls these methods of modules and autograd functions.
CALLED_BY_TORCH = {"forward", "backward"}
CALLED_BY_PYTHON = ("__", "visit_")  # the latter by ast.NodeVisitor
# What other packages call.
CALLED_BY_OTHERS = {
    "mlperf/mllog.py": "_do_log handleError",  # mlperf_logging, logging
    # transformers reads them from an export.
    "models/weights/modeling_mlbert.py": (
        "_init_weights MlbertForMaskedLM MlbertForSequenceClassification "
        "MlbertForTokenClassification set_input_embeddings get_output_embeddings "
        "set_output_embeddings resize_token_embeddings"
    ),
    # html.parser
    "data/prepare/corpus_files.py": (
        "handle_starttag handle_endtag handle_data parse_marked_section"
    ),
    "host/command_line.py": "make_context",  # Typer
    "cli/train.py": "format_options",  # Typer
    "mlperf/lightning.py": (  # Lightning's Trainer
        "on_train_start on_validation_start on_validation_end on_train_end on_exception teardown"
    ),
    "mlperf/callback.py": "on_train_begin on_evaluate on_train_end",  # transformers.Trainer
}
ALLOWED = {f"{file}: {name}" for file, names in CALLED_BY_OTHERS.items() for name in names.split()}


def code(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def test_no_paths_of_our_machines(tracked: list[Path]) -> None:
    suffixes = {".py", ".sh", ".sub", ".toml", ".json", ".md", ".c", ".h", ".txt", ".yaml"}
    found = {}
    for path in tracked:
        # Logs of real runs name their machine; the pattern in this file is not a path.
        if path.suffix not in suffixes or {"results", "records", "golden", "assets"} & set(
            path.parts
        ):
            continue
        paths = [
            name for name in HOME_PATH.findall(code(path)) if not name.startswith(PUBLISHED_PATHS)
        ]
        if paths and path != Path(__file__).resolve():
            found[str(path)] = paths
    assert found == {}


def test_named_modules_exist(tracked: list[Path], tree_root: Path) -> None:
    """Check module names in docs and comments: `mlbert.package.module.name` or
    mlbert/package/module.py.
    """
    stale = set()
    for path in tracked:
        parts = path.relative_to(tree_root).parts
        if path.suffix not in {".py", ".md", ".sh"} or parts[0] in ("tests", "results", "records"):
            continue
        if path.name == "worked_examples.md":
            continue  # its examples make modules
        stale |= {
            (str(path), name)
            for name in DOTTED.findall(code(path))
            if not is_defined(name, tree_root)
        }
        files = {
            (name, IMPLEMENTATIONS[name.partition("/")[0]])
            for name in MODULE_FILE.findall(code(path))
        }
        stale |= {
            (str(path), name) for name, home in files if not (tree_root / home / name).is_file()
        }
    assert stale == set()


def is_defined(dotted: str, tree_root: Path) -> bool:
    """Return True if a dotted name is a package, a module, or a name that occurs in its module."""
    package, *names = dotted.split(".")
    place = tree_root / IMPLEMENTATIONS[package] / package
    if len(names) == 1 and re.search(rf"\b{names[0]}\b", code(place / "__init__.py")):
        return True
    for number, name in enumerate(names):
        place = place / name
        if place.with_suffix(".py").is_file():
            return all(
                re.search(rf"\b{word}\b", code(place.with_suffix(".py")))
                for word in names[number + 1 :]
            )
        if not place.is_dir():
            return False
    return True


def test_files_pass_the_official_repository_check_and_are_not_built(
    tracked: list[Path], tree_root: Path
) -> None:
    assert [path for path in tracked if path.suffix in BUILT and "assets" not in path.parts] == []
    names = [path.relative_to(tree_root) for path in tracked]
    assert [str(name) for name in names if " " in str(name)] == []
    assert [str(path) for path in tracked if path.stat().st_size > 50_000_000] == []
    assert [str(path) for path in tracked if path.is_symlink()] == []


def test_every_folder_of_tests_is_collected(tree_root: Path, pytestconfig: pytest.Config) -> None:
    """By default, pytest skips folders named dist, build and others."""
    hidden = pytestconfig.getini("norecursedirs")
    folders = {path.parent for path in (tree_root / "tests").rglob("test_*.py")}
    names = {part for folder in folders for part in folder.relative_to(tree_root).parts}
    assert {"dist", "gpu", "slurm", "tools", "tree", "unit"} <= names
    assert [
        name for name in sorted(names) if any(fnmatch(name, pattern) for pattern in hidden)
    ] == []


def definitions(tree: ast.Module) -> list[ast.AST]:
    """Return functions, classes and methods, except functions registered by a decorator with
    arguments.
    """
    top = [node for node in tree.body if isinstance(node, DEFINITIONS)]
    found = top + [
        n for c in top if isinstance(c, ast.ClassDef) for n in c.body if isinstance(n, DEFINITIONS)
    ]
    registered = [n for n in found if any(isinstance(d, ast.Call) for d in n.decorator_list)]
    return [n for n in found if isinstance(n, ast.ClassDef) or n not in registered]


def names_used(tree: ast.Module) -> list[tuple[str, int]]:
    """Return (name, line) of every name that is read, called or written as "module:name";
    imports do not count.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.append((node.id, node.lineno))
        elif isinstance(node, ast.Attribute):
            found.append((node.attr, node.lineno))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"[\w.:]+", node.value)
        ):
            found += [(word, node.lineno) for word in re.split(r"[.:]", node.value)]
    return found


def test_every_definition_is_used(
    tracked: list[Path], syntax_trees: Trees, tree_root: Path
) -> None:
    tests = tree_root / "tests"
    packages = [tree_root / package for package in PACKAGES]
    trees = {path: tree for path, tree in syntax_trees.items() if tests not in path.parents}
    used: dict[str, list[tuple[Path, int]]] = defaultdict(list)
    for path, tree in trees.items():
        for name, line in names_used(tree):
            used[name].append((path, line))
    shell = [
        path.read_text()
        for path in tracked
        if path.suffix in (".sh", ".sub") and tests not in path.parents
    ]
    mentioned = set(re.findall(r"\w+", " ".join(shell))) | CALLED_BY_TORCH
    unused = set()
    for path, tree in trees.items():
        package = next((one for one in packages if one in path.parents), None)
        if package is None:
            continue
        for node in definitions(tree):
            own = range(node.lineno, node.end_lineno + 1)
            elsewhere = any(place != path or line not in own for place, line in used[node.name])
            if (
                not elsewhere
                and node.name not in mentioned
                and not node.name.startswith(CALLED_BY_PYTHON)
            ):
                unused.add(f"{path.relative_to(package).as_posix()}: {node.name}")
    assert unused - ALLOWED == set(), (
        "unused outside the tests: delete them, or add them to CALLED_BY_OTHERS"
    )
    assert ALLOWED - unused == set(), "used or deleted: remove them from CALLED_BY_OTHERS"
