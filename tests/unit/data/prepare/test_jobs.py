"""Work over several processes: results in order, errors as they are, and a quiet, quick end by a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlbert.data.prepare.jobs import Executor
from mlbert.host.errors import UserError
from user_errors import user_error

SLEEPER = (
    "import sys, time; from pathlib import Path; from mlbert.data.prepare import jobs\n"
    "from test_jobs import sleep_long\n"
    "if __name__ == '__main__':\n"
    "    jobs.Executor(2).run(sleep_long, [Path(p) for p in sys.argv[1:]], name='n', where=Path(), sizes=[1, 1, 1])"
)


def double(number: int) -> int:
    return 2 * number


def refuse_two(number: int) -> int:
    if number == 2:
        raise UserError("data.damaged", "two", "is refused")
    return number


def be_killed(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep_long(begun: Path) -> None:
    begun.touch()
    time.sleep(300)


def run(function, items, workers):
    return Executor(workers).run(function, items, name="work", where=Path("out"), sizes=[1] * len(items))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_results_in_order(workers):
    assert run(double, range(7), workers) == [2 * number for number in range(7)]
    assert run(double, [], workers) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_comes_back_as_it_is(workers):
    with user_error("data.damaged", "two", wording=False):
        run(refuse_two, range(5), workers)


def test_a_killed_worker_is_reported():
    with user_error("machine.memory", "out"):
        run(be_killed, range(3), 2)


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


SIGNALS = [(signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGINT, True)]


@pytest.mark.parametrize(("number", "whole_group"), SIGNALS)
def test_a_signal_ends_it_at_once_and_without_a_word(tmp_path, number, whole_group):
    begun = [tmp_path / name for name in "abc"]
    program = tmp_path / "program.py"
    program.write_text(SLEEPER)
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    command = [sys.executable, str(program), *map(str, begun)]
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": paths},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    end = time.monotonic() + 120
    while sum(path.exists() for path in begun) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "the work did not begin"
        time.sleep(0.01)
    (os.killpg if whole_group else os.kill)(process.pid, number)
    error = process.communicate(timeout=60)[1]
    if number == signal.SIGTERM:
        assert (process.returncode, error) == (128 + number, "")
    else:
        assert process.returncode == -signal.SIGINT
        assert "leaked" not in error
    while group_exists(process.pid):
        assert time.monotonic() < end, "a process of its group is left"
        time.sleep(0.01)
    assert sum(path.exists() for path in begun) == 2
