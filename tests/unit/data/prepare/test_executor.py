"""Worker processes: results in order, a killed worker is reported, and a quick end by a signal."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlbert.data.prepare.executor import Executor
from mlbert.host.errors import UserError
from programs import wait_for
from user_errors import user_error

# Runs a function that never ends in two processes; `sleeping` fills in the two conditions.
SLEEPER = """
import os, sys, time
from pathlib import Path
from mlbert.data.prepare.executor import Executor

def sleep_long(begun):
    begun.touch()
    time.sleep(300)

if __name__ == "__main__":
    paths = [Path(path) for path in sys.argv[1:]]
    if {stream}:
        with Executor(2).stream(sleep_long, paths, Path()) as results:
            list(results)
    Executor(2).run(sleep_long, paths, name="n", where=Path(), sizes=[1, 1, 1])
elif {slow_import}:
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(600)
"""


def double(number: int) -> int:
    return 2 * number


def refuse_two(number: int) -> int:
    if number == 2:
        raise UserError("data.damaged", "two", "is refused")
    return number


def be_killed(number: int) -> None:
    if number:
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGKILL)


def run(function, items, workers):
    return Executor(workers).run(
        function, items, name="work", where=Path("out"), sizes=[1] * len(items)
    )


def stream(function, items, workers):
    with Executor(workers).stream(function, iter(items), Path("out")) as results:
        return [result for _, result in results]


@pytest.mark.parametrize("run", [run, stream])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_results_in_order_and_an_error_as_it_is(run, workers):
    assert run(double, range(7), workers) == [2 * number for number in range(7)]
    assert run(double, [], workers) == []
    with user_error("data.damaged", "two", wording=False):
        run(refuse_two, range(5), workers)


def test_a_stream_takes_few_items_ahead():
    taken = []
    items = (taken.append(number) or number for number in range(100))
    with Executor(2).stream(double, items, Path("out")) as results:
        assert next(results) == (0, 0)
        assert len(taken) <= 4
        assert next(results) == (1, 2)
        assert len(taken) <= 5


@pytest.mark.parametrize("run", [run, stream])
def test_a_killed_worker_is_reported(run):
    with user_error("machine.memory", "out"):
        run(be_killed, range(3), 2)


def sleeping(
    folder: Path, begun: list[Path], stream: bool, slow_import: bool = False
) -> subprocess.Popen[str]:
    program = folder / "program.py"
    program.write_text(SLEEPER.format(stream=stream, slow_import=slow_import))
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, program, *begun], env=environ, **pipes, start_new_session=True
    )


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_that_starts_leaves_ctrl_c_to_the_main_process(tmp_path):
    process = sleeping(tmp_path, [tmp_path / name for name in "abc"], stream=True, slow_import=True)
    worker = int(process.stdout.readline())
    os.kill(worker, signal.SIGINT)
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1].count("Traceback") == 1, "that of the main process"


@pytest.mark.parametrize(
    ("number", "whole_group", "stream"),
    [(signal.SIGTERM, False, True), (signal.SIGTERM, True, False), (signal.SIGINT, True, False)],
)
def test_a_signal_ends_it_at_once_and_without_a_word(tmp_path, number, whole_group, stream):
    begun = [tmp_path / name for name in "abc"]
    process = sleeping(tmp_path, begun, stream)
    wait_for(
        lambda: sum(path.exists() for path in begun) == 2 or process.poll() is not None, seconds=120
    )
    (os.killpg if whole_group else os.kill)(process.pid, number)
    error = process.communicate(timeout=60)[1]
    if number == signal.SIGTERM:
        assert (process.returncode, error) == (128 + number, "")
    else:
        assert process.returncode == -signal.SIGINT
        assert "leaked" not in error
    wait_for(lambda: not group_exists(process.pid), seconds=120)
    assert sum(path.exists() for path in begun) == 2
