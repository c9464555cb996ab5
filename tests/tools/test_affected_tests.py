"""tools/affected_tests.py, on this tree and on a small one."""

from pathlib import Path

from affected_tests import MOST_FILES, affected, changed_files, importers
from programs import commit_all, run_git, write_files

PACKAGE = "benchmarks/bert/implementations/pytorch/mlbert"


def test_tests_of_a_changed_module_are_found(tree_root: Path) -> None:
    graph = importers(tree_root)
    for module, test in {
        "optim/lamb.py": "tests/unit/optim/test_optimizers.py",
        "data/formats/packing.py": "tests/unit/data/formats/test_packing.py",
        "data/loading/config.py": "tests/tree/test_samsung.py",
    }.items():
        assert test in [file for _, file in affected([f"{PACKAGE}/{module}"], graph)[:MOST_FILES]]


def test_nearest_tests_are_listed_first(tmp_path: Path) -> None:
    """Tests that import a changed module through helpers count,
    as do names of modules in strings.
    """
    package = {
        "changed": "",
        "user": "from mlbert import changed\n",
        "table": 'RULES = {"a": "mlbert.changed:Rule"}\n',
    }
    write_files(tmp_path / PACKAGE, {f"{name}.py": text for name, text in package.items()})
    imports = {"helper": "import mlbert.user\n", "test_far": "from helper import nothing\n"}
    imports |= {"test_near": "from mlbert.table import RULES\n", "test_other": "import json\n"}
    write_files(tmp_path / "tests", {f"{name}.py": text for name, text in imports.items()})
    run_git(tmp_path, "init", "-q")
    found = affected([f"{PACKAGE}/changed.py"], importers(tmp_path))
    assert found == [(2, "tests/test_near.py"), (3, "tests/test_far.py")]


def test_changed_files_are_edited_or_untracked(tmp_path: Path) -> None:
    write_files(tmp_path, {"same.py": "1\n", "edited.py": "1\n", ".gitignore": "built.py\n"})
    commit_all(tmp_path)
    write_files(tmp_path, {"edited.py": "2\n", "new.py": "1\n", "built.py": "1\n"})
    assert changed_files(tmp_path, "HEAD") == {"edited.py", "new.py"}
