"""Work over several processes: results in order, errors as they are, and a quiet, quick end by a signal."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlbert.data.prepare.jobs import Executor, expand_inputs, inspect_parts
from mlbert.host.errors import UserError
from programs import write_files
from user_errors import user_error

SLEEPER = (
    "import os, sys, time; from pathlib import Path; from mlbert.data.prepare import jobs\n"
    "from test_jobs import sleep_long\n"
    "if __name__ == '__main__':\n"
    "    paths = [Path(p) for p in sys.argv[1:]]\n"
    "    if {stream}:\n"
    "        with jobs.Executor(2).stream(sleep_long, paths, Path()) as results:\n"
    "            list(results)\n"
    "    jobs.Executor(2).run(sleep_long, paths, name='n', where=Path(), sizes=[1, 1, 1])\n"
    "elif {slow_import}:\n"
    "    print(os.getpid(), flush=True)\n"
    "    time.sleep(600)\n"
)


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


def sleep_long(begun: Path) -> None:
    begun.touch()
    time.sleep(300)


def run(function, items, workers):
    return Executor(workers).run(function, items, name="work", where=Path("out"), sizes=[1] * len(items))


def stream(function, items, workers):
    with Executor(workers).stream(function, iter(items), Path("out")) as results:
        return [result for _, result in results]


FORMS = pytest.mark.parametrize("run", [run, stream])


@FORMS
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


@FORMS
def test_a_killed_worker_is_reported(run):
    with user_error("machine.memory", "out"):
        run(be_killed, range(3), 2)


def sleeping(folder: Path, begun: list[Path], stream: bool, slow_import: bool = False) -> subprocess.Popen[str]:
    program = folder / "program.py"
    program.write_text(SLEEPER.format(stream=stream, slow_import=slow_import))
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, program, *begun], env=environ, **pipes, start_new_session=True)


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


def make(folder: Path, *names: str) -> Path:
    return write_files(folder, {name: f"text of {name}\n" for name in names})


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_a_folder_gives_its_parts_sorted_or_has_none(tmp_path):
    others = ("eval.txt", "eval_2.txt", "part-00000.md5", "notes.md", "part-00000-of-00002.tfrecord", "x.txt.tmp")
    folder = make(tmp_path / "parts", "part-00001-of-00002", "part-00000-of-00002", "more.txt", *others)
    (folder / "part-00003").mkdir()
    assert names(expand_inputs([folder])) == ["more.txt", "part-00000-of-00002", "part-00001-of-00002"]
    with user_error("data.missing", tmp_path / "text"):
        expand_inputs([make(tmp_path / "text", "eval.txt")])
    one, two = make(tmp_path / "one", "eval.txt", "b"), make(tmp_path / "two", "a.txt")
    assert names(expand_inputs([one / "eval.txt", two, one / "b"])) == ["eval.txt", "a.txt", "b"], "the order given"


@pytest.mark.parametrize("name", ["part-{}-of-00004", "train-{}-of-00004.txt"])
def test_missing_parts_of_a_folder(tmp_path, name):
    folder = make(tmp_path / "text", name.format("00000"), name.format("00003"))
    with user_error("data.incomplete", folder):
        expand_inputs([folder])
    expanded = expand_inputs([folder], skip_bad=True)
    assert names(expanded) == [name.format(f"{index:05d}") for index in range(4)]
    assert [bool(part.problem) for part in inspect_parts(expanded, skip_bad=True)] == [False, True, True, False]
    assert len(expand_inputs([folder / name.format("00000")])) == 1


def test_sizes_and_checksums(tmp_path):
    folder = make(tmp_path / "text", "a.txt", "b.txt")
    for part in inspect_parts(expand_inputs([folder])):
        assert part.num_bytes == part.path.stat().st_size
        assert part.sha256 == hashlib.sha256(part.path.read_bytes()).hexdigest()
        assert part.problem is None


def test_invalid_parts_are_refused(tmp_path):
    folder = write_files(tmp_path / "text", {"a": "a", "copy": "a", "b": "b", "empty": "", "empty_too": ""})
    paths = [folder / name for name in ("b", "a", "empty", "copy", "empty_too", "absent", "a", ".")]
    codes = [None, None, "data.empty", "data.duplicate", "data.empty"]
    codes += ["file.unreadable", "data.duplicate", "file.wrong-kind"]
    for path, code in zip(paths, codes, strict=True):
        if code:
            with user_error(code, path):
                inspect_parts([folder / "a", path])
    found = inspect_parts(paths, skip_bad=True)
    assert [part.problem and part.problem.code for part in found] == codes
    with user_error("data.damaged", "--input"):
        inspect_parts([folder / "empty", folder / "empty_too"], skip_bad=True)
    with user_error("data.missing", "--input"):
        inspect_parts([])
