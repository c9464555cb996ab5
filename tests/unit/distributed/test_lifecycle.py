"""How a run ends: its last line is written once, and the exit status is that of the cause."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlbert.distributed.health import Stage
from mlbert.distributed.lifecycle import Lifecycle, Terminated, exit_status
from mlbert.distributed.world import World
from mlbert.mlperf.mllog import MLPerfLogger

ROOT = Path(__file__).parents[3]
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def events(path: Path) -> list[dict]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> MLPerfLogger:
    return MLPerfLogger(tmp_path / "result_0.txt", 0, ROOT)


@pytest.fixture
def lifecycle(log: MLPerfLogger) -> Lifecycle:
    return Lifecycle(World(), lambda status, reason: log.run_stop(status, {"reason": reason} if reason else {}))


def divide_by_zero_after(call: Callable[[str], object], argument: str) -> None:
    call(argument)
    _ = 1 / 0


def test_an_exception_is_logged_once_and_passed_on(lifecycle: Lifecycle, log: MLPerfLogger) -> None:
    with pytest.raises(ZeroDivisionError), lifecycle.guard():
        divide_by_zero_after(log.start, "run_start")
    *_, last = events(log.path)
    assert (last["key"], last["metadata"]["status"]) == ("run_stop", "aborted")
    assert last["metadata"]["reason"] == "ZeroDivisionError"
    source = Path(__file__).read_text().splitlines()[last["metadata"]["lineno"] - 1]
    assert "log.run_stop(status" in source


def test_nothing_is_logged_before_run_start_or_after_the_finish(lifecycle: Lifecycle, log: MLPerfLogger) -> None:
    with pytest.raises(ZeroDivisionError), lifecycle.guard():
        _ = 1 / 0
    assert events(log.path) == []
    log.start("run_start")
    with pytest.raises(ZeroDivisionError), lifecycle.guard():
        divide_by_zero_after(lifecycle.finish, "success")
    assert [event["key"] for event in events(log.path)] == ["run_start", "run_stop"]
    assert events(log.path)[-1]["metadata"]["status"] == "success"


def test_a_log_that_cannot_be_closed_hides_no_reason() -> None:
    def full_disk(status: str, reason: str | None) -> None:
        raise OSError("no space left")

    lifecycle = Lifecycle(World(), full_disk)
    with pytest.raises(ZeroDivisionError), lifecycle.guard():
        _ = 1 / 0
    with pytest.raises(OSError, match="no space"), lifecycle.guard():
        lifecycle.finish("success")


def test_one_process_needs_no_watch(lifecycle: Lifecycle) -> None:
    with lifecycle.guard():
        assert list(lifecycle.watch.each([1, 2], 0, Stage.COMPUTE, Stage.REDUCE)) == [1, 2]


def test_handlers_are_restored(lifecycle: Lifecycle) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with lifecycle.guard():
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_warning_ends_the_run_only_where_it_cannot_save(lifecycle: Lifecycle, log: MLPerfLogger) -> None:
    with pytest.raises(Terminated, match="SIGUSR1"), lifecycle.guard():
        os.kill(os.getpid(), signal.SIGUSR1)
    with lifecycle.guard():
        log.start("run_start")
        lifecycle.accept_warnings()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert lifecycle.warned
        time.sleep(0.1)
    assert [event["key"] for event in events(log.path)] == ["run_start"]


def test_a_warned_run_leaves_as_sigusr1(lifecycle: Lifecycle, log: MLPerfLogger) -> None:
    with pytest.raises(Terminated) as ended, lifecycle.guard():  # noqa: PT012
        log.start("run_start")
        lifecycle.leave()
    assert ended.value.code == 128 + signal.SIGUSR1
    assert events(log.path)[-1]["metadata"]["reason"] == "SIGUSR1"


def test_only_rank_0_reports_a_missed_target() -> None:
    assert [exit_status(status, rank) for status in ("success", "aborted") for rank in (0, 1)] == [0, 0, 1, 0]


RUN = """
import ctypes, sys, time
from pathlib import Path
from mlbert.mlperf.mllog import MLPerfLogger
from mlbert.distributed import lifecycle
class World:  # a single process; the real one would import torch
    rank, world_size, host = 0, 1, "here"
log = MLPerfLogger(Path(sys.argv[1]), 0, Path({root!r}))
run = lifecycle.Lifecycle(World(), lambda status, reason: log.run_stop(status, {{"reason": reason}}))
with run.guard():
    log.start("run_start")
    print("ready", flush=True)
    {body}
"""
SLEEP = "time.sleep(60)"
# Locking a mutex twice: the call goes on waiting after a signal, so the interpreter cannot run its handlers, as in a
# collective that hangs.
HANG = "c, m = ctypes.CDLL(None), ctypes.create_string_buffer(64); c.pthread_mutex_lock(m); c.pthread_mutex_lock(m)"


def default_signals() -> None:
    """A suite that runs in the background or under nohup hands ignored signals on to its children."""
    for name in ("SIGINT", "SIGHUP", "SIGTERM"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)


def start(tmp_path: Path, body: str) -> tuple[subprocess.Popen, Path]:
    path = tmp_path / "result_0.txt"
    code = RUN.format(root=str(ROOT), body=body)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=default_signals,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process, path


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_ends_the_run_as_aborted(name: str, tmp_path: Path) -> None:
    process, path = start(tmp_path, SLEEP)
    number = getattr(signal, name)
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert errors == b""
    keys = [(event["key"], event["metadata"].get("status")) for event in events(path)]
    assert keys == [("run_start", None), ("run_stop", "aborted")]
    assert events(path)[-1]["metadata"]["reason"] == name


def test_control_c_ends_the_run_as_aborted(tmp_path: Path) -> None:
    process, path = start(tmp_path, SLEEP)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT, 1)
    assert [event["key"] for event in events(path)] == ["run_start", "run_stop"]
    assert events(path)[-1]["metadata"]["reason"] == "SIGINT"


def test_the_line_is_there_although_the_main_thread_hangs(tmp_path: Path) -> None:
    process, path = start(tmp_path, HANG)
    try:
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while len(events(path)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [event["key"] for event in events(path)] == ["run_start", "run_stop"]
        assert process.poll() is None, "the main thread should still hang"
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_hangs_ends_by_itself(tmp_path: Path) -> None:
    process, path = start(tmp_path, f"lifecycle.UNWIND_SECONDS = 0.3; {HANG}")
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert events(path)[-1]["metadata"]["reason"] == "SIGTERM"


def test_an_uncaught_exception_in_a_process(tmp_path: Path) -> None:
    process, path = start(tmp_path, "raise RuntimeError('no more memory')")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert b"no more memory" in errors
    assert [event["metadata"].get("status") for event in events(path)] == [None, "aborted"]
