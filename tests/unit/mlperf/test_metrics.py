"""A log against the files of its run: what was raised or shortened in the log alone shows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlbert.config.sections import settings_by_key
from mlbert.mlperf.findings import Outcome
from mlbert.mlperf.logs import read_log
from mlbert.mlperf.metrics import check_metrics
from mlbert.mlperf.result_set import NAMES, ResultSet, run_file

START_MS = 1_700_000_000_000
POINTS = ((100, 60.0, 0.1), (200, 120.5, 0.2), (300, 190.0, 0.3))  # samples, seconds, accuracy
SETTINGS = {"max_steps": 7, "learning_rate": 0.5, "recipe": "packed_lamb"}
Texts = dict[str, Any]


def _event(key: str, value: object, seconds: float = 0.0, **metadata: object) -> str:
    line = {"time_ms": START_MS + round(seconds * 1000), "key": key, "value": value, "metadata": metadata}
    return f":::MLLOG {json.dumps(line)}\n"


def _log() -> str:
    envs = {settings_by_key()[name].env: value for name, value in SETTINGS.items()}
    events = [
        _event("recipe", "packed_lamb", -2),
        _event("ranks", 1, -2),
        _event("seed", 5, -2),
        _event("configuration", {env: {"value": value, "origin": "flag"} for env, value in envs.items()}, -1),
        _event("run_start", None),
        *(_event("eval_accuracy", accuracy, s + 0.3, epoch_num=samples) for samples, s, accuracy in POINTS),
        _event("train_samples", 300, 190.4),
        _event("run_stop", None, 190.5, status="success"),
    ]
    return "".join(events)


def _texts() -> Texts:
    """Return the four files of a good run, the JSON ones as objects."""
    points: list[dict[str, object]] = []
    for step, (samples, seconds, accuracy) in enumerate(POINTS, start=1):
        point = {"step": step, "samples": samples, "seconds": seconds}
        points.append({"kind": "step", **point, "loss": 3.0})
        points.append({"kind": "skipped", "step": step, "samples": samples})
        points.append({"kind": "evaluation", **point, "eval_accuracy": accuracy})
    summary = {"status": "success", "seconds_to_train": 190.2, "accuracy": 0.3, "samples": 300, "steps": 3, "seed": 5}
    provenance, origin = {"recipe": "packed_lamb", "ranks": 1}, dict.fromkeys(SETTINGS, "flag")
    config = {"config": dict(SETTINGS), "origin": origin, "seed": 5, "provenance": provenance}
    return {"log": _log(), "metrics.jsonl": points, "summary.json": summary, "config.json": config}


def _write(folder: Path, texts: Texts) -> ResultSet:
    """Write the run into a LOGDIR."""
    run = folder / "run_0"
    run.mkdir(parents=True)
    (folder / "result_0.txt").write_text(texts["log"])
    (run / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in texts["metrics.jsonl"]))
    for name in ("summary.json", "config.json"):
        (run / name).write_text(json.dumps(texts[name]))
    return ResultSet([read_log(folder / "result_0.txt")])


def _complaints(results: ResultSet) -> list[str]:
    return [complaint.text for complaint in check_metrics(results) if complaint.outcome is Outcome.ERROR]


def test_a_run_agrees_with_itself(tmp_path: Path) -> None:
    assert list(check_metrics(_write(tmp_path, _texts()))) == []


def _set(file: str, *path: Any, to: object) -> Callable[[Texts], None]:
    def change(texts: Texts) -> None:
        *parents, last = path
        place = texts[file]
        for parent in parents:
            place = place[parent]
        place[last] = to

    return change


def _relog(old: str, new: str) -> Callable[[Texts], None]:
    def change(texts: Texts) -> None:
        assert old in texts["log"]
        texts["log"] = texts["log"].replace(old, new)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_relog('"value": 0.2', '"value": 0.25'), "metrics.jsonl:6: eval_accuracy is 0.2, in result_0.txt:7 0.25"),
        (
            _relog(str(START_MS + 120_800), str(START_MS + 100_800)),
            "metrics.jsonl:6: evaluated 120.5 s after the start",
        ),
        (_relog('"epoch_num": 200', '"epoch_num": 150'), "has no evaluation at 150 samples, which result_0.txt:7 logs"),
        (_relog('"epoch_num": 200', '"epoch_num": 150'), "metrics.jsonl:6: result_0.txt has no evaluation at 200"),
        (_relog(str(START_MS + 190_500), str(START_MS + 150_500)), "summary.json: seconds_to_train is 190.2"),
        (_relog('"success"', '"aborted"'), "summary.json: status is 'success', in result_0.txt 'aborted'"),
        (_relog('"seed", "value": 5', '"seed", "value": 6'), "config.json: seed is 5, in result_0.txt 6"),
        (_relog('"value": 0.5, "origin"', '"value": 0.4, "origin"'), "learning_rate has value 0.5"),
        (_set("config.json", "origin", "max_steps", to="environment"), "max_steps has origin 'environment'"),
        (_set("config.json", "provenance", "ranks", to=8), "config.json: ranks is 8, in result_0.txt 1"),
        (_set("summary.json", "accuracy", to=0.31), "summary.json: accuracy is 0.31, in result_0.txt 0.3"),
        (_set("summary.json", "steps", to=2), "summary.json: steps is 2, in metrics.jsonl 3"),
        (_set("metrics.jsonl", 3, "samples", to=90), "metrics.jsonl:4: samples 90 come after 100"),
        (_set("metrics.jsonl", 3, "seconds", to=10), "metrics.jsonl:4: seconds 10 come after 60.0"),
        (_set("metrics.jsonl", 2, "samples", to=[1]), "metrics.jsonl:3: samples is [1]"),
        (_set("metrics.jsonl", 2, to=7), "metrics.jsonl: line 3 is not a JSON object"),
        (_set("config.json", "config", to=1), "config.json: config is missing"),
    ],
)
def test_a_deviation_is_reported_with_its_place(change: Callable[[Texts], None], words: str, tmp_path: Path) -> None:
    texts = _texts()
    change(texts)
    found = _complaints(_write(tmp_path, texts))
    assert any(f"run_0/{words}" in text or words in text for text in found), found


@pytest.mark.parametrize("content", [b"\xff", b"{", b"[" * 5000, b""])
@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "config.json"])
def test_a_damaged_file_is_reported(name: str, content: bytes, tmp_path: Path) -> None:
    results = _write(tmp_path, _texts())
    (tmp_path / "run_0" / name).write_bytes(content)
    assert any(f"run_0/{name}" in text for text in _complaints(results))


def test_a_log_without_run_files_is_not_compared(tmp_path: Path) -> None:
    (tmp_path / "result_0.txt").write_text(_log())
    complaints = list(check_metrics(ResultSet([read_log(tmp_path / "result_0.txt")])))
    assert [complaint.outcome for complaint in complaints] == [Outcome.SKIP]


# Where the files of a run are.


@pytest.mark.parametrize("place", ["bert/run_3/{}", "run_3.{}"])
def test_a_runs_file_is_found_next_to_its_log(tmp_path: Path, place: str) -> None:
    log = tmp_path / "bert" / "result_3.txt"
    for name in NAMES:
        file = tmp_path / place.format(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
        assert run_file(log, name) == file
        assert run_file(log.with_name("result_4.txt"), name) is None
        assert run_file(log.with_name("other.txt"), name) is None
