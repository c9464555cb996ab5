"""The commands on stored sets: what they print, their exit codes, one line for mistakes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from typer.main import get_command

from mlbert.cli.main import main
from mlbert.cli.prepare import app
from mlbert.data.formats.open import describe
from mlbert.data.prepare.shuffle import Packing, shuffle_set
from stored_sets import flip, make_rows, random_lengths, tree, write_set
from user_errors import assert_error_line

COMMANDS = get_command(app).commands


@pytest.fixture
def source(tmp_path):
    return write_set(tmp_path / "source", make_rows(random_lengths(200)))


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as end:
        main(["prepare", *map(str, words)])
    return end.value.code or 0


def test_from_a_set_to_everything_and_verified(source, tmp_path, capsys):
    common = ("--input", source, "--workers", 1, "--out")
    assert run("pack", *common, tmp_path / "packed", "--shards", 2) == 0
    assert "% of slots filled" in capsys.readouterr().out
    assert run("pack", *common, tmp_path / "packed", "--shards", 2) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert run("bins", *common, tmp_path / "bins", "--edges", "16,32") == 0
    assert run("bins-hdf5", source, tmp_path / "folders", "--edges", "16,32", "--workers", 1) == 0
    assert f"{tmp_path}/folders/16: " in capsys.readouterr().out
    assert run("bins-hdf5", source, tmp_path / "bins", "--edges", "16,32", "--workers", 1) == 2
    assert_error_line(capsys.readouterr().err, "file.in-the-way", tmp_path / "bins")
    assert run("shuffle", *common, tmp_path / "shuffled") == 0
    assert run("eval-set", "--input", source, "--out", tmp_path / "eval", "--num", 50) == 0
    assert describe(tmp_path / "eval").num_sequences == 50
    folders = [tmp_path / name for name in ("source", "packed", "bins", "shuffled", "eval")]
    capsys.readouterr()
    assert run("verify", *folders, "--workers", 1) == 0
    assert "850 of 850 samples are good" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [name for name, made in COMMANDS.items() if "workers" in {p.name for p in made.params}]
)
def test_a_negative_number_of_workers(command, capsys):
    assert run(command, "--workers", -3) == 2
    error = capsys.readouterr().err
    assert "'--workers'" in error
    assert error.count("\n") == 1


SHARD = "shard-00001-of-00002.h5"


def damage(folder: Path, kind: str) -> None:
    """One kind of damage to a packed set of two shards."""
    shard, manifest = folder / SHARD, folder / "manifest.json"
    match kind:
        case "cut off":
            os.truncate(shard, shard.stat().st_size // 2)
        case "one bit":
            flip(shard, 0.8)
        case "missing" | "a folder":
            shard.unlink()
            if kind == "a folder":
                shard.mkdir()
        case "one too many":
            shutil.copy(shard, folder / "shard-00002-of-00003.h5")
        case "manifest cut off":
            os.truncate(manifest, 200)


# The codes, as some commands look at the size first and others at the checksum; and the file.
KINDS = {
    "cut off": ({"data.damaged", "data.checksum"}, SHARD),
    "one bit": ({"data.checksum"}, SHARD),
    "missing": ({"data.incomplete"}, SHARD),
    "a folder": ({"file.wrong-kind"}, SHARD),
    "one too many": ({"data.mixed"}, "shard-00002-of-00003.h5"),
    "manifest cut off": ({"file.json"}, "manifest.json"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_set_is_named_in_one_line_and_left_as_it_is(source, tmp_path, capsys, kind):
    shuffle_set(source, tmp_path / "packed", num_shards=2, packing=Packing())
    damage(tmp_path / "packed", kind)
    before = tree(tmp_path / "packed")
    for command in ("pack", "bins", "eval-set", "hdf5-to-tfrecord"):
        capsys.readouterr()
        if (command, kind) == ("hdf5-to-tfrecord", "one too many"):
            continue  # takes the shards that the manifest lists
        workers = () if command == "eval-set" else ("--workers", 1)
        assert run(command, "--input", tmp_path / "packed", "--out", tmp_path / command, *workers) == 2, command
        error, (codes, name) = capsys.readouterr().err, KINDS[kind]
        (code,) = (code for code in codes if f"[{code}]" in error)
        assert_error_line(error, code, tmp_path / "packed" / name, wording=code != "data.damaged")  # sizes of HDF5
        assert not [path for path in (tmp_path / command).glob("*.json") if not path.name.startswith(".")]
    assert run("verify", tmp_path / "packed", "--workers", 1) == 1
    assert tree(tmp_path / "packed") == before


def test_bad_data_is_exit_code_one_and_bad_input_two(source, tmp_path, capsys):
    assert run("verify", tmp_path / "absent") == 2
    assert_error_line(capsys.readouterr().err, "file.missing", tmp_path / "absent")
    (source / "shard-00000-of-00003.h5").write_bytes(b"x")
    assert run("verify", source, "--workers", 1) == 1
    out = capsys.readouterr().out
    assert "shard-00000-of-00003.h5" in out
    assert "133 of 200 samples are good" in out
    assert run("bins", "--input", source, "--out", tmp_path / "bins", "--edges", "a,b") == 2
    assert run("pack", "--input", source, "--out", source) == 2
    assert run("pack", "--input", source, "--out", tmp_path / "out", "--workers", 1) == 2
    assert_error_line(capsys.readouterr().err.splitlines()[-1], "data.damaged", source / "shard-00000-of-00003.h5")
