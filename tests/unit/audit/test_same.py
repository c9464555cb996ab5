"""Which values all runs of a result share, series with gaps,
and copies beyond the same places of two runs.
"""

import copy
import random
import re
from pathlib import Path

import pytest

from audit import expect
from edited_logs import OWN_LOGS, committed, report, simulated, write
from log_edits import configure, each, nth, put
from mlaudit.checks.duplicate_runs import check_copies_between
from mlaudit.checks.same import check_same_settings
from mlaudit.findings import Outcome
from mlaudit.result_set import ResultSet


def test_every_value_of_ours_before_the_run_is_shared(tree_root: Path, tmp_path: Path) -> None:
    runs = committed(tree_root / OWN_LOGS)
    may_differ = ("cache_clear", "init_start", "init_stop", "seed")
    lines = runs[3][: runs[3].index(nth(runs[3], "run_start"))]
    lines = [line for line in lines if line["key"] not in may_differ] + [
        nth(runs[3], "eval_samples")
    ]
    assert len(lines) > 40
    for line in lines:
        line["value"] = "other"
    found = list(check_same_settings(ResultSet(write(runs, tmp_path))))
    for line, complaint in zip(lines, found, strict=True):
        words = (
            f"result_3.txt: line {runs[3].index(line) + 1}: "
            f"{line['key']} is 'other', in result_0.txt "
        )
        assert (complaint.outcome, complaint.text[: len(words)]) == (Outcome.ERROR, words)


def test_a_missing_run_of_a_series_is_reported(tree_root: Path, tmp_path: Path) -> None:
    runs = committed(tree_root / OWN_LOGS)
    del runs[4]
    expect(
        report(runs, tmp_path),
        "series",
        Outcome.WARN,
        "result_4.txt: line ",
        "EXPERIMENT is 5, the one before is 3: a run was left out",
    )


def test_paths_seeds_and_experiments_may_differ(tree_root: Path, tmp_path: Path) -> None:
    runs = committed(tree_root / OWN_LOGS)
    each(
        configure("LOGDIR", "/elsewhere"), configure("EVALDIR", "/job17/eval"), configure("SEED", 5)
    )(runs)
    assert "same settings" not in report(runs, tmp_path)


def test_the_first_log_is_named_when_it_differs(tree_root: Path, tmp_path: Path) -> None:
    runs = committed(tree_root / OWN_LOGS)
    put("ranks", 2, which=0)(runs)
    put("python", None, which=2)(runs)
    runs[5].remove(nth(runs[5], "commit"))
    _, said = report(runs, tmp_path)["same settings"]
    assert "result_0.txt: line 27: ranks is 2, in result_1.txt 1" in said
    assert "result_2.txt: line 22: python is None, in result_0.txt '3.11.7'" in said
    assert "result_5.txt: commit is None, in result_0.txt '" in said
    assert said.count(".txt: ") == 3


@pytest.mark.parametrize("ours", [True, False])
def test_the_end_of_another_run_is_found(ours: bool, tree_root: Path, tmp_path: Path) -> None:
    runs = committed(tree_root / "results" / "cpu_demo" / "bert") if ours else simulated(5)
    runs[3][:] = [line for line in runs[3] if line is not nth(runs[3], "eval_accuracy", 1)]
    for index in (-1, -2, -3):
        copied = nth(runs[1], "eval_accuracy", index)["value"]
        nth(runs[3], "eval_accuracy", index)["value"] = copied
    expect(
        report(runs, tmp_path),
        "copies",
        Outcome.ERROR,
        "result_3.txt: line ",
        ": 3 accuracies, up to line ",
        ", are those of result_1.txt",
    )


def test_copies_between_systems_name_both(tmp_path: Path) -> None:
    runs = simulated(5)
    others = simulated(6)
    folders = [tmp_path / name / "bert" for name in ("one", "other")]
    for folder in folders:
        folder.mkdir(parents=True)
    assert not list(check_copies_between([write(runs, folders[0]), write(others, folders[1])]))
    others[4] = copy.deepcopy(runs[2])
    (complaint,) = check_copies_between([write(runs, folders[0]), write(others, folders[1])])
    assert complaint.outcome is Outcome.ERROR
    assert re.search(
        r"^other/bert/result_4\.txt: line \d+: .* one/bert/result_2\.txt from line \d+",
        complaint.text,
    )


def test_unpacked_runs_share_their_counts(tmp_path: Path) -> None:
    runs = simulated(6)
    for run in runs:
        counts = iter(range(150_528, 10**7, 150_528))
        for line in run:
            if line["key"] == "eval_start":
                count = next(counts)
            if "epoch_num" in line["metadata"]:
                line["metadata"]["epoch_num"] = count if line["key"] != "epoch_start" else 0
            if line["key"] == "train_samples":
                line["value"] = count
    assert "copies" not in report(runs, tmp_path)


@pytest.mark.parametrize("noise", [0, 2, 5])
def test_steady_intervals_of_thousands_of_accelerators_are_no_copies(
    noise: int, tmp_path: Path
) -> None:
    runs = simulated(8)
    chance = random.Random(noise)
    for run in runs:
        now = nth(run, "run_start")["time_ms"]
        for line in run[run.index(nth(run, "run_start")) :]:
            now += 350 + chance.randint(-noise, noise) if line["key"] == "eval_start" else 1
            line["time_ms"] = now
    assert "copies" not in report(runs, tmp_path)
