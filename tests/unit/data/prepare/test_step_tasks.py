"""Shares of a step: the same bytes as one process, in any order, repeated, at the same time, and after kills."""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlbert.data.formats.checksums import CHECKSUMS
from mlbert.data.formats.manifest import file_sha256
from mlbert.data.prepare import import_store as import_store_module
from mlbert.data.prepare.import_store import import_store
from mlbert.data.prepare.jobs import ALL, MERGE, WORK_FOLDER, Executor, Share, parse_share
from mlbert.data.prepare.shuffle import Packing, shuffle_set
from mlbert.data.prepare.split_bins import make_bins
from mlbert.data.prepare.step_tasks import ShareDone
from mlbert.data.prepare.tfrecords import hdf5_to_tfrecords, tfrecords_to_hdf5
from mlbert.host.files import is_leftover
from nvidia_shards import bert_rows, write_vocabulary
from stored_sets import flip, tree, write_set
from user_errors import user_error

STEPS: dict[str, Callable[..., object]] = {
    "pack": lambda source, out, run: shuffle_set(source, out, packing=Packing(), num_shards=5, executor=run),
    "bins": lambda source, out, run: make_bins(source, out, edges=(8, 16, 32), num_shards=2, executor=run),
    "import": lambda source, out, run: import_store(source, source.parent / "vocab.txt", out, executor=run),
    "hdf5-to-tfrecord": lambda source, out, run: hdf5_to_tfrecords(source, out, executor=run),
    "tfrecord-to-hdf5": lambda source, out, run: tfrecords_to_hdf5(
        [records_of(source)], source.parent / "vocab.txt", out, executor=run
    ),
}


def records_of(source: Path) -> Path:
    """Return the source as TFRecords, written once."""
    records = source.parent / "records"
    if not records.exists():
        hdf5_to_tfrecords(source, records)
    return records


def write_source(folder: Path, count: int, seed: int) -> Path:
    """Write a set whose sequences have the special tokens of the vocabulary next to it."""
    vocabulary = write_vocabulary(folder / "vocab.txt")
    rows = bert_rows(count, seed, max_length=29)
    return write_set(folder / "source", rows, shards=5, vocabulary=file_sha256(vocabulary))


def run_share(step: Callable[..., object], source: Path, out: Path, index: int, count: int) -> None:
    with pytest.raises(ShareDone) as done:
        step(source, out, Executor(share=Share(index, count, merges=False)))
    assert done.value.code == 0


@pytest.mark.parametrize("name", STEPS)
def test_any_shares_in_any_order_make_the_same_bytes(tmp_path, name):
    step, draw = STEPS[name], random.Random(name)
    source, count = write_source(tmp_path, 120, 0), draw.randint(2, 7)
    step(source, tmp_path / "one", Executor(share=ALL))
    for _ in range(3):  # passes
        shares = [*range(count), draw.randrange(count)]
        draw.shuffle(shares)
        for index in shares:
            run_share(step, source, tmp_path / "many", index, count)
    step(source, tmp_path / "many", Executor(share=MERGE))
    assert tree(tmp_path / "many") == tree(tmp_path / "one")


@pytest.mark.parametrize("name", STEPS)
def test_a_finished_output_is_kept_and_a_damaged_one_made_again(tmp_path, monkeypatch, name, said):
    monkeypatch.setattr(import_store_module, "PIECE", 200)
    source, out = write_source(tmp_path, 1000, 0), tmp_path / "out"

    def run() -> None:
        STEPS[name](source, out, Executor(workers=1, progress=said))

    run()
    whole = tree(out)
    *_, first, second = sorted(path for path in out.rglob("*-of-*") if path.is_file())
    kept = first.stat().st_mtime_ns
    run()
    assert "nothing to do" in said.lines[-1]
    for damage, is_listed in ((Path.unlink, False), (flip, True), (flip, False)):
        damage(second)
        if not is_listed and name != "hdf5-to-tfrecord":  # whose checksums are in the list only
            (second.parent / CHECKSUMS).unlink()
        run()
        assert re.search(r"(missing|manifest's|No such file.*|checksums.xxh3): rebuilding it", said.lines[-1])
        assert tree(out) == whole
    for summary in out.glob("*.json"):  # as an interrupted run leaves it
        summary.unlink()
    second.write_bytes(b"half")
    second.with_name(f"{second.name}.tmp").write_bytes(b"half")
    run()
    assert tree(out) == whole
    assert first.stat().st_mtime_ns == kept or name == "hdf5-to-tfrecord"


def count_shards(folder: Path) -> int:
    """Count files by name, also while folders vanish."""
    return sum("-of-" in name for _, _, names in os.walk(folder) for name in names)


@pytest.mark.parametrize("name", STEPS)
def test_killed_at_any_moment_and_started_again_makes_the_same_bytes(tmp_path, name):
    source, out, killed = write_source(tmp_path, 6000, 0), tmp_path / "out", 0
    STEPS[name](source, tmp_path / "one", Executor(workers=1))
    for _ in range(50):  # a run may end before it is killed
        process = multiprocessing.get_context("fork").Process(  # saves the seconds of a new interpreter
            target=STEPS[name], args=(source, out, Executor(workers=1))
        )
        process.start()
        files, deadline = count_shards(out), time.monotonic() + 60
        # Until another file has come up, and then a moment more.
        while process.is_alive() and count_shards(out) <= files:
            assert time.monotonic() < deadline, "nothing happened"
            time.sleep(0.001)
        time.sleep(random.random() * 0.02)
        process.kill()
        process.join()
        if process.exitcode == 0:
            shutil.rmtree(out)
            continue
        assert process.exitcode == -signal.SIGKILL
        killed += 1
        if killed == 2:
            break
    assert killed == 2
    STEPS[name](source, out, Executor(workers=1))
    assert tree(out) == tree(tmp_path / "one")


def test_missing_tasks_and_another_plan_are_named(source, tmp_path):
    out = tmp_path / "out"
    for _ in range(2):  # passes
        for index in (0, 1, 3):
            run_share(STEPS["pack"], source, out, index, 4)
    with user_error("data.incomplete", out) as caught:
        STEPS["pack"](source, out, Executor(share=MERGE))
    assert "of spreading are missing: 2/3" in str(caught.value)
    run_share(STEPS["pack"], source, out, 0, 1)
    with user_error("prepare.other-options", out) as caught:
        shuffle_set(source, out, packing=Packing(), num_shards=4, executor=Executor(share=Share(0, 2, merges=False)))
    assert "shards 5, not 4" in str(caught.value)
    with user_error("prepare.other-options", out):  # also from a local run, which would replace another local run's
        shuffle_set(source, out, packing=Packing(), num_shards=4)
    STEPS["pack"](source, out, Executor(share=MERGE))
    assert not (out / WORK_FOLDER).exists()


def test_wrong_shares():
    for task in ("1", "1/0", "-1/2", "2/2"):
        code = "config.range" if task == "2/2" else "config.value"
        with user_error(code, "--task"):
            parse_share(task, merge=False)
    with user_error("config.conflict", "--task and --merge"):
        parse_share("0/2", merge=True)


def test_a_temporary_file_of_a_living_process_is_left_alone(tmp_path):
    host = os.uname().nodename
    names = {f"a.{os.getpid()}@{host}.tmp": False, f"a.4194304@{host}.tmp": True}
    names |= {"a.1@elsewhere.tmp": False, "a": False}
    for name, gone in names.items():
        (tmp_path / name).touch()
        assert is_leftover(tmp_path / name) == gone
    os.utime(tmp_path / "a.1@elsewhere.tmp", (0, 0))
    assert is_leftover(tmp_path / "a.1@elsewhere.tmp")


@pytest.mark.slow
def test_processes_at_once_with_kills(assets, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    documents = (assets / "text.txt").read_text().strip().split("\n\n")
    for index in range(7):
        (texts / f"part-{index}").write_text("\n\n".join(documents[index:] + documents[:index]) + "\n")
    words = f"-m mlbert prepare instances --input {texts} --vocab {assets / 'vocab.txt'} --dupe-factor 40 --workers 1"
    command = [sys.executable, *words.split(), "--out"]

    def start(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    one, out, draw = str(tmp_path / "one"), tmp_path / "out", random.Random(time.time_ns())
    assert start(one).wait() == 0
    running = [start(str(out), "--task", f"{index}/3") for index in (0, 1, 2, 0)]  # the last share twice at once
    deadline = time.monotonic() + 60
    while not list(out.glob(".tasks/instances-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(draw.uniform(0, 0.3))
    for process in running[:3]:
        process.kill()
    for process in running:
        process.communicate()
    changed = texts / "part-6"
    content, stamp = changed.read_text(), changed.stat().st_mtime_ns
    changed.write_text(content + "More.\n")
    _, error = start(str(out), "--task", "0/1").communicate()
    assert "part-6: has changed since" in error
    assert "[data.changed]" in error
    changed.write_text(content)
    os.utime(changed, ns=(stamp, stamp))
    for index in range(3):
        assert start(str(out), "--task", f"{index}/3").wait() == 0
    assert start(str(out), "--merge").wait() == 0
    assert tree(out) == tree(Path(one))
    assert json.loads((out / "manifest.json").read_text())["num_sequences"] > 0
