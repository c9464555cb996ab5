"""OpenMP's threads sleep while they wait for each other as long as other programs use the cores."""

import os
import subprocess
import sys
import time

import pytest
import torch

from mlbert.host import waiting
from mlbert.host.waiting import BUSY, CALM_LOOKS, CHOICES, IDLE, CoreWaits, Watch, adapted_waits

STEPS = 60


@pytest.fixture(autouse=True)
def no_choice(monkeypatch):
    for name in CHOICES:
        monkeypatch.delenv(name, raising=False)


def tasks():
    return len(os.listdir("/proc/self/task"))


def test_threads_spin_again_when_none_waits_for_a_core(native_waits):
    watch = Watch()
    before = tasks()
    watch.look(BUSY / 2)
    assert not watch.is_short
    watch.look(BUSY)
    watch.look(1.0)
    assert watch.is_short
    wait_until(lambda: tasks() > before + len(os.sched_getaffinity(0)) - 1)
    for _ in range(CALM_LOOKS - 1):
        watch.look(IDLE / 2)
    watch.look(IDLE)
    for _ in range(CALM_LOOKS - 1):
        watch.look(IDLE / 2)
    assert watch.is_short
    watch.look(IDLE / 2)
    assert not watch.is_short
    wait_until(lambda: tasks() <= before)


def wait_until(is_true):
    end = time.monotonic() + 20
    while not is_true() and time.monotonic() < end:
        time.sleep(0.01)
    assert is_true()


@pytest.fixture
def native_waits():
    torch.ones(1).sum()
    try:
        return Watch()
    except waiting.native.NativeUnavailable as error:
        pytest.skip(f"no native kernels: {error}")


@pytest.mark.parametrize("name", CHOICES)
def test_the_users_choice_of_waiting_counts(name, monkeypatch):
    monkeypatch.setenv(name, "passive")
    with adapted_waits(2) as watch:
        assert watch is None


def test_one_thread_waits_for_nobody():
    with adapted_waits(1) as watch:
        assert watch is None


def test_a_thread_that_gets_a_core_waits_for_none():
    waits = CoreWaits()
    time.sleep(0.05)
    assert 0 <= waits.share() <= 1


def cpu_seconds(ranks, threads):
    """Return the processor seconds of ranks that train at the same time on one core."""
    core = str(min(os.sched_getaffinity(0)))
    words = [sys.executable, "-m", "waiting_rank", core, str(threads), str(STEPS)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(ranks)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    return sum(float(process.communicate()[0]) for process in processes)


@pytest.mark.slow
def test_ranks_that_share_a_core_do_not_spin(native_waits):
    """Two ranks of two threads need at most twice the time of two of one thread, one after the
    other. With threads that spin, they need many times as much.
    """
    assert cpu_seconds(2, threads=2) < 2 * (2 * cpu_seconds(1, threads=1))
