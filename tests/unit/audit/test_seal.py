"""Sealing a system's results, and what the check says of a seal."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlaudit.cli.submission import app
from mlaudit.findings import Outcome
from mlaudit.seal import SUMS, check_seal, seal
from programs import write_files
from stored_sets import tree as stored_files
from user_errors import user_error


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a tree with the description of ``machine`` and no results."""
    return write_files(tmp_path / "tree", {"systems/machine.json": "{}"})


@pytest.fixture
def logdir(tmp_path: Path) -> Path:
    """Write two runs, and what an interrupted one left."""
    names = ("config.json", "metrics.jsonl", "summary.json", "curve.png")
    files = {f"run_{index}/{name}": f"{name} {index}" for index in range(2) for name in names}
    files |= {f"result_{index}.txt": f"log {index}" for index in range(2)} | {
        "result_0.part0.txt": "interrupted"
    }
    (tmp_path / "logdir/run_0/weights").mkdir(parents=True)
    return write_files(tmp_path / "logdir", files)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


def _errors(tree: Path) -> list[str]:
    complaints = check_seal(tree / "results" / "machine")
    return [complaint.text for complaint in complaints if complaint.outcome is Outcome.ERROR]


def test_a_seal_covers_what_was_copied_and_the_description(tree: Path, logdir: Path) -> None:
    results = tree / "results" / "machine"
    results.mkdir(parents=True)
    (found,) = check_seal(results)
    assert found.outcome is Outcome.NOTE, "there is no seal"
    names = seal("machine", tree, logdir)
    runs = [
        f"run_{index}.{name}"
        for index in range(2)
        for name in ("config.json", "metrics.jsonl", "summary.json")
    ]
    assert names == ["bert/result_0.txt", "bert/result_1.txt", *runs, "../../systems/machine.json"]
    assert set(stored_files(results)) == {*names[:-1], SUMS}
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", SUMS], cwd=results, check=True)
    assert list(check_seal(results)) == []
    before = (results / SUMS).read_bytes()
    assert seal("machine", tree, logdir) == names
    assert (results / SUMS).read_bytes() == before


def test_another_file_is_not_overwritten(tree: Path, logdir: Path) -> None:
    (logdir / "run_1" / "config.json").rename(logdir / "run_1" / "aside.json")
    seal("machine", tree, logdir)
    (logdir / "run_1" / "aside.json").rename(logdir / "run_1" / "config.json")
    results = tree / "results" / "machine"
    (logdir / "result_0.txt").write_text("log 9")
    for path in (logdir / "result_0.txt", results / "bert/result_0.txt"):
        os.utime(path, (0, 0))  # contents count, not size and time
    with user_error("file.exists", results / "bert/result_0.txt"):
        seal("machine", tree, logdir)
    assert (results / "bert" / "result_0.txt").read_text() == "log 0"
    assert not (results / "run_1.config.json").exists(), "nothing is copied where something differs"


@pytest.mark.parametrize("name", ["run_\n.config.json", "run_\\.config.json"])
def test_a_name_that_sha256sum_escapes_is_refused(tree: Path, logdir: Path, name: str) -> None:
    seal("machine", tree, logdir)
    (tree / "results/machine" / name).write_text("{}")
    with user_error("submission.file-name", wording=False):
        seal("machine", tree)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda folder: (folder / "bert/result_0.txt").write_text("x"),
            "bert/result_0.txt is another file",
        ),
        (
            lambda folder: (folder / "run_1.metrics.jsonl").unlink(),
            "run_1.metrics.jsonl is missing",
        ),
        (
            lambda folder: (folder / "bert/result_9.txt").write_text("x"),
            f"bert/result_9.txt is not in {SUMS}",
        ),
        (
            lambda folder: (folder / "run_9.config.json").write_text("x"),
            f"run_9.config.json is not in {SUMS}",
        ),
        (
            lambda folder: (folder / "../../systems/machine.json").write_text("[]"),
            "machine.json is another file",
        ),
        (lambda folder: (folder / SUMS).write_text(""), f"{SUMS} is empty"),
        (
            lambda folder: (folder / SUMS).write_text("x" * 2**20),
            f"{SUMS}:1 is not a line of sha256sum",
        ),
        (
            lambda folder: (folder / SUMS).write_text("x" * (2**20 + 1)),
            f"{SUMS} is larger than 1 MB",
        ),
        (lambda folder: (folder / SUMS).write_bytes(b"\xff"), f"{SUMS} cannot be read"),
        (
            lambda folder: (folder / SUMS).write_text(f"{'0' * 64}  ../x\n"),
            "../x, which is outside",
        ),
        (
            lambda folder: (folder / SUMS).write_text((folder / SUMS).read_text() * 2),
            "lists bert/result_0.txt twice",
        ),
        (
            lambda folder: shutil.move(folder / SUMS, folder / f"{SUMS}.sig"),
            f"signs {SUMS}, which is missing",
        ),
    ],
)
def test_changes_that_break_a_seal_are_named(change, words, tree, logdir):
    seal("machine", tree, logdir)
    change(tree / "results" / "machine")
    assert any(words in text for text in _errors(tree)), _errors(tree)


def test_a_signature(tree: Path, logdir: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["seal", "machine", "--tree", str(tree), "--from", str(logdir), "--key", str(key)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "covers 9 files, signed" in done.output
    results = tree / "results" / "machine"
    words = ["ssh-keygen", "-l", "-f", f"{key}.pub"]
    fingerprint = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[
        1
    ]
    (found,) = check_seal(results)
    assert found.outcome is Outcome.NOTE
    assert fingerprint in found.text
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        (found,) = check_seal(results)
    assert (found.outcome, "ssh-keygen is not installed" in found.text) == (Outcome.WARN, True)
    (results / f"{SUMS}.minisig").write_text("untrusted comment")
    assert any(
        "is not verified: run minisign -V" in complaint.text for complaint in check_seal(results)
    )
    sums = (results / SUMS).read_text()
    (results / SUMS).write_text(sums + f"{'0' * 64}  nothing\n")
    assert f"{SUMS}.sig is not a signature of {SUMS}" in _errors(tree)
    seal("machine", tree)  # anew, without a key: the old signature goes
    assert not (results / f"{SUMS}.sig").exists()


def test_an_unsealable_tree_is_one_clear_error(tree: Path, logdir: Path, tmp_path: Path) -> None:
    (tmp_path / "bad_key").write_text("no key")
    (tmp_path / "bad_key").chmod(0o600)
    absent = tmp_path / "absent"
    bad_key = tmp_path / "bad_key"
    for arguments, code, subject in (
        (("other", tree), "file.missing", tree / "systems/other.json"),
        (("machine", tree), "log.missing", tree / "results/machine/bert"),
        (("machine", tree, absent), "log.missing", absent),
        (("machine", tree, logdir, absent), "file.missing", absent),
        (("machine", tree, logdir, bad_key), "program.failed", bad_key),
    ):
        with user_error(code, subject, wording=subject != bad_key):  # ssh-keygen's own words
            seal(*arguments)
    assert not (tree / "results" / "machine" / SUMS).exists()
