"""Evaluations and accuracies: each fault of one log in ten is found, and named with its file and line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edited_logs import (
    OWN_LOGS,
    Edit,
    Run,
    committed,
    configure,
    drop,
    each,
    expect_fault_of_another_program,
    mark,
    nth,
    put,
    repeat,
    report,
    simulated,
)
from mlbert.mlperf.findings import Outcome

ERROR, WARN = Outcome.ERROR, Outcome.WARN


def at(samples: float, index: int) -> Edit:
    """One evaluation at other samples."""
    keys = ("eval_start", "eval_stop", "eval_accuracy")
    return each(*(mark(key, "epoch_num", samples, index) for key in keys))


def ends(samples: float) -> Edit:
    """The run ends at other samples."""
    return each(at(samples, -1), mark("epoch_stop", "epoch_num", samples), put("train_samples", samples))


def without(index: int) -> Edit:
    """One evaluation left out."""
    return each(*(drop(key, index) for key in ("eval_start", "eval_stop", "eval_accuracy")))


def only(count: int) -> Edit:
    """Only the first evaluations."""

    def edit(runs: list[Run]) -> None:
        seen = 0
        for line in list(runs[3]):
            seen += line["key"] == "eval_start"
            if seen > count and line["key"].startswith("eval_") and line["key"] != "eval_samples":
                runs[3].remove(line)

    return edit


OURS = {
    "negative": (put("eval_accuracy", -0.1, 2), ERROR, "accuracies", "eval_accuracy is -0.1"),
    "above one": (put("eval_accuracy", 1.5, 2), ERROR, "accuracies", "eval_accuracy is 1.5"),
    "one": (put("eval_accuracy", 1, 2), ERROR, "accuracies", "eval_accuracy is 1"),
    "zero": (put("eval_accuracy", 0.0, 2), ERROR, "accuracies", "eval_accuracy is 0, not one token right"),
    "not a number": (put("eval_accuracy", float("nan"), 2), ERROR, "plain numbers", "nan is not a plain number"),
    "text": (put("eval_accuracy", "0.2", 2), ERROR, "plain numbers", "'0.2' is not a plain number"),
    "rounded": (put("eval_accuracy", 0.24, -1), ERROR, "accuracies", "0.24 is not a whole number of 18304 predictions"),
    "jump": (put("eval_accuracy", 11552 / 18304, -1), WARN, "accuracies", "accuracy jumps from"),
    "missed": (put("eval_accuracy", 4000 / 18304, -1), ERROR, "accuracies", "success, but the last accuracy 0.218531"),
    "went on": (put("eval_accuracy", 4400 / 18304, 3), ERROR, "accuracies", "or more, and the run went on"),
    "aborted at the target": (mark("run_stop", "status", "aborted"), ERROR, "accuracies", "aborted, but line"),
    "first evaluation": (put("eval_accuracy", 4400 / 18304, 0), ERROR, "accuracies", "success at the very first"),
    "other target": (configure("TARGET_MLM_ACCURACY", 0.5), ERROR, "accuracies", "is below 0.5"),
    "trivial target": (configure("TARGET_MLM_ACCURACY", 0.01), ERROR, "accuracies", "reached by guessing"),
    "trained more": (put("train_samples", 90_000), ERROR, "evaluations", "trained on 90000 samples, the last"),
    "trained less": (put("train_samples", 60_000), ERROR, "evaluations", "but trained on 60000"),
    "goes back": (at(19_000, 2), ERROR, "evaluations", "not in the order of samples: 19000 after"),
    "twice at once": (at(20_029, 2), ERROR, "evaluations", "due at 30000"),
    "twice": (repeat("eval_accuracy", 2), ERROR, "order of events", "eval_accuracy where eval_start should come"),
    "early": (at(25_000, 2), ERROR, "evaluations", "evaluated at 25000 samples, due at 30000"),
    "late": (at(33_000, 2), ERROR, "evaluations", "evaluated at 33000 samples, due at 30000"),
    "left out": (without(2), ERROR, "evaluations", "due at 30000"),
    "before training": (each(only(1), at(0, 0)), ERROR, "evaluations", "comes before any training"),
    "small evaluation": (put("eval_samples", 100), ERROR, "evaluations", "eval_samples is 100, NUM_EVAL_EXAMPLES 2000"),
    "beyond MAX_STEPS": (ends(600_000), ERROR, "evaluations", "more than MAX_STEPS allows"),
    "more steps than MAX_STEPS": (
        each(*(configure("MAX_STEPS", 1000, which) for which in range(10))),
        ERROR,
        "evaluations",
        "more than MAX_STEPS allows",
    ),
    "the same again": (
        each(*(put("eval_accuracy", 3600 / 18304, index) for index in (2, 3, 4))),
        ERROR,
        "accuracies",
        "is that of the evaluation before and of the one after it",
    ),
    "beyond the limit": (ends(410_000), ERROR, "evaluations", "more than MAX_SAMPLES_TERMINATION allows"),
}


@pytest.mark.parametrize("name", OURS)
def test_a_fault_is_named(name: str, tree_root: Path, tmp_path: Path) -> None:
    edit, wanted, check, words = OURS[name]
    runs = committed(tree_root / OWN_LOGS)
    edit(runs)
    outcome, said = report(runs, tmp_path)[check]
    assert outcome is wanted, said
    assert re.search(r"result_3\.txt: line \d+: .*" + re.escape(words), said), said


OTHERS = {
    "above one": (put("eval_accuracy", 1.2, 2), ERROR, "accuracies", "eval_accuracy is 1.2"),
    "zero": (put("eval_accuracy", 0.0, 2), ERROR, "accuracies", "eval_accuracy is 0"),
    "missed": (put("eval_accuracy", 0.7199, -1), ERROR, "accuracies", "success, but the last accuracy 0.7199 is below"),
    "hit, then below": (
        each(put("eval_accuracy", 0.7201, 3), put("eval_accuracy", 0.7199, -1)),
        ERROR,
        "accuracies",
        "success, but the last accuracy 0.7199 is below",
    ),
    "the same again": (
        each(*(put("eval_accuracy", 0.61234, index) for index in (2, 3, 4))),
        WARN,
        "accuracies",
        "accuracy 0.61234 is that of the evaluation before",
    ),
    "went on": (put("eval_accuracy", 0.7201, 3), WARN, "accuracies", "or more, and the run went on"),
    "aborted at the target": (mark("run_stop", "status", "aborted"), WARN, "accuracies", "aborted, but line"),
    "jump": (put("eval_accuracy", 0.3, 8), WARN, "accuracies", "accuracy jumps from 0.3 to"),
    "trained more": (put("train_samples", 9_000_000), ERROR, "evaluations", "trained on 9000000 samples, the last"),
    "trained less": (put("train_samples", 1_000_000), ERROR, "evaluations", "but trained on 1000000"),
    "goes back": (at(100_000, 2), ERROR, "evaluations", "not in the order of samples: 100000 after"),
    "epoch of other samples": (mark("epoch_stop", "epoch_num", 5), ERROR, "evaluations", "epoch_stop has epoch_num 5"),
    "few samples": (put("eval_samples", 1000), ERROR, "evaluations", "eval_samples is 1000, the rules say 10000"),
    "left out": (without(2), ERROR, "evaluations", "evaluation 3 is at"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_fault_of_another_program_is_named(name: str, tmp_path: Path) -> None:
    expect_fault_of_another_program(OTHERS[name], tmp_path)


def test_success_without_a_known_target_at_the_first_evaluation(tmp_path: Path) -> None:
    runs = simulated(3)
    for run in runs:
        nth(run, "submission_division")["value"] = "open"
    only(1)(runs)
    put("train_samples", nth(runs[3], "eval_accuracy")["metadata"]["epoch_num"])(runs)
    outcome, said = report(runs, tmp_path)["accuracies"]
    assert outcome is WARN
    assert "success at the very first evaluation; the target is not known" in said


def test_epoch_numbers_that_count_no_samples_are_a_warning(tmp_path: Path) -> None:
    runs = simulated(4)
    for run in runs:
        nth(run, "submission_division")["value"] = "open"
        for line in run:
            if "epoch_num" in line["metadata"]:
                line["metadata"]["epoch_num"] = 1
    said = report(runs, tmp_path)
    assert said["evaluations"][0] is WARN
    assert "every evaluation has epoch_num 1" in said["evaluations"][1]
    assert not [check for check, (outcome, _) in said.items() if outcome is ERROR]


def test_an_aborted_run_may_end_anywhere(tree_root: Path, tmp_path: Path) -> None:
    runs = committed(tree_root / OWN_LOGS)
    edits = [drop(key) for key in ("block_stop", "epoch_stop", "train_samples", "eval_samples")]
    each(only(4), *edits, mark("run_stop", "status", "aborted"), drop("eval_accuracy", 3))(runs)
    said = report(runs, tmp_path)
    assert said["status"][0] is WARN
    assert set(said) - {"status", "speed"} == {"same settings"}  # which misses eval_samples
