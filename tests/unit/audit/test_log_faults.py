"""Faults of whole logs and sets, and what is asked of this code's logs and of other programs'."""

from pathlib import Path

import pytest

from audit import edit, expect, report
from edited_logs import report as report_of
from edited_logs import simulated
from log_edits import Edit, Line, Run, each, keep, nth, put, stamp
from logger_logs import write_log
from mlaudit.advice import advice_of
from mlaudit.findings import Outcome
from mlaudit.logs import read_log
from mlaudit.own_checks import CHECKS, run_checks
from mlaudit.result_set import ResultSet
from mlbert.host.system_description import describe_system

SEEDS = [put("seed", 1 + n, which=n) for n in range(10)]


def sort_by_time(runs: list[Run]) -> None:
    runs.sort(key=lambda run: run[-1]["time_ms"] - nth(run, "run_start")["time_ms"])


def evenly(runs: list[Run]) -> None:
    for number, event in enumerate(line for line in runs[3] if line["key"].startswith("eval_a")):
        event["time_ms"] = nth(runs[3], "run_start")["time_ms"] + 60_000 * (number + 1)


def add(key: str, value: object, count: int = 1) -> Edit:
    """Return an edit that logs a key in a run, with a metadata entry that counts the lines."""

    def edit(runs: list[Run]) -> None:
        seed = nth(runs[3], "seed")
        runs[3][3:3] = [
            {**seed, "key": key, "value": value, "metadata": {"tensor": n}} for n in range(count)
        ]

    return edit


def is_no_bound(line: Line) -> bool:
    return not line["key"].startswith("eval_st")


@pytest.mark.parametrize(
    ("change", "check", "outcome", "words"),
    [
        (
            add("weights_initialization", None, 206),
            "rules",
            Outcome.ERROR,
            "names 206 tensors, not 398",
        ),
        (each(*SEEDS), "seeds", Outcome.WARN, "the seeds 1 to 10 are evenly spaced"),
        (sort_by_time, "series", Outcome.WARN, "sorted by time"),
        (add("experiments", 20), "series", Outcome.WARN, "the series has 20 runs, but 10 are here"),
        (
            keep(is_no_bound),
            "order of events",
            Outcome.WARN,
            "has no eval_start, as the other logs have",
        ),
        (
            stamp(lambda ms: ms // 1000 * 1000),
            "clock",
            Outcome.WARN,
            "result_3.txt: every time_ms is a whole",
        ),
        (evenly, "clock", Outcome.WARN, "evaluations are 60000 ms apart, to the millisecond"),
    ],
)
def test_a_fault_of_whole_logs_is_reported(
    change: Edit, check, outcome, words: str, tmp_path: Path
) -> None:
    change(runs := simulated(1))
    expect(report_of(runs, tmp_path), check, outcome, words)


@pytest.fixture
def three_logs(tmp_path: Path) -> list[Path]:
    return [write_log(tmp_path / f"result_{index}.txt", seed=index) for index in range(3)]


@pytest.fixture(scope="module")
def system() -> dict[str, str]:
    return describe_system("SomeOrg", "closed")


def test_good_logs_pass_and_list_what_was_checked(
    three_logs: list[Path], tree_root: Path, system
) -> None:
    results = ResultSet([read_log(path) for path in three_logs], system, tree=tree_root)
    program, *others = run_checks(results, "here")
    assert [row.check for row in (program, *others)] == [f"own: {name}" for name in CHECKS]
    note = "another program wrote the logs, so they are judged by the rules only"
    assert (program.outcome, program.words) == (Outcome.NOTE, note)
    assert [
        row for row in others if row.outcome is not Outcome.PASS or not row.words.endswith(".")
    ] == []


def test_a_resumed_run_is_no_result(three_logs: list[Path], tree_root: Path, system) -> None:
    edit(three_logs[1], "cache_clear", '"cache_clear"', '"resumed_from_step"')
    for tree, outcome in ((None, Outcome.WARN), (tree_root, Outcome.ERROR)):
        found = report(three_logs, tree, system=system if tree else None)
        expect(found, "time stamps", outcome, "result_1.txt: line 1: resumed from a checkpoint")


def test_another_programs_logs_are_judged_by_the_rules_only(
    three_logs: list[Path], tree_root: Path, system
) -> None:
    for path in three_logs:
        edit(path, "opt_lamb_beta_1", r"0\.9", '"0.9"')
        edit(path, "seed", r"(.*\n)", r"\1\1")
        edit(path, "opt_epsilon", '"time_ms": 175', '"time_ms": 174')
        edit(path, "cache_clear", r'"file": "[^"]*"', '"file": "/elsewhere/run.py"')
    found = report(three_logs, tree_root, system=system | {"submitter": "SOMEORG"})
    assert {name: outcome for name, (outcome, _) in found.items()} == {
        "program": Outcome.NOTE,
        "plain numbers": Outcome.WARN,
        "time stamps": Outcome.NOTE,
        "seeds": Outcome.ERROR,  # the same line and number twice, which package_checker refuses too
    }
    for path in three_logs[1:]:  # they name a recipe, as only this code's do
        edit(path, "cache_clear", '"cache_clear"', '"recipe"')
    words = "result_0.txt: another program wrote it, this code the other logs"
    rule = " [rules: ten runs of one system, code and set of hyper-parameters]"
    assert report(three_logs)["program"] == (Outcome.ERROR, words + rule)


def test_the_division_that_the_user_names_wins(
    three_logs: list[Path], tree_root: Path, system
) -> None:
    found = report(three_logs, tree_root, "open", system)
    expect(found, "division", Outcome.ERROR, "the system description says 'closed'")
    assert "division" not in report(three_logs, division="closed")


def test_a_finding_has_its_lines_an_explanation_and_what_settles_it(three_logs: list[Path]) -> None:
    edit(three_logs[1], "run_stop", "success", "aborted")
    results = ResultSet([read_log(path) for path in three_logs])
    (row,) = [row for row in run_checks(results, "here") if row.check == "own: status"]
    (complaint,) = row.as_json()["complaints"]
    (line,) = complaint["lines"]
    assert line["file"] == "result_1.txt"
    assert '"aborted"' in line["text"]
    assert complaint["honest_explanation"] == "the run did not converge"
    assert complaint["would_settle_it"] == "the accuracies of the run up to its end"


def test_every_check_has_advice() -> None:
    without = {name for name in CHECKS if not advice_of(f"own: {name}").honest}
    # The copies carry their own; these three report only this code's logs or nothing wrong.
    assert without == {"program", "copies", "configuration", "event types"}
