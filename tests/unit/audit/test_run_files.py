"""A log against the files of its run: what was raised or shortened in the log alone shows."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlaudit.findings import Outcome
from mlaudit.logs import read_log
from mlaudit.result_set import ResultSet
from mlaudit.run_files import check_metrics
from mlbert.recipes.sections import settings_by_key
from programs import write_files
from simple_logs import write_log

POINTS = ((100, 60.0, 0.1), (200, 120.5, 0.2), (300, 190.0, 0.3))  # samples, seconds, accuracy
SETTINGS = {"max_steps": 7, "learning_rate": 0.5, "recipe": "packed_lamb"}
Change = Callable[[Path], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a LOGDIR with a good run's log and its three files."""
    settings = {
        settings_by_key()[name].env: {"value": value, "origin": "flag"}
        for name, value in SETTINGS.items()
    }
    logged = {"recipe": "packed_lamb", "ranks": 1, "opt_base_learning_rate": 0.5, "seed": 5}
    logged |= {"configuration": settings, "train_samples": 300}
    evaluations = [(samples, seconds + 0.3, accuracy) for samples, seconds, accuracy in POINTS]
    write_log(
        tmp_path / "result_0.txt", evaluations, eval_seconds=None, seconds=190.5, logged=logged
    )
    points: list[dict[str, object]] = []
    for step, (samples, seconds, accuracy) in enumerate(POINTS, start=1):
        point = {"step": step, "samples": samples, "seconds": seconds}
        points.append({"kind": "step", **point, "loss": 3.0})
        points.append({"kind": "skipped", "step": step, "samples": samples})
        points.append({"kind": "evaluation", **point, "eval_accuracy": accuracy})
    summary = {
        "status": "success",
        "seconds_to_train": 190.2,
        "accuracy": 0.3,
        "samples": 300,
        "steps": 3,
        "seed": 5,
    }
    provenance = {"recipe": "packed_lamb", "ranks": 1}
    origin = dict.fromkeys(SETTINGS, "flag")
    config = {"config": SETTINGS, "origin": origin, "seed": 5, "provenance": provenance}
    files = {"metrics.jsonl": points, "summary.json": [summary], "config.json": [config]}
    texts = {
        name: "".join(json.dumps(line) + "\n" for line in lines) for name, lines in files.items()
    }
    write_files(tmp_path / "run_0", texts)
    return tmp_path


def _errors(folder: Path, outcome: Outcome = Outcome.ERROR) -> list[str]:
    found = list(check_metrics(ResultSet([read_log(folder / "result_0.txt")])))
    assert {complaint.outcome for complaint in found} <= {outcome}
    return [complaint.text for complaint in found]


def test_a_run_agrees_with_itself(folder: Path) -> None:
    assert _errors(folder) == []


def _set(file: str, *path: Any, to: object) -> Change:
    def change(folder: Path) -> None:
        lines = [json.loads(line) for line in (folder / "run_0" / file).read_text().splitlines()]
        *parents, last = path
        place = lines if file == "metrics.jsonl" else lines[0]
        for parent in parents:
            place = place[parent]
        place[last] = to
        (folder / "run_0" / file).write_text("".join(json.dumps(line) + "\n" for line in lines))

    return change


def _relog(old: str, new: str) -> Change:
    def change(folder: Path) -> None:
        log = folder / "result_0.txt"
        assert old in log.read_text()
        log.write_text(log.read_text().replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            _relog('"value": 0.2', '"value": 0.25'),
            "metrics.jsonl:6: eval_accuracy is 0.2, in result_0.txt:14 0.25",
        ),
        (_relog("1120800.0", "1100800.0"), "metrics.jsonl:6: evaluated 120.5 s after the start"),
        (
            _relog('"epoch_num": 200', '"epoch_num": 150'),
            "no evaluation at 150 samples, which result_0.txt:14 logs",
        ),
        (
            _relog('"epoch_num": 200', '"epoch_num": 150'),
            "metrics.jsonl:6: result_0.txt has no evaluation at 200",
        ),
        (_relog("1190500.0", "1150500.0"), "summary.json: seconds_to_train is 190.2"),
        (
            _relog('"success"', '"aborted"'),
            "summary.json: status is 'success', in result_0.txt 'aborted'",
        ),
        (
            _relog('"seed", "value": 5', '"seed", "value": 6'),
            "config.json: seed is 5, in result_0.txt 6",
        ),
        (_relog('"value": 0.5, "origin"', '"value": 0.4, "origin"'), "learning_rate has value 0.5"),
        (
            _set("config.json", "origin", "max_steps", to="environment"),
            "max_steps has origin 'environment'",
        ),
        (
            _set("config.json", "provenance", "ranks", to=8),
            "config.json: ranks is 8, in result_0.txt 1",
        ),
        (
            _set("summary.json", "accuracy", to=0.31),
            "summary.json: accuracy is 0.31, in result_0.txt 0.3",
        ),
        (_set("summary.json", "steps", to=2), "summary.json: steps is 2, in metrics.jsonl 3"),
        (_set("metrics.jsonl", 3, "samples", to=90), "metrics.jsonl:4: samples 90 come after 100"),
        (
            _set("metrics.jsonl", 3, "samples", to=90),
            "metrics.jsonl:4: fewer samples than at an earlier line",
        ),
        (
            _set("metrics.jsonl", 0, "learning_rate", to=0.6),
            "learning_rate is above opt_base_learning_rate 0.5",
        ),
        (
            _set("summary.json", "samples_per_second", to=9),
            "summary.json: samples_per_second is 9, by the time stamps",
        ),
        (_set("metrics.jsonl", 3, "seconds", to=10), "metrics.jsonl:4: seconds 10 come after 60.0"),
        (_set("metrics.jsonl", 2, "samples", to=[1]), "metrics.jsonl:3: samples is [1]"),
        (_set("metrics.jsonl", 2, to=7), "metrics.jsonl: line 3 is not a JSON object"),
        (_set("config.json", "config", to=1), "config.json: config is missing"),
    ],
)
def test_a_deviation_is_reported_with_its_place(change: Change, words: str, folder: Path) -> None:
    change(folder)
    found = _errors(folder)
    assert any(f"run_0/{words}" in text or words in text for text in found), found


@pytest.mark.parametrize("content", [b"\xff", b"{", b"[" * 5000, b""])
@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "config.json"])
def test_a_damaged_file_is_reported(name: str, content: bytes, folder: Path) -> None:
    (folder / "run_0" / name).write_bytes(content)
    assert any(f"run_0/{name}" in text for text in _errors(folder))


def test_a_log_without_run_files_is_not_compared(folder: Path) -> None:
    shutil.rmtree(folder / "run_0")
    assert len(_errors(folder, Outcome.SKIP)) == 1
