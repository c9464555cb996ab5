"""Our own checks: each finds its mutation of good logs, and only its check complains."""

from collections.abc import Callable
from pathlib import Path

import pytest

from audit import edit, expect
from mlbert.mlperf.check import CHECKS, TREE_CHECKS, run_checks
from mlbert.mlperf.describe import FIELDS
from mlbert.mlperf.findings import Outcome
from mlbert.mlperf.logs import read_log
from mlbert.mlperf.result_set import ResultSet

SYSTEM = dict.fromkeys(FIELDS, "N/A") | {"division": "closed", "submitter": "SomeOrg"}
SYSTEM |= {"status": "Research, Development, or Internal (RDI)"}
SYSTEM |= {"number_of_nodes": "1", "host_processors_per_node": "2", "accelerators_per_node": "0"}


@pytest.fixture
def three_logs(tmp_path: Path, new_log: Callable[..., Path]) -> list[Path]:
    return [new_log(tmp_path / f"result_{index}.txt", seed=index) for index in range(3)]


def _outcomes(paths: list[Path], **about: object) -> dict[str, tuple[Outcome, str]]:
    findings = run_checks(ResultSet([read_log(path) for path in paths], **about), "here")
    return {finding.check.removeprefix("own: "): (finding.outcome, finding.words) for finding in findings}


def _complaining(paths: list[Path], **about: object) -> dict[str, tuple[Outcome, str]]:
    return {name: found for name, found in _outcomes(paths, **about).items() if found[0] is not Outcome.PASS}


def _claim(paths: list[Path]) -> None:
    """Make logs this code's own: they name a recipe."""
    for path in paths:
        edit(path, "cache_clear", '"cache_clear"', '"recipe"')


def test_good_logs_pass_and_list_what_was_checked(three_logs: list[Path], tree_root: Path) -> None:
    outcomes = _outcomes(three_logs, system=SYSTEM, tree=tree_root)
    assert list(outcomes) == [*CHECKS, *TREE_CHECKS]
    note = "another program wrote the logs, so they are judged by the rules only"
    assert outcomes.pop("program") == (Outcome.NOTE, note)
    for name, (outcome, words) in outcomes.items():
        assert outcome is Outcome.PASS, (name, words)
        assert words.endswith(".")


@pytest.mark.parametrize(("system", "outcome"), [(None, Outcome.WARN), (SYSTEM, Outcome.ERROR)])
def test_a_resumed_run_is_no_result(three_logs, tree_root, system, outcome) -> None:
    edit(three_logs[1], "cache_clear", '"cache_clear"', '"resumed_from_step"')
    found = _complaining(three_logs, system=system, tree=tree_root if system else None)
    expect(found, "time stamps", outcome, "result_1.txt: line 1: resumed from a checkpoint")


# (key of the line, pattern, replacement, name of the check, what it must say)
MUTATIONS = {
    "truncated line": ("eval_samples", r"\}\}$", "", "lines", "line "),
    "no metadata": ("train_samples", r', "metadata".*\}$', "}", "lines", "train_samples has no metadata"),
    "misread text": ("init_stop", r'"lineno"', '"eval_accuracy": 1, "lineno"', "lines", "contains the text"),
    "other division": ("submission_division", '"closed"', '"open"', "division", "says 'open', not 'closed'"),
    "aborted": ("run_stop", '"success"', '"aborted"', "status", "status is 'aborted'"),
    "no status": ("run_stop", '"status"', '"state"', "status", "status is None"),
    "two seeds": ("seed", "(.*\n)", r"\1\1", "seeds", "logs 2 seeds, not one"),
    "no seed": ("seed", ".*\n", "", "seeds", "logs 0 seeds, not one"),
    "fraction": ("eval_accuracy", r'"epoch_num": (\d+)', r'"epoch_num": \1.5', "plain numbers", "not a count"),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_mutation_is_found_and_named(mutation: tuple[str, ...], three_logs: list[Path]) -> None:
    key, pattern, replacement, check, words = mutation
    _claim(three_logs)
    edit(three_logs[1], key, pattern, replacement)
    expect(_complaining(three_logs, division="closed"), check, Outcome.ERROR, words, "result_1.txt")


def test_another_programs_logs_are_judged_by_the_rules_only(three_logs: list[Path], tree_root: Path) -> None:
    for path in three_logs:
        edit(path, "opt_lamb_beta_1", r"0\.9", '"0.9"')
        edit(path, "seed", r"(.*\n)", r"\1\1")
        edit(path, "opt_epsilon", '"time_ms": 175', '"time_ms": 174')
        edit(path, "cache_clear", r'"file": "[^"]*"', '"file": "/elsewhere/run.py"')
    found = _complaining(three_logs, system=SYSTEM | {"submitter": "SOMEORG"}, tree=tree_root)
    assert {name: outcome for name, (outcome, _) in found.items()} == {
        "program": Outcome.NOTE,
        "plain numbers": Outcome.WARN,
        "time stamps": Outcome.NOTE,
        "seeds": Outcome.ERROR,  # the same line and number twice, which package_checker refuses too
    }
    _claim(three_logs[1:])
    words = "result_0.txt: another program wrote it, this code the other logs"
    rule = " [rules: ten runs of one system, code and set of hyper-parameters]"
    assert _complaining(three_logs)["program"] == (Outcome.ERROR, words + rule)


def test_the_open_division_has_no_grid(three_logs: list[Path]) -> None:
    for path in three_logs:
        edit(path, "submission_division", '"closed"', '"open"')
        edit(path, "eval_accuracy", r'"epoch_num": (\d)', r'"epoch_num": 1\1')
        edit(path, "train_samples", r'"value": (\d)', r'"value": 1\1')
        edit(path, "eval_samples", "10000", "100")
    assert "evaluations" not in _complaining(three_logs) or "grid" not in _complaining(three_logs)["evaluations"][1]


def test_the_division_that_the_user_names_wins(three_logs: list[Path], tree_root: Path) -> None:
    found = _complaining(three_logs, system=SYSTEM, tree=tree_root, division="open")
    expect(found, "division", Outcome.ERROR, "the system description says 'closed'")
    assert "division" not in _complaining(three_logs, division="closed")
