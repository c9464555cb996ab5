"""The MLPerf log: what is written, by whom, with which line number, how an aborted run ends,
and reading it.
"""

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from mlaudit.logs import read_log, unfit
from mlbert.mlperf.mllog import MLPerfLogger, close_interrupted, constants
from user_errors import user_error

HERE = Path(__file__)
ROOT = HERE.parents[3]
NAN = float("nan")
NOT_PLAIN = [
    np.float64(1),
    np.int32(1),
    np.ones(1),
    (1,),
    {1: 2},
    {"a": np.float32(1)},
    object(),
    torch.tensor(1),
]


def _events(path: Path) -> list[dict]:
    lines = path.read_text().splitlines()
    assert all(line.startswith(":::MLLOG ") for line in lines)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


@pytest.fixture
def log(tmp_path: Path) -> MLPerfLogger:
    return MLPerfLogger(tmp_path / "made" / "result_0.txt", 0, ROOT)


def test_file_and_line_of_the_caller(log: MLPerfLogger) -> None:
    log.event("seed", 3)
    log.start(constants.EVAL_START, metadata={"epoch_num": 5})
    log.end(constants.EVAL_STOP, metadata={"epoch_num": 5})
    log.close()
    source = HERE.read_text().splitlines()
    texts = ['log.event("seed", 3)', "log.start(", "log.end("]
    events = _events(log.path)
    assert [event["key"] for event in events] == ["seed", "eval_start", "eval_stop"]
    for event, text in zip(events, texts, strict=True):
        assert event["metadata"]["file"] == "tests/unit/mlperf/test_mllog.py"
        assert text in source[event["metadata"]["lineno"] - 1]


def test_event_types_one_run_stop_and_no_output(
    log: MLPerfLogger, capfd: pytest.CaptureFixture[str]
) -> None:
    assert not log.run_stop("aborted"), "the run has not begun"
    log.start("run_start")
    log.event("eval_accuracy", 0.5, {"epoch_num": 7})
    log.end("epoch_stop", metadata={"epoch_num": 7})
    assert log.run_stop("success")
    assert not log.run_stop("aborted")
    assert [(event["event_type"], event["key"]) for event in _events(log.path)] == [
        ("INTERVAL_START", "run_start"),
        ("POINT_IN_TIME", "eval_accuracy"),
        ("INTERVAL_END", "epoch_stop"),
        ("INTERVAL_END", "run_stop"),
    ]
    assert _events(log.path)[-1]["metadata"]["status"] == "success"
    assert capfd.readouterr() == ("", "")
    assert "mlperf" not in logging.Logger.manager.loggerDict


def test_other_ranks_and_no_path_write_nothing(tmp_path: Path) -> None:
    for logger in (MLPerfLogger(tmp_path / "a.txt", 1, ROOT), MLPerfLogger(None, 0, ROOT)):
        logger.start("run_start")
        with pytest.raises(TypeError):
            logger.event("seed", np.int64(3))
        assert logger.run_stop("success")
        logger.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "error"),
    [
        *((value, TypeError) for value in NOT_PLAIN),
        *((value, ValueError) for value in (NAN, float("inf"), {"a": NAN})),
    ],
)
def test_only_plain_and_finite_values(
    log: MLPerfLogger, value: object, error: type[Exception]
) -> None:
    for words in (("seed", value), ("seed", 1, {"more": value})):
        with pytest.raises(error):
            log.event(*words)
    with pytest.raises(ValueError, match="epoch_num"):
        log.event("eval_accuracy", 0.5)
    assert _events(log.path) == []


def test_texts_that_the_official_tools_misread_are_spelt_otherwise(log: MLPerfLogger) -> None:
    value = {
        "LOGDIR": "/runs/eval_accuracy/global_batch_size",
        "eval_error": ":::MLLOG {train_samples}",
    }
    log.event("tracked_stats", value)
    log.event("eval_accuracy", 0.5, {"epoch_num": 7, "note": "submission_benchmark"})
    first, second = log.path.read_text().splitlines()
    for text in (
        "eval_accuracy",
        "eval_error",
        "global_batch_size",
        "submission_benchmark",
        "train_samples",
    ):
        assert text not in first
        assert (text in second) == (text == "eval_accuracy")
    assert first.count(":::MLLOG") == 1
    found = _events(log.path)
    assert found[0]["value"] == value
    assert found[1]["metadata"]["note"] == "submission_benchmark"


def test_append_continues_a_file(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    for append in (False, True):
        logger = MLPerfLogger(path, 0, ROOT, append=append)
        logger.event("cache_clear", True)
        logger.close()
    assert len(_events(path)) == 2
    MLPerfLogger(path, 0, ROOT).close()
    assert path.read_text() == ""


def test_only_one_of_two_concurrent_closes_writes(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    lost = MLPerfLogger(path, 0, tmp_path)
    lost.start(constants.RUN_START)
    barrier = threading.Barrier(4)

    def close(number: int) -> None:
        barrier.wait()
        if number:
            close_interrupted(path, tmp_path, f"rank 0 is silent, says {number}")
        else:
            lost.run_stop(constants.SUCCESS)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(close, range(4)))
    lost.close()
    assert path.read_text().count('"run_stop"') == 1


def test_an_unwritable_path_and_a_full_disk_are_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with user_error("file.unwritable", tmp_path / "file/result_0.txt"):
        MLPerfLogger(tmp_path / "file" / "result_0.txt", 0, ROOT)
    (tmp_path / "result_0.txt").symlink_to("/dev/full")
    log = MLPerfLogger(tmp_path / "result_0.txt", 0, ROOT)
    with user_error("file.unwritable", tmp_path / "result_0.txt"):
        log.event("seed", 3)
    log.close()


def test_other_lines_are_skipped_and_prefixes_cut(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text(
        'hello\n0: :::MLLOG {"time_ms": 5, "key": "seed", "value": 3, "metadata": {}}\n'
        ':::MLLOG {"time_ms": 5, "key": "seed", "value": 3}\n'
        ':::MLLOG {"time_ms": 5, "key"\n:::MLLOG [1]\n:::MLLOG {"key": "a"}\n'
    )
    read = read_log(path)
    assert [(event.line, event.value, event.metadata) for event in read.events] == [
        (2, 3, {}),
        (3, 3, None),
    ]
    assert [text.split(":")[0] for text in read.broken] == ["line 4", "line 5", "line 6"]


def test_a_line_that_would_exhaust_the_stack_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    for depth, words in ((20_000, "nested too deeply"), (200, "nested more than 64")):
        value = "[" * depth + "]" * depth
        path.write_text(
            f':::MLLOG {{"time_ms": 5, "key": "x", "value": {value}, "metadata": {{}}}}\n'
        )
        (found,) = read_log(path).broken
        assert words in found


def test_a_line_that_official_tools_never_finish_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("x" * 60_000 + "\n")
    assert unfit(path) is None
    path.write_text("one\n:::MLLOG " + "x" * 60_000)
    assert unfit(path) == "has 60001 characters in line 2, more than 50000"
    path.write_text(":::MLLOG {}\n" * 20_001)
    assert unfit(path) == "has more than 20000 MLPerf lines"
