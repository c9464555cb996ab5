"""The commands on stored sets: what they print, their exit codes, one line for mistakes."""

import functools
import os
import shutil
from pathlib import Path

import pytest
from typer.main import get_command

from mlbert.cli.prepare import app
from mlbert.data.formats.open import describe
from mlbert.data.prepare.shuffle import Packing, shuffle_set
from stored_sets import flip, make_rows, random_lengths, tree, write_set
from user_errors import assert_error_line

COMMANDS = get_command(app).commands.items()
WITH_WORKERS = [name for name, made in COMMANDS if "workers" in {option.name for option in made.params}]


@pytest.fixture
def source(tmp_path):
    return write_set(tmp_path / "source", make_rows(random_lengths(200)))


@pytest.fixture
def run(run_mlbert):
    return functools.partial(run_mlbert, "prepare")


def test_from_a_set_to_everything_and_verified(source, tmp_path, run, assert_fails):
    common = ("--input", source, "--workers", 1, "--out")
    for words, expected in (
        (("pack", *common, tmp_path / "packed", "--shards", 2), "% of slots filled"),
        (("pack", *common, tmp_path / "packed", "--shards", 2), "nothing to do"),
        (("bins", *common, tmp_path / "bins", "--edges", "16,32"), ""),
        (("bins-hdf5", source, tmp_path / "folders", *BINS), f"{tmp_path}/folders/16: "),
        (("shuffle", *common, tmp_path / "shuffled"), ""),
        (("eval-set", "--input", source, "--out", tmp_path / "eval", "--num", 50), ""),
    ):
        status, out, _ = run(*words)
        assert (status, expected in out) == (0, True), words
    assert_fails(["prepare", "bins-hdf5", source, tmp_path / "bins", *BINS], "file.in-the-way", tmp_path / "bins")
    assert describe(tmp_path / "eval").num_sequences == 50
    folders = [tmp_path / name for name in ("source", "packed", "bins", "shuffled", "eval")]
    status, out, _ = run("verify", *folders, "--workers", 1)
    assert (status, "850 of 850 samples are good" in out) == (0, True)


def test_a_negative_number_of_workers(run):
    for command in WITH_WORKERS:
        status, _, error = run(command, "--workers", -3)
        assert (status, error.count("\n"), "'--workers'" in error) == (2, 1, True), command


BINS = ("--edges", "16,32", "--workers", 1)
SHARD, THIRD = "shard-00001-of-00002.h5", "shard-00002-of-00003.h5"


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


# How a packed set of two shards is damaged; the codes, as some commands look at the size first and others at the
# checksum; and the file.
KINDS = {
    "cut off": (lambda folder: cut(folder / SHARD), {"data.damaged", "data.checksum"}, SHARD),
    "one bit": (lambda folder: flip(folder / SHARD, 0.8), {"data.checksum"}, SHARD),
    "missing": (lambda folder: (folder / SHARD).unlink(), {"data.incomplete"}, SHARD),
    "a folder": (lambda folder: make_a_folder(folder / SHARD), {"file.wrong-kind"}, SHARD),
    "one too many": (lambda folder: shutil.copy(folder / SHARD, folder / THIRD), {"data.mixed"}, THIRD),
    "manifest cut off": (lambda folder: os.truncate(folder / "manifest.json", 200), {"file.json"}, "manifest.json"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_set_is_named_in_one_line_and_left_as_it_is(source, tmp_path, run, kind):
    shuffle_set(source, tmp_path / "packed", num_shards=2, packing=Packing())
    damage, codes, name = KINDS[kind]
    damage(tmp_path / "packed")
    before = tree(tmp_path / "packed")
    for command in ("pack", "bins", "eval-set", "hdf5-to-tfrecord"):
        if (command, kind) == ("hdf5-to-tfrecord", "one too many"):
            continue  # takes the shards that the manifest lists
        workers = () if command == "eval-set" else ("--workers", 1)
        status, _, error = run(command, "--input", tmp_path / "packed", "--out", tmp_path / command, *workers)
        assert status == 2, command
        (code,) = (code for code in codes if f"[{code}]" in error)
        assert_error_line(error, code, tmp_path / "packed" / name, wording=code != "data.damaged")  # sizes of HDF5
        assert not [path for path in (tmp_path / command).glob("*.json") if not path.name.startswith(".")]
    assert run("verify", tmp_path / "packed", "--workers", 1)[0] == 1
    assert tree(tmp_path / "packed") == before


def test_bad_data_is_exit_code_one_and_bad_input_two(source, tmp_path, run, assert_fails):
    assert_fails(["prepare", "verify", tmp_path / "absent"], "file.missing", tmp_path / "absent")
    (source / "shard-00000-of-00003.h5").write_bytes(b"x")
    status, out, _ = run("verify", source, "--workers", 1)
    assert status == 1
    assert "shard-00000-of-00003.h5" in out
    assert "133 of 200 samples are good" in out
    assert run("bins", "--input", source, "--out", tmp_path / "bins", "--edges", "a,b")[0] == 2
    assert run("pack", "--input", source, "--out", source)[0] == 2
    status, _, err = run("pack", "--input", source, "--out", tmp_path / "out", "--workers", 1)
    assert status == 2
    assert_error_line(err.splitlines()[-1], "data.damaged", source / "shard-00000-of-00003.h5")
