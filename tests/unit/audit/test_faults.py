"""Each fault of one log in ten is found, and named with its file and line: times, order,
evaluations, settings, copies.

`OURS` are faults of this code's logs, `OTHERS` of another program's, of which less is certain.
"""

import re
from pathlib import Path

import pytest

from edited_logs import OWN_LOGS, committed, report, simulated
from fault_edits import (
    at,
    at_once,
    before_training,
    copied,
    copied_accuracies,
    copied_part,
    ends,
    four_digits,
    late_start,
    other_data,
    other_lines,
    run_side_by_side,
    same_again,
    timed_as,
    without,
)
from log_edits import (
    Edit,
    Run,
    configure,
    cut_evaluations,
    drop,
    each,
    insert,
    keep,
    mark,
    move,
    put,
    repeat,
    shift,
    squeezed,
    stamp,
)
from mlaudit.findings import Outcome

ERROR = Outcome.ERROR
WARN = Outcome.WARN
NOTE = Outcome.NOTE
# By check and outcome: edits, and words of the message.
Faults = dict[tuple[str, Outcome], list[tuple[Edit, str]]]
EVALUATION = ("eval_start", "eval_stop", "eval_accuracy")
PACKAGES = {"mlbert": "0.1.0", "torch": "2.12.0"}
STARTS_AT = {
    which: shift("submission_benchmark", -10_000_000 * which, which=which) for which in range(1, 10)
}


OURS: Faults = {
    ("clock", ERROR): [
        (stamp(lambda ms: ms / 1000), "looks like seconds, not milliseconds"),
        (stamp(lambda ms: ms * 10**6), "looks like nanoseconds"),
        (stamp(lambda ms: -ms), "is negative"),
        (stamp(str, "eval_stop"), "is not a plain number"),
        (stamp(lambda ms: True, "run_stop"), "True is not a plain number"),
        (stamp(lambda ms: ms + 0.5, "run_stop"), "is not a whole number of milliseconds"),
        (stamp(lambda ms: ms + 10**12), "is in the future"),
        (stamp(lambda ms: ms - 10**12), "is before 2018"),
        (shift("run_start", 600_000), "run_start comes 600 s after init_stop"),
    ],
    ("clock", WARN): [(shift("run_start", 20_000), "run_start comes 20 s after init_stop")],
    ("lines", ERROR): [(stamp(lambda ms: float("nan"), "run_stop"), "time_ms is nan")],
    ("runs apart", ERROR): [(run_side_by_side, "before the run_stop of result_7.txt")],
    ("speed", ERROR): [
        (shift("eval_start", -9_000, 3), "in other runs at most"),
        (shift("eval_start", -9_000, 0), "since the start"),
        (squeezed(1 / 3), "in other runs at most"),
        (at_once, "in 0.321 s since the start"),
        (shift("eval_accuracy", 240_000, 3), "251.8 s since the evaluation before, usually"),
        (late_start(4_500), "times the usual rate: trained before run_start?"),
    ],
    ("speed", WARN): [
        (shift("eval_start", -4_500, 3), "in other runs at most"),
        (shift("eval_start", 55_000, 3), "since the evaluation before, usually"),
        (shift("eval_start", 240_000), "since the start, usually"),
        (late_start(8_000), "times the usual rate: trained before run_start?"),
    ],
    ("order of events", ERROR): [
        (stamp(lambda ms: ms - 60_000, "epoch_start"), "epoch_start is earlier than run_start"),
        (repeat("run_stop", after=5), "run_stop comes again, first in line"),
        (repeat("init_stop"), "init_stop comes again"),
        (move("init_stop", "epoch_start"), "init_stop is later than run_start"),
        (move("eval_accuracy", "run_stop", 2), "eval_accuracy is later than run_stop"),
        (move("eval_accuracy", "init_start"), "eval_accuracy is earlier than run_start"),
        (move("train_samples", "run_stop"), "train_samples comes after run_stop"),
        (drop("block_stop"), "block_start without block_stop"),
        (drop("epoch_start"), "epoch_stop without epoch_start"),
        (drop("eval_start", 2), "eval_stop where eval_start should come"),
        (drop("eval_stop", 2), "eval_accuracy where eval_stop should come"),
        (repeat("eval_accuracy", 2), "eval_accuracy where eval_start should come"),
        (mark("eval_stop", "epoch_num", 31_000, 2), "eval_stop at 31000 samples, its eval_start"),
        (mark("epoch_stop", "epoch_num", 5), "epoch_stop has epoch_num 5, train_samples is"),
        (mark("block_stop", "first_epoch_num", 2), "block_stop of block 2, started was 1"),
        (drop("eval_accuracy", -1), "the last eval_stop has no eval_accuracy"),
        (mark("epoch_start", "epoch_num", 5000), "epoch_start has epoch_num 5000, not 0"),
    ],
    ("evaluation time", ERROR): [
        (cut_evaluations(0), "no evaluation took more than 1 ms"),
        (cut_evaluations(50), "an evaluation took 50 ms, usually"),
    ],
    ("time stamps", ERROR): [
        (shift("eval_stop", -60_000, 2), "time goes back at eval_stop"),
        (stamp(lambda ms: ms - 10**7, "run_stop"), "run_stop is not after"),
    ],
    ("time stamps", WARN): [
        (insert("config_file", "recipe", key="resumed_from_step"), "resumed from a checkpoint")
    ],
    ("single lines", ERROR): [(repeat("opt_base_learning_rate"), "opt_base_learning_rate")],
    ("status", WARN): [(mark("run_stop", "status", "done"), "run_stop status is 'done'")],
    ("accuracies", ERROR): [
        (put("eval_accuracy", -0.1, 2), "eval_accuracy is -0.1"),
        (put("eval_accuracy", 1, 2), "eval_accuracy is 1"),
        (put("eval_accuracy", 0.0, 2), "eval_accuracy is 0, not one token right"),
        (put("eval_accuracy", 0.24, -1), "0.24 is not a whole number of 18304 predictions"),
        (put("eval_accuracy", 4000 / 18304, -1), "success, but the last accuracy 0.218531"),
        (put("eval_accuracy", 4400 / 18304, 3), "or more, and the run went on"),
        (mark("run_stop", "status", "aborted"), "aborted, but line"),
        (put("eval_accuracy", 4400 / 18304, 0), "success at the very first"),
        (configure("TARGET_MLM_ACCURACY", 0.5), "is below 0.5"),
        (configure("TARGET_MLM_ACCURACY", 0.01), "reached by guessing"),
        (same_again(3600 / 18304), "is that of the evaluation before and of the one after it"),
    ],
    ("accuracies", WARN): [(put("eval_accuracy", 11552 / 18304, -1), "accuracy jumps from")],
    ("plain numbers", ERROR): [
        (put("eval_accuracy", float("nan"), 2), "nan is not a plain number"),
        (put("eval_accuracy", "0.2", 2), "'0.2' is not a plain number"),
    ],
    ("evaluations", ERROR): [
        (put("train_samples", 90_000), "trained on 90000 samples, the last"),
        (put("train_samples", 60_000), "but trained on 60000"),
        (at(19_000, 2), "not in the order of samples: 19000 after"),
        (at(20_029, 2), "due at 30000"),
        (at(25_000, 2), "evaluated at 25000 samples, due at 30000"),
        (at(33_000, 2), "evaluated at 33000 samples, due at 30000"),
        (without(2), "due at 30000"),
        (before_training, "comes before any training"),
        (ends(600_000), "more than MAX_STEPS allows"),
        (ends(410_000), "more than MAX_SAMPLES_TERMINATION allows"),
    ],
    ("same settings", ERROR): [
        (put("tree_modified", True), "tree_modified is True"),
        (put("packages", PACKAGES), "packages torch is '2.12.0'"),
        (put("ops", '{"attention": "plain"}'), "ops dropout_add_layer_norm is"),
        (put("config_parents", {}), "config_parents benchmarks/"),
        (configure("MAX_GRAD_NORM", 2.0), "configuration MAX_GRAD_NORM is 2.0"),
        (configure("EVALDIR", "/data/other"), "configuration EVALDIR is 'other'"),
    ],
    ("seeds", ERROR): [
        (each(*(put("seed", 7, which=n) for n in (1, 3))), "is in result_1.txt, line 8, too")
    ],
    ("series", ERROR): [(configure("EXPERIMENT", 1), "EXPERIMENT is 1, as in result_1.txt")],
    ("copies", ERROR): [
        (copied(), "accuracies, up to line"),
        (copied(scale=1.07), "are those of result_1.txt"),
        (copied_accuracies(first=4), "3 accuracies, up to line"),
        (copied_accuracies(jitter=1e-5), "accuracies, to 5 digits, up to line"),
        (
            copied_part(lambda line, model, n: line.update(metadata=model["metadata"]), first=3),
            "4 sample counts",
        ),
        (timed_as(1.0), "intervals between evaluations, to 1 ms,"),
        (timed_as(1.1), "intervals between evaluations, times one factor,"),
    ],
}
OTHERS: Faults = {
    ("clock", ERROR): [(shift("run_start", 2_000_000), "run_start comes 2000 s after")],
    ("clock", WARN): [
        (shift("run_start", 300_000), "run_start comes 300 s after"),
        (stamp(lambda ms: ms - 3 * 365 * 86_400_000), "1095 days from most"),
    ],
    ("runs apart", WARN): [(run_side_by_side, "several machines side by side?")],
    ("runs apart", NOTE): [(each(*STARTS_AT.values()), "several machines side by side?")],
    ("speed", ERROR): [
        (shift("eval_accuracy", 20_000_000, 3), "s since the evaluation before, usually"),
        (late_start(500_000), "times the usual rate: trained before run_start?"),
        (shift("eval_start", -1_000_000, 3), "in other runs at most"),
    ],
    ("speed", WARN): [
        (shift("eval_start", 4_000_000, 3), "since the evaluation before, usually"),
        (
            insert("eval_start", key="tracked_stats", value={"throughput": 50}),
            "tracked_stats is 50 samples a second",
        ),
        (shift("eval_start", -750_000, 3), "in other runs at most"),
    ],
    ("order of events", ERROR): [
        (repeat("run_stop", after=600_000), "run_stop comes again"),
        (stamp(lambda ms: ms - 10_000, "run_stop"), "eval_accuracy is later than run_stop"),
        (stamp(lambda ms: ms + 60_000, "epoch_stop"), "epoch_stop is later than run_stop"),
        (mark("eval_start", "epoch_num", 31_000, 2), "at 31000 samples, its eval_accuracy at"),
        (drop("eval_start", 2), "eval_accuracy without eval_start"),
        (repeat("eval_start", 2), "eval_start comes again before"),
    ],
    ("order of events", WARN): [
        (repeat("init_stop", after=3), "init_stop comes again"),
        (each(drop("eval_start", 2), drop("eval_start", 1)), "eval_accuracy without eval_start"),
        (repeat("eval_accuracy", 2), "eval_accuracy comes again"),
        (put("eval_start", 5), "eval_start is 5, its epoch_num"),
        (each(*(mark("eval_start", "epoch_num", n, n) for n in range(16))), "every eval_start has"),
        (
            each(*(insert("eval_start", index=n, key="block_start") for n in (0, 3))),
            "within the block that starts",
        ),
    ],
    ("order of events", NOTE): [
        (
            keep(lambda line: line["key"] != "eval_stop"),
            "eval_accuracy without eval_stop in the whole log",
        )
    ],
    ("evaluation time", WARN): [(cut_evaluations(0), "no evaluation took more than 1 ms")],
    ("evaluation time", ERROR): [(cut_evaluations(20), "an evaluation took 20 ms")],
    ("accuracies", ERROR): [
        (mark("eval_accuracy", "masked_lm_accuracy", 0.715), "its masked_lm_accuracy 0.715"),
        (put("eval_accuracy", 0.05, -1), "success at accuracy 0.05, which guessing reaches"),
        (
            each(put("eval_accuracy", 0.7201, 3), put("eval_accuracy", 0.7199, -1)),
            "but the last accuracy 0.7199 is",
        ),
    ],
    ("accuracies", WARN): [
        (same_again(0.61234), "accuracy 0.61234 is that of the evaluation before"),
        (put("eval_accuracy", 0.7201, 3), "or more, and the run went on"),
        (mark("run_stop", "status", "aborted"), "aborted, but line"),
        (put("eval_accuracy", 0.7), "the checkpoint has 0.34085"),
        (put("eval_accuracy", 0.8, -1), "the last accuracy is 0.8"),
        (four_digits, "no accuracy has more than 4 digits"),
    ],
    ("evaluations", ERROR): [
        (put("train_samples", 9_000_000), "trained on 9000000 samples, the last"),
        (put("train_samples", 1_000_000), "but trained on 1000000"),
        (mark("epoch_stop", "epoch_num", 5), "epoch_stop has epoch_num 5"),
        (put("eval_samples", 1000), "eval_samples is 1000, the rules say 10000"),
        (without(2), "evaluation 3 is at"),
    ],
    ("values", WARN): [
        (mark(key, "step_num", 7), "step_num 7 of")
        for key in ("eval_start", "eval_stop", "eval_accuracy", "epoch_stop")
    ],
    ("seeds", WARN): [(each(repeat("seed"), put("seed", 5, 1)), "seed 5, but")],
    ("same settings", WARN): [
        (
            other_lines,
            "submission_benchmark is logged at /code/train.py:27, "
            "in the other logs at /code/train.py:20",
        ),
        (other_data, "data_file is in '/data/easy', in the other logs in '/data/phase2'"),
    ],
    ("copies", ERROR): [
        (copied(), "15 accuracies, up to line"),
        (copied(offset=0.0001), "accuracies, but for one number added to all,"),
        (each(copied_accuracies(), shift("run_start", 5)), "accuracies"),
        (timed_as(1.0), "intervals between evaluations, to 1 ms,"),
        (timed_as(0.9), "intervals between evaluations, times one factor,"),
    ],
}


def cases(faults: Faults) -> list[object]:
    groups = [(*group, *row) for group, rows in faults.items() for row in rows]
    return [pytest.param(*group, id=f"{group[0]}: {group[-1]}") for group in groups]


def expect_fault(
    check: str, expected: Outcome, edit: Edit, words: str, runs: list[Run], folder: Path
) -> None:
    edit(runs)
    outcome, message = report(runs, folder)[check]
    assert outcome is expected, message
    assert re.search(r"result_3\.txt: line \d+: .*" + re.escape(words), message), message


@pytest.mark.parametrize(("check", "outcome", "edit", "words"), cases(OURS))
def test_a_fault_is_named(check, outcome, edit, words, tree_root: Path, tmp_path: Path) -> None:
    expect_fault(check, outcome, edit, words, committed(tree_root / OWN_LOGS), tmp_path)


@pytest.mark.parametrize(("check", "outcome", "edit", "words"), cases(OTHERS))
def test_a_fault_of_another_program_is_named(check, outcome, edit, words, tmp_path: Path) -> None:
    expect_fault(check, outcome, edit, words, simulated(1), tmp_path)
