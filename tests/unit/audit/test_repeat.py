"""Running a log's training again: the same numbers on the same machine,
and every reason why it cannot or does not.
"""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edited_logs import accuracies, committed, write
from log_edits import nth
from mlaudit.compare import alike
from mlaudit.logs import read_log
from mlaudit.repeat import code_of, judge, make_plan, other_settings, read_repeatable, remarks
from mosaic_texts import BASE, make_texts
from programs import RunMlbert, commit_all, run_git
from stored_sets import VOCAB_SIZE, make_rows, random_lengths, write_set
from training_settings import train
from user_errors import assert_error_line, user_error

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "tests/assets/own_tree/results/cpu_demo/bert"


@pytest.fixture
def capsys(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> pytest.CaptureFixture[str]:
    """Let `run_mlbert` use files: the training, in another process, writes there too."""
    monkeypatch.setenv("COLUMNS", "80")
    return capfd


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a short run on a small set; return its log."""
    folder = tmp_path_factory.mktemp("trained")
    for number, name in enumerate(("train", "eval")):
        write_set(folder / "data" / name, make_rows(random_lengths(64), number))
    data = {
        "synthetic_data": 0,
        "input_dir": folder / "data/train",
        "eval_dir": folder / "data/eval",
    }
    evaluation = {"num_eval_examples": 64, "eval_iter_start_samples": 20, "eval_iter_samples": 20}
    train(folder, **data, **evaluation, shape={"vocab_size": VOCAB_SIZE})
    return folder / "out/result_0.txt"


def tampered(log: Path, folder: Path, change: float) -> Path:
    """Copy a log with another last accuracy."""
    runs = committed(log.parent)
    nth(runs[0], "eval_accuracy", -1)["value"] += change
    folder.mkdir()
    return write(runs, folder)[0].path


def test_the_same_seed_gives_the_same_run(run: Path, tmp_path: Path, run_mlbert: RunMlbert) -> None:
    status, out, err = run_mlbert("submission", "repeat", run, "--out", tmp_path / "again")
    assert status == 0, out + err
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    for wanted in (
        "3 of 3 accuracies are equal",
        "Losses of all 12 logged steps agree",
        "The repeated run agrees.",
    ):
        assert wanted in words, wanted
    new = read_log(tmp_path / "again/result_0.txt")
    assert accuracies(new) == accuracies(read_log(run))

    small, large = (
        read_repeatable(tampered(run, tmp_path / str(change), change)) for change in (0.0005, 0.01)
    )
    assert all(row.agrees for row in judge(small, new, alike(small)))
    rows = judge(large, new, alike(large))
    assert [row.name for row in rows if not row.agrees] == [rows[-1].name]
    assert rows[-1].name.startswith("accuracy after")
    assert "2 of 3" in remarks(large, new, True)[0]


@pytest.mark.slow
def test_a_run_on_text(tmp_path: Path, run_mlbert: RunMlbert) -> None:
    """MosaicBERT's main.py: its data, vocabulary and weights are relative paths,
    and may have moved.
    """
    make_texts(tmp_path, ROOT)
    program = [
        sys.executable,
        str(ROOT / "benchmarks/mosaic_bert/main.py"),
        "main.yaml",
        *BASE,
        "model.name=mosaic_bert",
        "max_duration=6ba",
        "eval_interval=3ba",
        "save_folder=out",
    ]
    subprocess.run(program, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    (tmp_path / "moved").mkdir()
    for name in ("vocab.txt", "data/train_small", "data/val"):
        (tmp_path / name).rename(tmp_path / "moved" / Path(name).name)
    log = tmp_path / "out/result_0.txt"
    moved = tmp_path / "moved"
    status, out, err = run_mlbert("submission", "repeat", log, "--data", moved)
    assert status == 0, out + err
    found = " ".join(out.split())
    assert (
        "2 of 2 accuracies are equal to the last digit. Losses of all 6 logged steps agree" in found
    )
    assert "Settings that differ" not in found
    with (tmp_path / "moved/vocab.txt").open("a") as vocabulary:
        vocabulary.write("eleven\n")
    status, _, err = run_mlbert("submission", "repeat", log, "--data", moved)
    assert status == 2
    assert_error_line(err, "data.checksum", tmp_path / "moved/train_small")


@pytest.mark.slow
def test_a_result_that_is_not_true_does_not_agree(
    run: Path, tmp_path: Path, run_mlbert: RunMlbert
) -> None:
    status, out, err = run_mlbert("submission", "repeat", tampered(run, tmp_path / "logs", 0.01))
    assert status == 1, out + err
    assert "1 of 4 rows do NOT agree" in " ".join(out.split())


def test_other_data_is_refused(run: Path, tmp_path: Path, assert_fails: Callable[..., str]) -> None:
    write_set(tmp_path / "data/train", make_rows(random_lengths(64), 7))
    shutil.copytree(run.parents[1] / "data/eval", tmp_path / "data/eval")
    words = ["submission", "repeat", run, "--data", tmp_path / "data", "--out", tmp_path / "again"]
    assert_fails(words, "data.checksum", tmp_path / "data/train")
    assert not (tmp_path / "again").exists()


def test_an_interrupted_repetition_leaves_nothing(run: Path, tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "mlbert",
        "submission",
        "repeat",
        run,
        "--out",
        tmp_path / "again",
    ]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    give_up = time.monotonic() + 120
    while not (tmp_path / "again/result_0.txt").exists():  # the child trains
        assert time.monotonic() < give_up
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, words_of = process.communicate(timeout=120)
    assert process.returncode == 130, words_of
    assert not (tmp_path / "again").exists()


def test_settings_of_a_committed_log(tmp_path: Path) -> None:
    log = read_repeatable(DEMO / "result_0.txt")
    with user_error("file.missing", "DATADIR_PHASE2"):
        make_plan(log, tmp_path, tmp_path, 5, ROOT)
    (tmp_path / "tree" / "shape.json").parent.mkdir()
    with user_error(
        "file.unreadable",
        tmp_path / "tree/benchmarks/bert/implementations/pytorch/configs/demo.json",
    ):
        make_plan(log, tmp_path, None, 5, tmp_path / "tree")
    assert len(alike(log)) == 10
    lines = (
        (DEMO / "result_0.txt")
        .read_text()
        .replace('"BATCHSIZE": {"value": 32', '"BATCHSIZE": {"value": 16')
    )
    (tmp_path / "result_0.txt").write_text(lines)
    assert other_settings(log, read_log(tmp_path / "result_0.txt")) == ["BATCHSIZE 32, here 16"]


def test_logs_that_cannot_be_repeated(tmp_path: Path) -> None:
    text = (DEMO / "result_0.txt").read_text()
    for name, changed, code in (
        (
            "foreign",
            "\n".join(line for line in text.splitlines() if '"configuration"' not in line),
            "log.incomplete",
        ),
        (
            "recipe",
            text.replace('"value": "packed_lamb"', '"value": "classification"'),
            "log.unsupported",
        ),
        ("open", "\n".join(text.splitlines()[:-1]), "log.incomplete"),
    ):
        (tmp_path / name).write_text(changed)
        with user_error(code, tmp_path / name):
            read_repeatable(tmp_path / name)


def test_every_committed_run_agrees_with_its_siblings_and_a_worse_one_does_not(
    tmp_path: Path,
) -> None:
    for folder in sorted((ROOT / "results").glob("*/bert")):
        logs = [read_log(path) for path in sorted(folder.glob("result_*.txt"))]
        for one in logs:
            bad = [row for row in judge(logs[0], one, logs) if not row.agrees]
            assert bad == [], one.path
    logs = alike(read_log(DEMO / "result_0.txt"))
    other = read_log(Path(shutil.copy(DEMO / "result_3.txt", tmp_path)))
    worse = [
        replace(event, value=0.06) if event.key == "eval_accuracy" else event
        for event in other.events
    ]
    rows = judge(logs[0], replace(other, events=worse), logs)
    assert sum(not row.agrees for row in rows) >= 3


def test_the_code_of_the_commit(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("old\n")
    commit = commit_all(tmp_path)
    (tmp_path / "code.py").write_text("new\n")
    commit_all(tmp_path)
    text = (DEMO / "result_0.txt").read_text()
    used = json.loads(
        next(line for line in text.splitlines() if '"commit"' in line).partition("MLLOG ")[2]
    )["value"]
    path = tmp_path / "result_0.txt"
    path.write_text(text.replace(used, commit))
    log = read_repeatable(path)
    with code_of(log, tmp_path, exact=True) as (tree, note):
        assert (tree / "code.py").read_text() == "old\n"
        assert commit[:12] in note
    assert not tree.exists()
    assert len(run_git(tmp_path, "worktree", "list").splitlines()) == 1
    with code_of(log, tmp_path, exact=False) as (tree, note):
        assert (tree, "1 commits after" in note) == (tmp_path, True)
    path.write_text(text.replace(used, hashlib.sha1(b"").hexdigest()))
    with user_error("submission.commit", "--exact"), code_of(read_log(path), tmp_path, exact=True):
        pass
