"""Faults of single lines and of whole results: each is reported, with the grade that an honest run allows."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from audit import edit, expect
from edited_logs import Edit, Run, committed, nth, stamp, write
from mlbert.mlperf.check import CHECKS, TREE_CHECKS, run_checks
from mlbert.mlperf.describe import FIELDS
from mlbert.mlperf.findings import Outcome
from mlbert.mlperf.logs import read_log
from mlbert.mlperf.metrics import check_metrics
from mlbert.mlperf.result_set import ResultSet


def _all(runs: list[Run], *keys: str) -> Run:
    return [event for events in runs for event in events if event["key"] in keys]


def _set(key: str, value: object) -> Edit:
    """Give the first line with a key another value in every log; insert the line if there is none."""

    def change(runs: list[Run]) -> None:
        for events in runs:
            found = [event for event in events if event["key"] == key]
            if not found:
                found = [{**events[2], "key": key}]
                events.insert(3, found[0])
            found[0]["value"] = value

    return change


def _set_metadata(key: str, name: str, value: Callable[[int], object]) -> Edit:
    def change(runs: list[Run]) -> None:
        for events in runs:
            for number, event in enumerate(_all([events], key)):
                event["metadata"][name] = value(number)

    return change


def _accuracies(new: Callable[[int, int, float], float]) -> Edit:
    def change(runs: list[Run]) -> None:
        for run, events in enumerate(runs):
            for number, event in enumerate(reversed(_all([events], "eval_accuracy"))):
                event["value"] = new(run, number, event["value"])

    return change


def _seeds(runs: list[Run]) -> None:
    for number, event in enumerate(_all(runs, "seed")):
        event["value"] = 1 + number


def _two_seeds(runs: list[Run]) -> None:
    seed = _all(runs[:1], "seed")[0]
    runs[0].insert(runs[0].index(seed) + 1, {**seed, "value": 5, "metadata": {**seed["metadata"], "lineno": 1}})


def _sort_by_time(runs: list[Run]) -> None:
    runs.sort(key=lambda events: events[-1]["time_ms"] - _all([events], "run_start")[0]["time_ms"])


def _after_the_end(runs: list[Run]) -> None:
    for event in _all(runs[:1], "epoch_stop", "train_samples"):
        runs[0].remove(event)
        runs[0].append(event | {"time_ms": runs[0][-1]["time_ms"] + 60_000})


def _blocks(runs: list[Run]) -> None:
    start, *others = _all(runs[:1], "epoch_start", "eval_start")
    for number, event in enumerate((start, others[3])):
        metadata = {**event["metadata"], "first_epoch_num": number}
        block = event | {"key": "block_start", "value": None, "metadata": metadata}
        runs[0].insert(runs[0].index(event), block)


def _evenly(runs: list[Run]) -> None:
    for number, event in enumerate(_all(runs[:1], "eval_start", "eval_stop", "eval_accuracy")):
        event["time_ms"] = _all(runs[:1], "run_start")[0]["time_ms"] + 60_000 * (number // 3 + 1)


def _no_starts(runs: list[Run]) -> None:
    runs[0][:] = [event for event in runs[0] if event["key"] not in ("eval_start", "eval_stop")]


def _layers(runs: list[Run]) -> None:
    for events in runs:
        line = {**events[2], "key": "weights_initialization"}
        events[3:3] = [line | {"metadata": {**line["metadata"], "tensor": f"tensor {n}"}} for n in range(206)]


DEMO = Path(__file__).resolve().parents[3] / "results/cpu_demo"  # the published runs of this code
RULES, ACCURACIES, CLOCK, ORDER = "rules", "accuracies", "clock", "order of events"
# name: (change of ten logs of another program, the check that reports it, how badly, what it says)
FAULTS: dict[str, tuple[Edit, str, Outcome, str]] = {
    "two accuracies on a line": (
        *(_set_metadata("eval_accuracy", "masked_lm_accuracy", lambda number: 0.715), ACCURACIES, Outcome.ERROR),
        "its masked_lm_accuracy 0.715",
    ),
    "begins at 0.70": (
        *(_accuracies(lambda run, number, value: 0.7 + value / 100 + run / 1e4 if number else value), ACCURACIES),
        *(Outcome.WARN, "the checkpoint has 0.34085"),
    ),
    "ends at 0.80": (
        *(_accuracies(lambda run, number, value: value if number else 0.8 + run / 999), ACCURACIES, Outcome.WARN),
        "the last accuracy is 0.8",
    ),
    "four digits": (_accuracies(lambda run, n, value: round(value, 4)), ACCURACIES, Outcome.WARN, "more than 4 digits"),
    "no dropout": (_set("hidden_dropout_prob", 0.0), RULES, Outcome.ERROR, "closed requires 0.1"),
    "12 layers": (_set("num_hidden_layers", 12), RULES, Outcome.ERROR, "closed requires 24"),
    "tensors of 12 layers": (_layers, RULES, Outcome.ERROR, "names 206 tensors, not 398"),
    "format": (_set("precision", "nvfp4"), RULES, Outcome.ERROR, "a number format that v5.0 does not approve"),
    "rate": (_set("opt_base_learning_rate", 0.96), RULES, Outcome.ERROR, "nothing is learnt above 0.1"),
    "chosen seeds": (_seeds, "seeds", Outcome.WARN, "the seeds 1 to 10 are evenly spaced"),
    "two seeds": (_two_seeds, "seeds", Outcome.WARN, "seed 5, but"),
    "sorted": (_sort_by_time, "series", Outcome.WARN, "sorted by time to train"),
    "ten of twenty": (_set("experiments", 20), "series", Outcome.WARN, "the series has 20 runs, but 10 are here"),
    "steps": (_set_metadata("eval_accuracy", "step_num", lambda number: 7), "values", Outcome.WARN, "step_num 7 of"),
    "samples of eval_start": (
        _set_metadata("eval_start", "epoch_num", lambda number: number), ORDER, Outcome.WARN, "every eval_start has"
    ),
    "value of eval_start": (_set("eval_start", 5), ORDER, Outcome.WARN, "eval_start is 5, its epoch_num"),
    "no eval_start in one": (_no_starts, ORDER, Outcome.WARN, "has no eval_start, as the other logs have"),
    "after the end": (_after_the_end, ORDER, Outcome.ERROR, "epoch_stop is later than run_stop"),
    "overlapping blocks": (_blocks, ORDER, Outcome.WARN, "block_start within the block that starts in line"),
    "whole seconds": (stamp(lambda ms: ms // 1000 * 1000, which=4), CLOCK, Outcome.WARN, "every time_ms is a whole"),
    "equal intervals": (_evenly, CLOCK, Outcome.WARN, "60000 ms apart, to the millisecond"),
    "years older": (stamp(lambda ms: ms - 3 * 365 * 86_400_000, which=4), CLOCK, Outcome.WARN, "1095 days from most"),
}  # fmt: skip


@pytest.fixture(scope="module")
def ten_logs(new_log: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    for index in range(10):
        new_log(folder / f"result_{index}.txt", seed=50 + index**2)
    return folder


def _complaints(runs: list[Run], folder: Path) -> dict[str, list[tuple[Outcome, str]]]:
    results = ResultSet(write(runs, folder), division="closed")
    return {
        row.check.removeprefix("own: "): [(one.outcome, one.text) for one in row.complaints]
        for row in run_checks(results, "here")
    }


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_whole_logs_is_reported(name: str, ten_logs: Path, tmp_path: Path) -> None:
    change, check, outcome, words = FAULTS[name]
    runs = committed(ten_logs)
    change(runs)
    assert [grade for grade, text in _complaints(runs, tmp_path)[check] if words in text][:1] == [outcome]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("eval_data", None, "eval_data is train_data, so nothing was held out"),
        ("skipped_steps", 5000, "skipped_steps is 5000, of"),
    ],
)
def test_own_logs_contradict_themselves(key: str, value: object, words: str, tmp_path: Path) -> None:
    runs = committed(DEMO / "bert")
    _set(key, value or nth(runs[0], "train_data")["value"])(runs)
    found = _complaints(runs, tmp_path)["configuration"]
    assert [grade for grade, text in found if words in text] == [Outcome.ERROR] * 10


@pytest.mark.parametrize(
    ("name", "field", "factor", "words"),
    [
        ("metrics.jsonl", "learning_rate", 2, "learning_rate is above opt_base_learning_rate 0.005"),
        ("metrics.jsonl", "samples", 0.5, "fewer samples than at an earlier line"),
        ("summary.json", "samples_per_second", 2, "by the time stamps"),
    ],
)
def test_files_of_a_run_contradict_its_log(name: str, field: str, factor: float, words: str, tmp_path: Path) -> None:
    demo = Path(shutil.copytree(DEMO, tmp_path / "cpu_demo"))
    results = ResultSet([read_log(demo / "bert/result_0.txt")])
    assert list(check_metrics(results)) == []
    path = demo / f"run_0.{name}"
    texts = path.read_text().splitlines() if "metrics" in name else [path.read_text()]
    lines = [json.loads(text) for text in texts]
    for line in lines:
        if field in line and line.get("kind") != "evaluation":
            line[field] *= factor
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [words in complaint.text for complaint in check_metrics(results)] == [True]


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


def test_the_division_that_the_user_names_wins(three_logs: list[Path], tree_root: Path) -> None:
    found = _complaining(three_logs, system=SYSTEM, tree=tree_root, division="open")
    expect(found, "division", Outcome.ERROR, "the system description says 'closed'")
    assert "division" not in _complaining(three_logs, division="closed")
