"""tools/affected_tests.py, on this tree and on a small one."""

from pathlib import Path

import pytest

from affected_tests import MOST_FILES, affected, changed_files, importers
from programs import commit_all, run_git

PACKAGE = "benchmarks/bert/implementations/pytorch/mlbert"


@pytest.fixture(scope="module")
def graph(tree_root: Path) -> dict[str, set[str]]:
    return importers(tree_root)


@pytest.mark.parametrize(
    ("module", "test"),
    [
        ("optim/lamb.py", "tests/unit/optim/test_optimizers.py"),
        ("optim/muon.py", "tests/unit/optim/test_muon.py"),
        ("data/formats/packing.py", "tests/unit/data/formats/test_packing.py"),
        ("data/formats/masking.py", "tests/unit/data/formats/test_masking.py"),
        ("distributed/lifecycle.py", "tests/unit/distributed/test_lifecycle.py"),
        ("mlperf/mllog.py", "tests/unit/mlperf/test_mllog.py"),
        ("data/loading/config.py", "tests/tree/test_published_commands.py"),
    ],
)
def test_tests_of_a_changed_module_are_found(graph: dict[str, set[str]], module: str, test: str) -> None:
    assert test in [file for _, file in affected([f"{PACKAGE}/{module}"], graph)[:MOST_FILES]]


def test_nearest_tests_are_listed_first(tmp_path: Path) -> None:
    """Tests that import a changed module through helpers count, as do names of modules in strings."""
    home = tmp_path / PACKAGE
    home.mkdir(parents=True)
    (home / "changed.py").write_text("")
    (home / "user.py").write_text("from mlbert import changed\n")
    (home / "table.py").write_text('RULES = {"a": "mlbert.changed:Rule"}\n')
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "helper.py").write_text("import mlbert.user\n")
    (tests / "test_far.py").write_text("from helper import nothing\n")
    (tests / "test_near.py").write_text("from mlbert.table import RULES\n")
    (tests / "test_other.py").write_text("import json\n")
    run_git(tmp_path, "init", "-q")
    found = affected([f"{PACKAGE}/changed.py"], importers(tmp_path))
    assert found == [(2, "tests/test_near.py"), (3, "tests/test_far.py")]


def test_changed_files_are_edited_or_untracked(tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text("1\n")
    (tmp_path / "edited.py").write_text("1\n")
    (tmp_path / ".gitignore").write_text("built.py\n")
    commit_all(tmp_path)
    (tmp_path / "edited.py").write_text("2\n")
    (tmp_path / "new.py").write_text("1\n")
    (tmp_path / "built.py").write_text("1\n")
    assert changed_files(tmp_path, "HEAD") == {"edited.py", "new.py"}
