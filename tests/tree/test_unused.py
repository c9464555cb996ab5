"""Every definition in the package is used by the package, a tool or a launcher, not only by tests."""

import ast
import re
from collections import defaultdict
from pathlib import Path

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# PyTorch calls these methods of modules and autograd functions.
CALLED_BY_TORCH = {"forward", "backward"}
CALLED_BY_PYTHON = ("__", "visit_")  # the latter by ast.NodeVisitor
# What other packages call.
CALLED_BY_OTHERS = {
    "mlperf/mllog.py": "_do_log handleError",  # mlperf_logging, logging
    # transformers reads them from an export.
    "models/weights/modeling_mlbert.py": "_init_weights MlbertForMaskedLM MlbertForSequenceClassification",
    "data/prepare/corpus_files.py": "handle_starttag handle_endtag handle_data parse_marked_section",  # html.parser
    "cli/main.py": "make_context",  # Typer
    "cli/train.py": "invoke",  # Typer
    "mlperf/callback.py": "on_train_begin on_evaluate on_train_end",  # transformers.Trainer
}
ALLOWED = {f"{file}: {name}" for file, names in CALLED_BY_OTHERS.items() for name in names.split()}


def definitions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Return functions, classes and methods, except functions registered by a decorator with arguments."""
    top = [node for node in tree.body if isinstance(node, DEFINITIONS)]
    found = top + [n for c in top if isinstance(c, ast.ClassDef) for n in c.body if isinstance(n, DEFINITIONS)]
    registered = [n for n in found if any(isinstance(d, ast.Call) for d in n.decorator_list)]
    return [n for n in found if isinstance(n, ast.ClassDef) or n not in registered]


def names_used(tree: ast.Module) -> list[tuple[str, int]]:
    """Return (name, line) of every name that is read, called or written as "module:name"; imports do not count."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.append((node.id, node.lineno))
        elif isinstance(node, ast.Attribute):
            found.append((node.attr, node.lineno))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.:]+", node.value):
            found += [(word, node.lineno) for word in re.split(r"[.:]", node.value)]
    return found


def test_every_definition_is_used(tracked: list[Path], syntax_trees: dict[Path, ast.Module], tree_root: Path) -> None:
    tests, package = tree_root / "tests", tree_root / "benchmarks/bert/implementations/pytorch/mlbert"
    trees = {path: tree for path, tree in syntax_trees.items() if tests not in path.parents}
    used: dict[str, list[tuple[Path, int]]] = defaultdict(list)
    for path, tree in trees.items():
        for name, line in names_used(tree):
            used[name].append((path, line))
    shell = [path.read_text() for path in tracked if path.suffix in (".sh", ".sub") and tests not in path.parents]
    mentioned = set(re.findall(r"\w+", " ".join(shell))) | CALLED_BY_TORCH
    unused = set()
    for path, tree in trees.items():
        for node in definitions(tree) if package in path.parents else []:
            own = range(node.lineno, node.end_lineno + 1)
            elsewhere = any(place != path or line not in own for place, line in used[node.name])
            if not elsewhere and node.name not in mentioned and not node.name.startswith(CALLED_BY_PYTHON):
                unused.add(f"{path.relative_to(package).as_posix()}: {node.name}")
    assert unused - ALLOWED == set(), "unused outside the tests: delete them, or add them to CALLED_BY_OTHERS"
    assert ALLOWED - unused == set(), "used or deleted: remove them from CALLED_BY_OTHERS"
