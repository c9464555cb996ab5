"""How a run ends: its last line is written once, and the exit status is that of the cause."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from mlbert.distributed import health, lifecycle
from mlbert.distributed.channel import Channel
from mlbert.distributed.health import HANG_SECONDS
from mlbert.distributed.lifecycle import Lifecycle
from mlbert.distributed.stages import Stage
from mlbert.distributed.world import World
from mlbert.host import exit_statuses
from mlbert.host.errors import UserError
from mlbert.host.exit_statuses import LOST_RANK, WRONG_INPUT, Terminated, exit_status
from mlbert.mlperf.mllog import MLPerfLogger

ROOT = Path(__file__).parents[3]
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
WRONG = UserError("data.damaged", "x.hdf5", "is damaged", "Restore it")
RUN = """
import ctypes, sys, time
from pathlib import Path
from mlbert.mlperf.mllog import MLPerfLogger
from mlbert.distributed import lifecycle
class World:  # a single process; the real one would import torch
    rank, world_size, host = 0, 1, "here"
log = MLPerfLogger(Path(sys.argv[1]), 0, Path({root!r}))
stop = lambda status, reason: log.run_stop(status, {{"reason": reason}})
run = lifecycle.Lifecycle(World(), stop)
with run.guard():
    log.start("run_start")
    print("ready", flush=True)
    {body}
"""
# Locking a mutex twice: the call keeps waiting after a signal, so the interpreter cannot run its
# handlers, as in a collective that hangs.
HANG = (
    "c, m = ctypes.CDLL(None), ctypes.create_string_buffer(64); c.pthread_mutex_lock(m); "
    "c.pthread_mutex_lock(m)"
)


def events(path: Path) -> list[dict]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> MLPerfLogger:
    return MLPerfLogger(tmp_path / "result_0.txt", 0, ROOT)


@pytest.fixture
def run(log: MLPerfLogger) -> Lifecycle:
    return Lifecycle(
        World(), lambda status, reason: log.run_stop(status, {"reason": reason} if reason else {})
    )


def divide_by_zero_after(call: Callable[[str], object], argument: str) -> None:
    call(argument)
    _ = 1 / 0


def keys(log: MLPerfLogger) -> list[str]:
    return [event["key"] for event in events(log.path)]


def test_an_exception_is_logged_once_and_passed_on(run, log):
    with pytest.raises(ZeroDivisionError), run.guard():
        divide_by_zero_after(log.start, "run_start")
    *_, last = events(log.path)
    assert (last["key"], last["metadata"]["status"]) == ("run_stop", "aborted")
    assert last["metadata"]["reason"] == "ZeroDivisionError"
    source = Path(__file__).read_text().splitlines()[last["metadata"]["lineno"] - 1]
    assert "log.run_stop(status" in source


def test_nothing_is_logged_before_run_start_or_after_the_finish(run, log):
    with pytest.raises(ZeroDivisionError), run.guard():
        _ = 1 / 0
    assert events(log.path) == []
    log.start("run_start")
    with pytest.raises(ZeroDivisionError), run.guard():
        divide_by_zero_after(run.finish, "success")
    assert keys(log) == ["run_start", "run_stop"]
    assert events(log.path)[-1]["metadata"]["status"] == "success"


def test_a_log_that_cannot_be_closed_hides_no_reason():
    run = Lifecycle(World(), Mock(side_effect=OSError("no space left")))
    with pytest.raises(ZeroDivisionError), run.guard():
        _ = 1 / 0
    with pytest.raises(OSError, match="no space"), run.guard():
        run.finish("success")


def test_one_process_needs_no_watch_and_handlers_are_restored(run):
    before = [signal.getsignal(number) for number in SIGNALS]
    with run.guard():
        assert signal.getsignal(signal.SIGTERM) is not before[0]
        assert list(run.watch.each([1, 2], 0, Stage.COMPUTE, Stage.REDUCE)) == [1, 2]
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_warning_ends_the_run_only_where_it_cannot_save(run, log):
    with pytest.raises(Terminated, match="SIGUSR1"), run.guard():
        os.kill(os.getpid(), signal.SIGUSR1)
    with run.guard():
        log.start("run_start")
        run.accept_warnings()
        assert not run.warned
        os.kill(os.getpid(), signal.SIGUSR1)
        assert run.warned
        time.sleep(0.1)
    assert keys(log) == ["run_start"]


def test_a_warned_run_leaves_as_sigusr1(run, log):
    with pytest.raises(Terminated) as ended, run.guard():  # noqa: PT012
        log.start("run_start")
        run.leave()
    assert ended.value.code == 128 + signal.SIGUSR1
    assert events(log.path)[-1]["metadata"]["reason"] == "SIGUSR1"


def test_statuses_and_times_are_the_published_ones():
    numbers = (
        exit_statuses.SUCCEEDED,
        exit_statuses.FAILED,
        WRONG_INPUT,
        LOST_RANK,
        exit_statuses.INTERRUPTED,
    )
    assert numbers == (0, 1, 2, 3, 130)
    statuses = [exit_status(status, rank) for status in ("success", "aborted") for rank in (0, 1)]
    assert statuses == [0, 0, 1, 0], "only rank 0 reports a missed target"
    page = (ROOT / "docs" / "how_a_run_ends.md").read_text()
    assert f"a rank is silent for {HANG_SECONDS:.0f} s" in page
    assert f"still hangs in a collective {lifecycle.UNWIND_SECONDS:.0f} s after a signal" in page


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_the_caller_handles_does_not_end_the_run(number, run, log):
    caught = []
    before = signal.signal(number, lambda *_: caught.append(number))
    try:
        with run.guard():
            log.start("run_start")
            os.kill(os.getpid(), number)
            time.sleep(0.1)
    finally:
        signal.signal(number, before)
    assert caught == [number]
    assert keys(log) == ["run_start"]


@pytest.mark.parametrize(
    ("rank", "error", "status", "printed"),
    [
        (0, WRONG, None, False),  # the command line prints it
        (1, WRONG, WRONG_INPUT, False),
        (0, ValueError("no"), None, True),
        (1, ValueError("no"), None, False),
    ],
)
def test_a_rank_leaves_a_mistake_to_rank_0(rank, error, status, printed, monkeypatch, capsys):
    here, other = socket.socketpair()
    monkeypatch.setattr(health, "connect", lambda world: {1 - rank: Channel(here)})
    monkeypatch.setattr(health, "CAUSE_SECONDS", 0.0)
    monkeypatch.setattr(health, "PERIOD_SECONDS", 0.1)
    world = SimpleNamespace(rank=rank, world_size=2, host="h", hosts=lambda: ["h", "h"])
    world.rendezvous = SimpleNamespace(together=lambda name: contextlib.nullcontext())
    with other, pytest.raises(BaseException) as left, Lifecycle(world, lambda *_: None).guard():  # noqa: PT011
        raise error
    assert getattr(left.value, "code", None) == status if status else left.value is error
    assert (
        "mlbert: error: rank 0 on h failed after step 0: ValueError: no." in capsys.readouterr().err
    ) == printed


def test_a_mistake_counts_although_a_launcher_sends_sigterm_meanwhile(run):
    """Launchers end all ranks when the first one exits."""
    run.watch._report_failure = lambda error: os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(UserError) as left, run.guard():
        raise WRONG
    assert left.value is WRONG


def default_signals() -> None:
    """Undo the ignored signals that a child inherits from a suite in the background
    or under nohup.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def start(tmp_path: Path, body: str) -> tuple[subprocess.Popen, Path]:
    path = tmp_path / "result_0.txt"
    command = [sys.executable, "-c", RUN.format(root=str(ROOT), body=body), str(path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, preexec_fn=default_signals)
    assert process.stdout.readline() == b"ready\n"
    return process, path


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT"])
def test_a_signal_ends_the_run_as_aborted(name, tmp_path):
    process, path = start(tmp_path, "time.sleep(60)")
    number = getattr(signal, name)
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    if name == "SIGINT":  # Python's own end after Ctrl-C
        assert process.returncode in (-number, 128 + number, 1)
    else:
        assert (process.returncode, errors) == (128 + number, b"")
    statuses = [(event["key"], event["metadata"].get("status")) for event in events(path)]
    assert statuses == [("run_start", None), ("run_stop", "aborted")]
    assert events(path)[-1]["metadata"]["reason"] == name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_hangs_ends_by_itself(number, tmp_path):
    process, path = start(tmp_path, f"lifecycle.UNWIND_SECONDS = 0.3; {HANG}")
    time.sleep(0.2)
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert events(path)[-1]["metadata"]["reason"] == number.name
