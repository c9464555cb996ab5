"""The MLPerf log: what is written, by whom, with which line number, and how an aborted run ends."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlbert.core.config import resolve
from mlbert.core.errors import UserError
from mlbert.core.mllog import MLPerfLogger, constants

HERE = Path(__file__)
ROOT = HERE.parents[3]


def _events(path: Path) -> list[dict]:
    lines = path.read_text().splitlines()
    assert all(line.startswith(":::MLLOG ") for line in lines)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


@pytest.fixture
def log(tmp_path: Path) -> MLPerfLogger:
    return MLPerfLogger(tmp_path / "made" / "result_0.txt", 0, ROOT)


def test_file_and_line_of_the_caller(log: MLPerfLogger) -> None:
    log.event("seed", 3)
    with log.interval(constants.EVAL_START, constants.EVAL_STOP, {"epoch_num": 5}):
        pass
    log.close()
    source = HERE.read_text().splitlines()
    texts = ['log.event("seed", 3)', "with log.interval(", "with log.interval("]
    events = _events(log.path)
    assert [event["key"] for event in events] == ["seed", "eval_start", "eval_stop"]
    for event, text in zip(events, texts, strict=True):
        assert event["metadata"]["file"] == "tests/unit/core/test_mllog.py"
        assert text in source[event["metadata"]["lineno"] - 1]


def test_event_types_and_no_output(log: MLPerfLogger, capfd: pytest.CaptureFixture[str]) -> None:
    log.start("run_start")
    log.event("eval_accuracy", 0.5, {"epoch_num": 7})
    log.end("epoch_stop", metadata={"epoch_num": 7})
    assert log.run_stop("success")
    assert not log.run_stop("aborted")
    kinds = [(event["event_type"], event["key"]) for event in _events(log.path)]
    assert kinds == [
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
    "value", [np.float64(1), np.int32(1), np.ones(1), (1,), {1: 2}, {"a": np.float32(1)}, object()]
)
def test_only_plain_values(log: MLPerfLogger, value: object) -> None:
    with pytest.raises(TypeError):
        log.event("seed", value)
    with pytest.raises(TypeError):
        log.event("seed", 1, {"more": value})
    assert _events(log.path) == []


def test_tensors_are_refused(log: MLPerfLogger) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="Tensor is not a plain"):
        log.event("seed", torch.tensor(1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"throughput": float("nan")}])
def test_only_finite_numbers(log: MLPerfLogger, value: object) -> None:
    with pytest.raises(ValueError, match="not finite"):
        log.event("tracked_stats", value)


def test_lines_that_the_official_checker_misreads_are_refused(log: MLPerfLogger) -> None:
    with pytest.raises(ValueError, match="epoch_num"):
        log.event("eval_accuracy", 0.5)
    with pytest.raises(ValueError, match="misreads"):
        log.event("tracked_stats", {"eval_accuracy": 0.5})
    with pytest.raises(ValueError, match="misreads"):
        log.event("global_batch_size_packed", 5)


def test_hyperparameters(defaults, environ, log: MLPerfLogger) -> None:
    config = resolve(defaults, environ, {}, [], []).config
    log.log_submission(config)
    log.log_hyperparameters(config, 16, config.num_warmup_steps)
    events = {event["key"]: event for event in _events(log.path)}
    values = {key: event["value"] for key, event in events.items()}
    assert values == {
        "submission_benchmark": "bert",
        "submission_org": "SomeOrg",
        "submission_division": "open",
        "submission_status": "research",
        "submission_platform": "some machine",
        "global_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "opt_base_learning_rate": 1e-3,
        "opt_lamb_epsilon": 1e-6,
        "opt_epsilon": 1e-6,
        "opt_lamb_beta_1": 0.9,
        "opt_lamb_beta_2": 0.999,
        "opt_lamb_weight_decay_rate": 0.01,
        "opt_lamb_learning_rate_decay_poly_power": 1.0,
        "opt_gradient_clip_norm": 1.0,
        "opt_learning_rate_training_steps": 100,
        "opt_learning_rate_warmup_steps": 10,
        "num_warmup_steps": 10,
        "start_warmup_step": 0,
    }
    site = events["opt_epsilon"]["metadata"]
    assert '"opt_epsilon"' in (ROOT / site["file"]).read_text().splitlines()[site["lineno"] - 1]


def test_append_continues_a_file(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    for append in (False, True):
        logger = MLPerfLogger(path, 0, ROOT, append=append)
        logger.event("cache_clear", True)
        logger.close()
    assert len(_events(path)) == 2
    MLPerfLogger(path, 0, ROOT).close()
    assert path.read_text() == ""


def test_an_unwritable_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        MLPerfLogger(tmp_path / "file" / "result_0.txt", 0, ROOT)


def test_only_the_first_run_stop_of_a_run_that_has_begun_counts(log: MLPerfLogger) -> None:
    assert not log.run_stop("aborted")
    assert _events(log.path) == []
    log.start("run_start")
    assert log.run_stop("success")
    assert not log.run_stop("aborted")
    assert [event["key"] for event in _events(log.path)] == ["run_start", "run_stop"]


def test_the_package_is_named_as_in_the_tree_wherever_it_is_installed(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    code = (
        "import sys\nfrom pathlib import Path\nfrom mlbert.core.mllog import MLPerfLogger\n"
        "class C:\n    submission_org = submission_division = submission_platform = 'x'\n"
        "MLPerfLogger(Path(sys.argv[1]), 0, Path('/nonexistent')).log_submission(C)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, env=os.environ)
    assert {event["metadata"]["file"] for event in _events(path)} == {
        "benchmarks/bert/implementations/pytorch/mlbert/core/mllog.py"
    }
