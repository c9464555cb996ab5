"""A log's file:lineno against the code of its commit:
the call there names the key, or the check says why not.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlaudit.call_sites import Sources
from mlaudit.findings import Outcome
from mlaudit.logs import Log, read_log
from mlaudit.own_checks import run_checks
from mlaudit.result_set import ResultSet
from programs import commit_all, write_files

PROGRAM = """
from pathlib import Path
from mlbert.mlperf.mllog import MLPerfLogger, constants
from mlbert.host.provenance import git_state
tree = Path(__file__).resolve().parent
commit, tree_modified = git_state(tree)
log = MLPerfLogger(tree / "results/result_0.txt", 0, tree)
log.event("configuration", {})
log.event("commit", commit)
log.event("tree_modified", tree_modified)
log.start(constants.RUN_START)
log.event(
    "opt_lamb_beta_1",
    max(0.9,
        0.1),
)
log.run_stop("success")
"""
NAMES = [
    "/elsewhere.py",
    "../up.py",
    "gone.py",
    "results",
    "dangling.py",
    "a\0b",
    "\ud800",
    "a" * 300,
    "\u6f22" * 99,
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a checkout with a program and the log that it wrote at the first commit."""
    tree = write_files(tmp_path / "tree", {"program.py": PROGRAM})
    commit_all(tree)
    subprocess.run([sys.executable, tree / "program.py"], check=True)
    return tree


def reported(tree: Path) -> tuple[Outcome, str]:
    results = ResultSet([read_log(tree / "results/result_0.txt")], {}, None, tree)
    (finding,) = (
        finding for finding in run_checks(results, "here") if finding.check == "own: call sites"
    )
    return finding.outcome, finding.words


def edit(tree: Path, name: str, old: str, new: str) -> None:
    text = (tree / name).read_text()
    assert old in text
    (tree / name).write_text(text.replace(old, new))


def test_the_commit_of_the_log_is_read_from_the_history(tree: Path) -> None:
    assert reported(tree)[0] is Outcome.PASS
    edit(tree, "program.py", "from pathlib", "\n\n\nfrom pathlib")
    commit_all(tree)
    assert reported(tree)[0] is Outcome.PASS
    (tree / "program.py").unlink()
    assert reported(tree)[0] is Outcome.PASS


def test_a_commit_that_is_not_here_is_named(tree: Path) -> None:
    shutil.rmtree(tree / ".git")
    commit = read_log(tree / "results/result_0.txt").value("commit")
    write_files(tree, {"source.json": json.dumps({"commit": commit, "dirty": False})})
    assert reported(tree)[0] is Outcome.PASS
    (tree / "source.json").unlink()
    edit(tree, "program.py", "from pathlib", "\n\n\nfrom pathlib")
    outcome, words = reported(tree)
    assert outcome is Outcome.WARN
    assert words.startswith(
        f"result_0.txt: commit {commit} is not available, so its lines are looked up in the tree"
    )
    assert "program.py:8 does not log configuration" in words


def test_a_modified_tree_is_named(tree: Path) -> None:
    edit(tree, "program.py", "0.1", "0.2")
    (tree / "results/result_0.txt").unlink()
    subprocess.run([sys.executable, tree / "program.py"], check=True)
    outcome, words = reported(tree)
    assert outcome is Outcome.WARN
    assert "the tree had been modified since commit" in words
    assert "does not log" not in words


def test_a_call_site_that_cannot_be_read_is_an_error_where_the_commit_is_known(tree: Path) -> None:
    (tree / "dangling.py").symlink_to("nothing")
    log = tree / "results/result_0.txt"
    good = log.read_text()
    for expected in (Outcome.ERROR, Outcome.WARN):
        for name in NAMES:
            log.write_text(good.replace('"program.py"', json.dumps(name)))
            outcome, words = reported(tree)
            assert outcome is expected
            assert "is not in the tree" in words or len(name) == 300  # the message is cut
            assert Sources(tree, read_log(log)).text(name) is None
        shutil.rmtree(tree / ".git", ignore_errors=True)


@pytest.mark.parametrize(
    ("code", "line", "key", "found"),
    [
        ('log("seed", f(1))', 1, "seed", True),
        ('log("seed", f(\n1))', 2, "seed", True),
        ('log("seed", f("run_stop"))', 1, "run_stop", True),
        ("log(c.OPT_BASE_LR, 1)", 1, "opt_base_learning_rate", True),
        ("log(key=RUN_START)", 1, "run_start", True),
        ('log.run_stop("success")', 1, "run_stop", True),
        ("with log.aborting():\n    work()", 1, "run_stop", True),
        ("with log.aborting():\n    work()", 2, "run_stop", False),
        ('seed = 1  # "seed"', 1, "seed", False),
        ("log(name, value)", 1, "seed", False),
        ('log(f"opt_{name}_beta_1", 1)', 1, "opt_lamb_beta_1", True),
        ('log(f"opt_{name}_beta_1", 1)', 1, "opt_lamb_beta_2", False),
        ('log(f"{name}", 1)', 1, "seed", False),
        ('log("seeds", 1)', 1, "seed", False),
        ('log(\n"seed")\nlog("other")', 3, "seed", False),
        ("not python(", 1, "seed", False),
    ],
)
def test_which_calls_name_a_key(
    code: str, line: int, key: str, found: bool, tmp_path: Path
) -> None:
    (tmp_path / "x.py").write_text(code)
    sources = Sources(tmp_path, Log(Path("result_0.txt"), ()))
    assert (sources.call_of("x.py", line, key) is not None) is found
