"""Same settings, seeds and copies: each fault of one log in ten is found, and named with its file and line."""

import copy
import random
import re
from pathlib import Path

import pytest

from edited_logs import (
    OWN_LOGS,
    Edit,
    Run,
    committed,
    configure,
    each,
    expect_fault,
    nth,
    put,
    report,
    shift,
    simulated,
    write,
)
from mlbert.mlperf.checks.duplicate_runs import check_copies_between
from mlbert.mlperf.findings import Outcome


def copied(scale: float = 1.0, offset: float = 0.0, first: int = 0, what: str = "all", jitter: float = 0.0) -> Edit:
    """Run 3 becomes run 1 under its own seed: from some evaluation on, its times scaled, its accuracies changed."""

    def edit(runs: list[Run]) -> None:
        model, own = copy.deepcopy(runs[1]), runs[3]
        begin, told_at = nth(own, "run_start")["time_ms"], nth(model, "run_start")["time_ms"]
        if what == "all":
            nth(model, "seed")["value"] = nth(own, "seed")["value"]
            for line in model:
                line["time_ms"] = round(begin + (line["time_ms"] - told_at) * scale)
                line["value"] = line["value"] + offset if line["key"] == "eval_accuracy" else line["value"]
            own[:] = model
            return
        theirs = [line for line in model if line["key"] == "eval_accuracy"][first:]
        mine = [line for line in own if line["key"] == "eval_accuracy"][first:]
        for number, (line, other) in enumerate(zip(mine, theirs, strict=False)):
            if what == "accuracies":
                line["value"] = other["value"] + (-1) ** number * jitter
            else:
                line["metadata"]["epoch_num"] = other["metadata"]["epoch_num"]

    return edit


def timed_as(scale: float) -> Edit:
    """Run 3 keeps its numbers but takes the times of run 1's evaluations."""

    def edit(runs: list[Run]) -> None:
        begin, other = nth(runs[3], "run_start")["time_ms"], nth(runs[1], "run_start")["time_ms"]
        for key in ("eval_start", "eval_stop", "eval_accuracy"):
            mine = [line for line in runs[3] if line["key"] == key]
            theirs = [line for line in runs[1] if line["key"] == key]
            for line, model in zip(mine, theirs, strict=False):
                line["time_ms"] = round(begin + (model["time_ms"] - other) * scale)

    return edit


def reseeded(runs: list[Run]) -> None:
    nth(runs[3], "seed")["value"] = nth(runs[1], "seed")["value"]


PACKAGES = {"mlbert": "0.1.0", "torch": "2.12.0"}
OURS = {
    "commit": (put("commit", "f" * 40), "same settings", "commit is 'fff"),
    "modified tree": (put("tree_modified", True), "same settings", "tree_modified is True"),
    "training data": (put("train_data", "synthetic"), "same settings", "train_data is 'synthetic'"),
    "evaluation data": (put("eval_data", "synthetic"), "same settings", "eval_data is 'synthetic'"),
    "precision": (put("precision", "torch.bfloat16"), "same settings", "precision is 'torch.bfloat16'"),
    "packages": (put("packages", PACKAGES), "same settings", "packages torch is '2.12.0'"),
    "python": (put("python", "3.12.1"), "same settings", "python is '3.12.1'"),
    "optimizer": (put("opt_name", "adamw"), "same settings", "opt_name is 'adamw'"),
    "ranks": (put("ranks", 8), "same settings", "ranks is 8"),
    "image": (put("image_digest", "sha256:1"), "same settings", "image_digest is"),
    "platform": (put("platform", "Linux-5"), "same settings", "platform is 'Linux-5'"),
    "ops": (put("ops", '{"attention": "plain"}'), "same settings", "ops dropout_add_layer_norm is"),
    "shape": (put("model_shape_sha256", "0"), "same settings", "model_shape_sha256 is '0'"),
    "recipe": (put("recipe", "single_lamb"), "same settings", "recipe is 'single_lamb'"),
    "config": (put("config_file_sha256", "0"), "same settings", "config_file_sha256 is '0'"),
    "sourced config": (put("config_parents", {}), "same settings", "config_parents benchmarks/"),
    "benchmark": (put("submission_benchmark", "resnet"), "same settings", "submission_benchmark is 'resnet'"),
    "organisation": (put("submission_org", "x"), "same settings", "submission_org is 'x'"),
    "availability": (put("submission_status", "onprem"), "same settings", "submission_status is 'onprem'"),
    "division": (put("submission_division", "closed"), "same settings", "submission_division is 'closed'"),
    "setting": (configure("MAX_GRAD_NORM", 2.0), "same settings", "configuration MAX_GRAD_NORM is 2.0"),
    "data folder": (configure("EVALDIR", "/data/other"), "same settings", "configuration EVALDIR is 'other'"),
    "rate": (put("opt_base_learning_rate", 0.01), "same settings", "opt_base_learning_rate is 0.01"),
    "seed": (reseeded, "seeds", "is in result_1.txt, line 8, too"),
    "experiment": (configure("EXPERIMENT", 1), "series", "EXPERIMENT is 1, as in result_1.txt"),
    "copy": (copied(), "copies", "accuracies, up to line"),
    "scaled copy": (copied(scale=1.07), "copies", "are those of result_1.txt"),
    "half a copy": (copied(what="accuracies", first=4), "copies", "3 accuracies, up to line"),
    "nearly a copy": (copied(what="accuracies", jitter=1e-5), "copies", "accuracies, to 5 digits, up to line"),
    "copied counts": (copied(what="samples", first=3), "copies", "4 sample counts"),
    "copied times": (timed_as(1.0), "copies", "intervals between evaluations, to 1 ms,"),
    "scaled times": (timed_as(1.1), "copies", "intervals between evaluations, times one factor,"),
}


@pytest.mark.parametrize("name", OURS)
def test_a_run_that_does_not_belong_is_named(name: str, tree_root: Path, tmp_path: Path) -> None:
    edit, check, words = OURS[name]
    expect_fault((edit, Outcome.ERROR, check, words), committed(tree_root / OWN_LOGS), tmp_path)


def test_a_missing_run_of_a_series_is_reported(tree_root: Path, tmp_path: Path) -> None:
    runs = committed(tree_root / OWN_LOGS)
    del runs[4]
    outcome, said = report(runs, tmp_path)["series"]
    assert outcome is Outcome.WARN
    assert re.search(r"result_4\.txt: line \d+: EXPERIMENT is 5, the one before is 3: a run was left out", said), said


def test_paths_seeds_and_experiments_may_differ(tree_root: Path, tmp_path: Path) -> None:
    runs = committed(tree_root / OWN_LOGS)
    each(configure("LOGDIR", "/elsewhere"), configure("EVALDIR", "/job17/eval"), configure("SEED", 5))(runs)
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
        nth(runs[3], "eval_accuracy", index)["value"] = nth(runs[1], "eval_accuracy", index)["value"]
    outcome, said = report(runs, tmp_path)["copies"]
    assert outcome is Outcome.ERROR
    assert re.search(r"result_3\.txt: line \d+: 3 accuracies, up to line \d+, are those of result_1\.txt", said), said


def test_copies_between_systems_name_both(tmp_path: Path) -> None:
    runs, others = simulated(5), simulated(6)
    folders = [tmp_path / name / "bert" for name in ("one", "other")]
    for folder in folders:
        folder.mkdir(parents=True)
    assert not list(check_copies_between([write(runs, folders[0]), write(others, folders[1])]))
    others[4] = copy.deepcopy(runs[2])
    (complaint,) = check_copies_between([write(runs, folders[0]), write(others, folders[1])])
    assert complaint.outcome is Outcome.ERROR
    assert re.search(r"^other/bert/result_4\.txt: line \d+: .* one/bert/result_2\.txt from line \d+", complaint.text)


def other_lines(runs: list[Run]) -> None:
    for line in runs[3]:
        line["metadata"]["lineno"] += 7


def other_data(runs: list[Run]) -> None:
    for which, run in enumerate(runs):
        name = "/data/easy/part_1" if which == 3 else f"/data/phase2/part_{which}"
        run.insert(run.index(nth(run, "eval_start")), nth(run, "epoch_start") | {"key": "data_file", "value": name})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (other_lines, "submission_benchmark is logged at /code/train.py:27, in the other logs at /code/train.py:20"),
        (other_data, "data_file is in '/data/easy', in the other logs in '/data/phase2'"),
    ],
)
def test_another_version_or_other_data_of_another_program(edit: Edit, words: str, tmp_path: Path) -> None:
    expect_fault((edit, Outcome.WARN, "same settings", words), simulated(5), tmp_path)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (copied(), "16 accuracies"),
        (copied(offset=0.0001), "accuracies, but for one number added to all,"),
        (copied(scale=1.5), "accuracies"),
        (each(copied(what="accuracies"), shift("run_start", 5)), "accuracies"),
        (timed_as(1.0), "intervals between evaluations, to 1 ms,"),
        (timed_as(0.9), "intervals between evaluations, times one factor,"),
    ],
)
def test_copies_of_other_programs_are_found(edit: Edit, words: str, tmp_path: Path) -> None:
    expect_fault((edit, Outcome.ERROR, "copies", words), simulated(5), tmp_path)


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
def test_steady_intervals_of_thousands_of_accelerators_are_no_copies(noise: int, tmp_path: Path) -> None:
    runs, chance = simulated(8), random.Random(noise)
    for run in runs:
        now = nth(run, "run_start")["time_ms"]
        for line in run[run.index(nth(run, "run_start")) :]:
            now += 350 + chance.randint(-noise, noise) if line["key"] == "eval_start" else 1
            line["time_ms"] = now
    assert "copies" not in report(runs, tmp_path)
