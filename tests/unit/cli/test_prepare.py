"""`mlbert prepare`: what its commands print and leave, their exit codes, one line for mistakes."""

import functools
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from mlbert.cli.prepare import app
from mlbert.data.formats.open import describe
from mlbert.data.prepare.shuffle import Packing, shuffle_set
from programs import write_files
from stored_sets import flip, make_rows, random_lengths, tree, write_set
from user_errors import assert_error_line

ASSETS = Path(__file__).resolve().parents[2] / "assets" / "instances"
COMMANDS = get_command(app).commands.items()
WITH_WORKERS = [
    name for name, made in COMMANDS if "workers" in {option.name for option in made.params}
]
BINS = ("--edges", "16,32", "--workers", 1)
SHARD = "shard-00001-of-00002.h5"
THIRD = "shard-00002-of-00003.h5"


@pytest.fixture
def source(tmp_path):
    return write_set(tmp_path / "source", make_rows(random_lengths(200)))


@pytest.fixture
def run(run_mlbert):
    return functools.partial(run_mlbert, "prepare")


def test_temporary_files_of_a_killed_process_are_removed(tmp_path, run):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        suffix = f"{ended.pid}@{socket.gethostname()}.tmp"
    names = ("vocab.txt", "text/train-00002-of-00004.txt", "eval/shard-00000-of-00001.h5")
    write_files(tmp_path / "set", {f"{name}.{suffix}": "" for name in names})
    write_files(tmp_path / "set", {".begun": ""})
    options = (
        "--one-per-line --vocab-size 500 --max-seq-length 64 --parts 4 --eval-share 0.3 --workers 1"
    )
    texts = write_files(tmp_path / "texts", {"text.txt": (ASSETS / "text.txt").read_text()})
    assert run("text", "--input", texts, "--out", tmp_path / "set", *options.split())[0] == 0
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("name", ["part-00000-of-00001.tfrecord", "shard-00000-of-00001.h5"])
def test_instances_and_digest(tmp_path, run, name):
    form = ("--format", "tfrecord") if name.endswith("tfrecord") else ()
    words = [
        "--input",
        ASSETS / "text.txt",
        "--vocab",
        ASSETS / "vocab.txt",
        "--out",
        tmp_path / "set",
        *form,
    ]
    for expected in ("217 instances", "nothing to do"):
        status, out, _ = run("instances", *words)
        assert (status, expected in out) == (0, True)
    for place in (tmp_path / "set", tmp_path / "set" / name):
        sha256, named, count = run("digest", place)[1].split()
        assert (sha256[:8], named, count) == ("05705079", name, "217")


def test_from_a_set_to_everything_and_verified(source, tmp_path, run, assert_fails):
    common = ["--input", source, "--workers", 1, "--out"]
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
    assert_fails(
        ["prepare", "bins-hdf5", source, tmp_path / "bins", *BINS],
        "file.in-the-way",
        tmp_path / "bins",
    )
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
        (
            lambda path: os.truncate(path.with_name("manifest.json"), 200),
            "file.json",
            "manifest.json",
        ),
    ],
    ids=["one bit", "missing", "a folder", "one too many", "manifest cut off"],
)
def test_a_damaged_set_is_named_in_one_line_and_left_as_it_is(
    source, tmp_path, run, damage, code, name
):
    shuffle_set(source, tmp_path / "packed", num_shards=2, packing=Packing())
    damage(tmp_path / "packed" / SHARD)
    before = tree(tmp_path / "packed")
    for command in ("pack", "bins", "eval-set", "hdf5-to-tfrecord"):
        if (command, name) == ("hdf5-to-tfrecord", THIRD):
            continue  # takes the shards that the manifest lists
        workers = () if command == "eval-set" else ("--workers", 1)
        status, _, error = run(
            command, "--input", tmp_path / "packed", "--out", tmp_path / command, *workers
        )
        assert status == 2, command
        assert_error_line(error, code, tmp_path / "packed" / name)
        assert not [
            path for path in (tmp_path / command).glob("*.json") if not path.name.startswith(".")
        ]
    assert run("verify", tmp_path / "packed", "--workers", 1)[0] == 1
    assert tree(tmp_path / "packed") == before
