"""The commands on stored sets: what they print, their exit codes, one line for mistakes."""

from __future__ import annotations

import pytest

from mlbert.cli.main import main
from mlbert.data.store import describe
from stored_sets import make_rows, random_lengths, write_set


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
    assert run("shuffle", *common, tmp_path / "shuffled") == 0
    assert run("eval-set", "--input", source, "--out", tmp_path / "eval", "--num", 50) == 0
    assert describe(tmp_path / "eval").num_sequences == 50
    folders = [tmp_path / name for name in ("source", "packed", "bins", "shuffled", "eval")]
    capsys.readouterr()
    assert run("verify", *folders, "--workers", 1) == 0
    assert "850 of 850 samples are good" in capsys.readouterr().out


def test_bad_data_is_exit_code_one_and_bad_input_two(source, tmp_path, capsys):
    assert run("verify", tmp_path / "absent") == 2
    error = capsys.readouterr().err
    assert "there is no such folder" in error
    assert error.count("\n") == 1
    (source / "shard-00000-of-00003.h5").write_bytes(b"x")
    assert run("verify", source, "--workers", 1) == 1
    out = capsys.readouterr().out
    assert "shard-00000-of-00003.h5" in out
    assert "133 of 200 samples are good" in out
    assert run("bins", "--input", source, "--out", tmp_path / "bins", "--edges", "a,b") == 2
    assert run("pack", "--input", source, "--out", source) == 2
    assert run("pack", "--input", source, "--out", tmp_path / "out", "--workers", 1) == 2
    assert "shard-00000-of-00003.h5" in capsys.readouterr().err
