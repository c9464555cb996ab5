"""Exporting a tree."""

import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlaudit import official
from mlaudit.cli.submission import app
from mlaudit.findings import Outcome
from mlaudit.tree_export import check_source, export_tree, is_export
from mlbert.host.provenance import SOURCE_STATEMENT, git_state
from programs import commit_all, write_files
from user_errors import user_error

LEFT_OUT = (
    "tests/unit/test_x.py",
    "tools/x.py",
    "records/2025_x/log.txt",
    "runs/x/result_0.txt",
    ".github/x.yml",
    ".gitignore",
    "benchmarks/bert/__pycache__/x.pyc",
    "benchmarks/bert/.hidden",
    "benchmarks/bert/x.so",
)
KEPT = ("README.md", "systems/a.json", "results/a/bert/result_0.txt", "benchmarks/bert/tests/x.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {name: name for name in (*LEFT_OUT, *KEPT)} | {
        ".gitignore": "runs/\n*.pyc\nignored.txt\n"
    }
    return write_files(tmp_path / "tree", files)


def _names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_plain_folder_and_its_export_have_the_same_export(tree: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert export_tree(tree, target) == len(KEPT)
    assert _names(target) == {*KEPT, SOURCE_STATEMENT}
    assert official.run(official.repo_checker(target))[0].outcome is Outcome.PASS
    export_tree(target, tmp_path / "twice")
    once, twice = (
        json.loads((folder / SOURCE_STATEMENT).read_text())
        for folder in (target, tmp_path / "twice")
    )
    assert once == twice
    assert set(once["files"]) == {"benchmarks/bert/tests/x.py"}


def test_a_checkout(tree: Path, tmp_path: Path) -> None:
    (tree / "ignored.txt").write_text("")
    (tree / "link.txt").symlink_to("README.md")
    committed = commit_all(tree)
    for name in ("systems/new.json", "benchmarks/bert/new.py", "benchmarks/bert/weights.pt"):
        (tree / name).write_text("{}")
    target = tmp_path / "out"
    export_tree(tree, target)
    assert _names(target) == {*KEPT, SOURCE_STATEMENT, "systems/new.json", "link.txt"}
    assert not (target / "link.txt").is_symlink()
    commit, dirty = git_state(target)
    assert (commit, bool(dirty)) == (committed, True)


@pytest.mark.parametrize(
    ("make", "code", "name"),
    [
        (lambda tree: (tree / "a b.txt").write_text(""), "submission.file-name", "a b.txt"),
        (lambda tree: (tree / "link").symlink_to("absent"), "submission.file-name", "link"),
        (
            lambda tree: (tree / "big").open("wb").truncate(51 * 1024 * 1024),
            "file.too-large",
            "big",
        ),
    ],
    ids=["space", "link", "size"],
)
def test_files_the_repository_checker_refuses_are_named(
    make, code: str, name: str, tree: Path, tmp_path: Path
) -> None:
    make(tree)
    with user_error(code, name):
        export_tree(tree, tmp_path / "out")


def test_a_target_with_files_or_inside_the_tree_is_left_alone(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with user_error("file.exists", tmp_path / "out"):
        export_tree(tree, tmp_path / "out")
    assert _names(tmp_path / "out") == {"mine.txt"}
    export_tree(tree, tree / "benchmarks" / "out")
    assert not (tree / "benchmarks" / "out" / "benchmarks" / "out").exists()


def test_this_tree(tmp_path: Path) -> None:
    target = tmp_path / "out"
    done = CliRunner().invoke(app, ["export", str(target)])
    assert done.exit_code == 0, done.output
    assert "ALL CHECKS PASSED" in " ".join(done.stdout.split())  # the screen wraps long lines
    assert (target / "benchmarks/bert/implementations/pytorch/mlbert/mlperf/mllog.py").is_file()
    assert not {"tests", "tools", "records"} & {path.name for path in target.iterdir()}
    statement = json.loads((target / SOURCE_STATEMENT).read_text())
    assert set(statement) == {"commit", "dirty", "files"}
    assert set(statement["files"]) == {
        name for name in _names(target) if name.startswith("benchmarks/")
    }
    listed = "".join(f"{digest}  {name}\n" for name, digest in statement["files"].items())
    subprocess.run(
        ["sha256sum", "--check", "--quiet"], cwd=target, input=listed, text=True, check=True
    )


def test_an_export_is_checked_against_its_own_statement(tree: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    export_tree(tree, target)
    assert is_export(target)
    assert list(check_source(target)) == []
    (target / "benchmarks/bert/tests/x.py").write_text("changed")
    assert [complaint.text for complaint in check_source(target)] == [
        "benchmarks/bert/tests/x.py is another file"
    ]
    for statement, outcome, words in (
        ('{"files": {"../x": ""}}', Outcome.ERROR, "lists ../x, which is outside"),
        ('{"files": {"benchmarks/y": 3}}', Outcome.ERROR, "benchmarks/y is missing"),
        ("[", Outcome.ERROR, "cannot be read"),
        ('{"commit": "x", "dirty": false}', Outcome.NOTE, "lists no files"),
    ):
        (target / SOURCE_STATEMENT).write_text(statement)
        (found,) = check_source(target)
        assert found.outcome is outcome
        assert words in found.text
