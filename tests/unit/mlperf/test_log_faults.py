"""Faults of whole results that single lines do not show: each is reported, with the grade that an honest run allows."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edited_logs import Edit, Run, committed, nth, stamp, write
from mlbert.mlperf.check import run_checks
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
    """Change each accuracy by run, number from the end, and value."""

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


def test_honest_logs_have_none_of_the_faults(ten_logs: Path, tmp_path: Path) -> None:
    found = _complaints(committed(ten_logs), tmp_path)
    assert [found[check] for check in (RULES, ACCURACIES, CLOCK, ORDER, "seeds", "series", "values")] == [[]] * 7


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
