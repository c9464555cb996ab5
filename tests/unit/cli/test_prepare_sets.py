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
    assert_fails(["prepare", "verify", tmp_path / "absent"], "file.missing", tmp_path / "absent")
    assert describe(tmp_path / "eval").num_sequences == 50
    folders = [tmp_path / name for name in ("source", "packed", "bins", "shuffled", "eval")]
    status, out, _ = run("verify", *folders, "--workers", 1)
    assert (status, "850 of 850 samples are good" in out) == (0, True)


@pytest.mark.parametrize("number", ["-3", "1_000", "\u0663"])
def test_numbers_of_workers_that_cannot_be(run, number):
    for command in WITH_WORKERS:
        status, _, error = run(command, "--workers", number)
        assert (status, error.count("\n"), "--workers" in error) == (2, 1, True), command


BINS = ("--edges", "16,32", "--workers", 1)
SHARD, THIRD = "shard-00001-of-00002.h5", "shard-00002-of-00003.h5"


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "code", "name"),
    [
        (lambda path: flip(path, 0.8), "data.checksum", SHARD),
        (Path.unlink, "data.incomplete", SHARD),
        (make_a_folder, "file.wrong-kind", SHARD),
        (lambda path: shutil.copy(path, path.with_name(THIRD)), "data.mixed", THIRD),
        (lambda path: os.truncate(path.with_name("manifest.json"), 200), "file.json", "manifest.json"),
    ],
    ids=["one bit", "missing", "a folder", "one too many", "manifest cut off"],
)
def test_a_damaged_set_is_named_in_one_line_and_left_as_it_is(source, tmp_path, run, damage, code, name):
    shuffle_set(source, tmp_path / "packed", num_shards=2, packing=Packing())
    damage(tmp_path / "packed" / SHARD)
    before = tree(tmp_path / "packed")
    for command in ("pack", "bins", "eval-set", "hdf5-to-tfrecord"):
        if (command, name) == ("hdf5-to-tfrecord", THIRD):
            continue  # takes the shards that the manifest lists
        workers = () if command == "eval-set" else ("--workers", 1)
        status, _, error = run(command, "--input", tmp_path / "packed", "--out", tmp_path / command, *workers)
        assert status == 2, command
        assert_error_line(error, code, tmp_path / "packed" / name)
        assert not [path for path in (tmp_path / command).glob("*.json") if not path.name.startswith(".")]
    assert run("verify", tmp_path / "packed", "--workers", 1)[0] == 1
    assert tree(tmp_path / "packed") == before
