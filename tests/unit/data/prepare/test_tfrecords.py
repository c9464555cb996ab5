"""`mlbert prepare tfrecord-to-hdf5` and back: equality, bad input, interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mlbert.cli.prepare import app
from mlbert.data.formats.manifest import read_manifest
from mlbert.data.formats.prepared import ShardSet
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tfrecord import ExampleReader, Widths, write_examples
from mlbert.data.formats.wordpiece import SPECIAL_TOKENS
from mlbert.data.prepare.jobs import Executor
from mlbert.data.prepare.tfrecords import hdf5_to_tfrecords, tfrecords_to_hdf5
from stored_sets import assert_same_rows, tree
from user_errors import user_error

SPECIAL = len(SPECIAL_TOKENS)
CLS, SEP = (SPECIAL_TOKENS.index(token) for token in ("[CLS]", "[SEP]"))
WIDTHS = Widths(32, 5)


def some_rows(count: int, seed: int = 0) -> Ragged:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(rng.integers(5, 33))
        positions = sorted(rng.choice(np.arange(1, length), min(5, length // 5), replace=False).tolist())
        tokens, labels = rng.integers(0, 100, length).tolist(), rng.integers(0, 100, len(positions)).tolist()
        tokens[0], tokens[-1] = CLS, SEP
        rows.append((tokens, int(rng.integers(2, length)), bool(rng.integers(2)), positions, labels))
    return Ragged.from_rows(rows)


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    """100 entries."""
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join([*SPECIAL_TOKENS, *(f"word{i}" for i in range(100 - SPECIAL))]) + "\n")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of 50, 60 and 70 sequences."""
    folder = tmp_path / "records"
    folder.mkdir()
    for part in range(3):
        write_examples(folder / f"part-{part:05d}-of-00003", some_rows(50 + 10 * part, part), *WIDTHS)
    return folder


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_there_and_back(folder, vocab, tmp_path, said):
    manifest = tfrecords_to_hdf5([folder], vocab, tmp_path / "set", executor=Executor(workers=2))
    assert (manifest.num_sequences, manifest.max_seq_length, manifest.max_predictions) == (180, 32, 5)
    assert (manifest.vocab_size, manifest.provenance["skipped"]) == (100, {})
    rows = ShardSet.open(tmp_path / "set", verify=True).gather(np.arange(180))
    expected = Ragged.concatenate([some_rows(50 + 10 * part, part) for part in range(3)])
    assert_same_rows(rows, expected)

    made = hdf5_to_tfrecords(tmp_path / "set", tmp_path / "back", executor=Executor(workers=2))
    assert made.num_sequences == 180
    for part, file in enumerate(made.files):
        assert (tmp_path / "back" / file.file).read_bytes() == sorted(folder.iterdir())[part].read_bytes()

    before = tree(tmp_path / "set"), tree(tmp_path / "back")
    tfrecords_to_hdf5([folder], vocab, tmp_path / "set", executor=Executor(progress=said))
    hdf5_to_tfrecords(tmp_path / "set", tmp_path / "back", executor=Executor(progress=said))
    assert ["nothing to do" in line for line in said.lines] == [True, True]
    file = next((tmp_path / "back").glob("*.tfrecord"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    hdf5_to_tfrecords(tmp_path / "set", tmp_path / "back", executor=Executor(progress=said))
    assert "checksums.xxh3: rebuilding it" in said.lines[2]
    assert (tree(tmp_path / "set"), tree(tmp_path / "back")) == before


def test_other_input_is_refused(folder, vocab, tmp_path):
    tfrecords_to_hdf5([folder], vocab, tmp_path / "set")
    hdf5_to_tfrecords(tmp_path / "set", tmp_path / "back")
    with user_error("prepare.other-options", tmp_path / "set"):
        tfrecords_to_hdf5(sorted(folder.iterdir())[:2], vocab, tmp_path / "set")
    tfrecords_to_hdf5(sorted(folder.iterdir())[:2], vocab, tmp_path / "two")
    with user_error("prepare.other-options", tmp_path / "back"):
        hdf5_to_tfrecords(tmp_path / "two", tmp_path / "back")


def test_bad_input(folder, vocab, tmp_path):
    files, out = sorted(folder.iterdir()), tmp_path / "set"
    with user_error("config.duplicate", folder / "part-00000-of-00003"):
        tfrecords_to_hdf5([folder, files[0]], vocab, out)
    with user_error("file.missing", tmp_path / "absent"):
        tfrecords_to_hdf5([tmp_path / "absent"], vocab, out)
    with user_error("data.missing", tmp_path):
        tfrecords_to_hdf5([tmp_path], vocab, out)
    with user_error("file.unreadable", tmp_path / "no-vocab.txt"):
        tfrecords_to_hdf5([folder], tmp_path / "no-vocab.txt", out)
    write_examples(tmp_path / "wide.tfrecord", some_rows(3), 64, 5)
    with user_error("data.mixed", tmp_path / "wide.tfrecord"):
        tfrecords_to_hdf5([folder, tmp_path / "wide.tfrecord"], vocab, out)
    small = tmp_path / "small.txt"
    small.write_text("\n".join([*SPECIAL_TOKENS, *(f"word{i}" for i in range(60 - SPECIAL))]) + "\n")
    with user_error("data.damaged", folder / "part-00000-of-00003"):
        tfrecords_to_hdf5([folder], small, out)
    assert not (out / "manifest.json").exists()


def test_skip_bad(folder, vocab, tmp_path):
    files = sorted(folder.iterdir())
    flip(files[1], 200)
    flip(files[2], int(next(iter(ExampleReader(files[2]))).starts[30]) + 60)
    with user_error("data.damaged", folder / "part-00001-of-00003"):
        tfrecords_to_hdf5([folder], vocab, tmp_path / "set", executor=Executor(workers=2))
    words = ["tfrecord-to-hdf5", "--input", folder, "--vocab", vocab, "--out", tmp_path / "set", "--skip-bad"]
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    skipped = read_manifest(tmp_path / "set").provenance["skipped"]
    assert [Path(file).name for file in skipped] == [files[1].name, files[2].name]
    assert skipped[str(files[1])] == ["record 0 (byte 0) has damaged data: its checksum is wrong"]
    assert f"skipped: {files[1]}: record 0 (byte 0)" in done.output
    assert "2 records skipped" in done.output
    assert read_manifest(tmp_path / "set").num_sequences == 178
    assert not list((tmp_path / "set").glob("skipped-*"))


def test_list_of_skipped_survives_an_interruption(folder, vocab, tmp_path):
    flip(sorted(folder.iterdir())[0], 200)
    tfrecords_to_hdf5([folder], vocab, tmp_path / "straight", skip_bad=True)
    # As a run killed before its manifest leaves the folder: shards, and the lists beside them.
    tfrecords_to_hdf5([folder], vocab, tmp_path / "killed", skip_bad=True)
    manifest = tmp_path / "killed" / "manifest.json"
    ((_, listed),) = json.loads(manifest.read_bytes())["provenance"]["skipped"].items()
    manifest.unlink()
    (tmp_path / "killed" / "skipped-00000.json").write_text(json.dumps(listed))
    (tmp_path / "killed" / "shard-00002-of-00003.h5").unlink()
    kept = (tmp_path / "killed" / "shard-00000-of-00003.h5").stat().st_mtime_ns
    tfrecords_to_hdf5([folder], vocab, tmp_path / "killed", skip_bad=True)
    assert tree(tmp_path / "killed") == tree(tmp_path / "straight")
    assert (tmp_path / "killed" / "shard-00000-of-00003.h5").stat().st_mtime_ns == kept


@pytest.mark.parametrize("command", ["tfrecord-to-hdf5", "hdf5-to-tfrecord"])
def test_killed_and_started_again(vocab, tmp_path, command):
    folder = tmp_path / "records"
    folder.mkdir()
    rows = some_rows(10_000)
    for part in range(6):
        write_examples(folder / f"part-{part:05d}-of-00006", rows, *WIDTHS)
    tfrecords_to_hdf5([folder], vocab, tmp_path / "set")
    straight = tmp_path / "set"
    words = ["tfrecord-to-hdf5", "--input", folder, "--vocab", vocab]
    if command == "hdf5-to-tfrecord":
        straight = tmp_path / "straight"
        hdf5_to_tfrecords(tmp_path / "set", straight)
        words = ["hdf5-to-tfrecord", "--input", tmp_path / "set"]
    killed = tmp_path / "killed"
    program = "from mlbert.cli.prepare import app; app()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, words), "--out", str(killed), "--workers", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while len(list(killed.glob("*-of-00006*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (killed / "manifest.json").exists()
    assert not (killed / "instances.json").exists()
    if command == "tfrecord-to-hdf5":
        tfrecords_to_hdf5([folder], vocab, killed)
    else:
        hdf5_to_tfrecords(tmp_path / "set", killed)
    assert tree(killed) == tree(straight)


def test_a_damaged_shard_is_not_exported(folder, vocab, tmp_path):
    tfrecords_to_hdf5([folder], vocab, tmp_path / "set")
    shard = tmp_path / "set" / "shard-00001-of-00003.h5"
    flip(shard, shard.stat().st_size - 9)
    with user_error("data.checksum", shard):
        hdf5_to_tfrecords(tmp_path / "set", tmp_path / "records")
