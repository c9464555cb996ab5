"""What honest logs of other programs have is no error; the same rule still finds the fault."""

from pathlib import Path

import pytest

from audit import expect
from edited_logs import report, simulated
from log_edits import Edit, Run, each, insert, put, repeat, shift, stamp
from mlaudit.checks.system_file import check_description, check_submitter
from mlaudit.findings import Outcome
from mlaudit.logs import Log
from mlaudit.result_set import ResultSet

ERROR = Outcome.ERROR
EVERY = range(10)
STEPS = "opt_learning_rate_training_steps"


def in_all(make) -> Edit:
    """Return an edit of all runs: ``make(which=...)`` of each."""
    return each(*(make(which) for which in EVERY))


def clock_stops_at_the_checkpoint(which: int) -> Edit:
    """Stamp the evaluations two minutes later, as another process logs them."""

    def edit(runs: list[Run]) -> None:
        for line in runs[which]:
            if line["key"].startswith("eval_st") or line["key"] == "eval_accuracy":
                line["time_ms"] += 120_000

    return edit


def accuracies_in_a_burst(which: int) -> Edit:
    """Stamp all accuracies of a run with the time of its last one, as a program that collects
    them does.
    """

    def edit(runs: list[Run]) -> None:
        lines = [line for line in runs[which] if line["key"].startswith("eval_")]
        for line in lines:
            line["time_ms"] = lines[-1]["time_ms"]

    return edit


@pytest.mark.parametrize(
    ("honest", "wrong", "check", "words"),
    [
        (
            in_all(accuracies_in_a_burst),
            accuracies_in_a_burst(3),
            "speed",
            "samples in 0 s",
        ),
        (
            in_all(lambda which: stamp(lambda ms: 0, "submission_org", which=which)),
            stamp(lambda ms: 0, "eval_stop", 2),
            "clock",
            "is before 2018",
        ),
        (
            in_all(clock_stops_at_the_checkpoint),
            clock_stops_at_the_checkpoint(3),
            "order of events",
            "eval_accuracy is later than run_stop",
        ),
        (
            in_all(lambda which: insert("seed", key=STEPS, value=0, which=which)),
            in_all(lambda which: insert("seed", key=STEPS, value=-5, which=which)),
            "values",
            "opt_learning_rate_training_steps is -5",
        ),
        (
            in_all(lambda which: put("seed", f"{1000 + which**2}", which=which)),
            put("seed", "twelve"),
            "plain numbers",
            "seed 'twelve' is not a plain number",
        ),
        (
            repeat("run_start", after=300),
            repeat("run_start", after=30_000),
            "order of events",
            "run_start comes again",
        ),
    ],
)
def test_an_honest_log_passes_and_a_wrong_one_does_not(
    honest: Edit, wrong: Edit, check: str, words: str, tmp_path: Path
) -> None:
    honest(runs := simulated(1))
    found = report(runs, tmp_path)
    assert {name: said for name, said in found.items() if said[0] is ERROR} == {}
    wrong(runs := simulated(1))
    expect(report(runs, tmp_path), check, ERROR, words)


def test_a_line_without_a_stamp_does_not_switch_the_other_checks_off(tmp_path: Path) -> None:
    runs = simulated(1)
    each(stamp(lambda ms: 0, "submission_org"), shift("eval_start", -1_000_000, 3), put("seed", 1))(
        runs
    )
    expect(report(runs, tmp_path), "speed", ERROR, "in other runs at most")


@pytest.mark.parametrize(
    ("field", "honest", "wrong"),
    [
        ("number_of_nodes", 1.0, 1.5),
        ("number_of_nodes", "2.0", "two"),
        ("host_processor_vcpu_count", "0", None),
        ("host_storage_capacity", "0 TB", None),
        ("number_of_nodes", "1", "0"),
    ],
)
def test_numbers_of_a_description(field: str, honest: object, wrong: object) -> None:
    def errors(value: object) -> list[str]:
        results = ResultSet([Log(Path("result_0.txt"), ())], {field: value})
        found = [*check_description(results), *check_submitter(results)]
        return [
            one.text
            for one in found
            if one.outcome is ERROR and f" {field} " in one.text and "blank" not in one.text
        ]

    assert errors(honest) == []
    if wrong is not None:
        assert errors(wrong) != []
