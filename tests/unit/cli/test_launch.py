"""`mlbert launch`: chains of jobs, closing a log."""

import json
from pathlib import Path

import pytest

from mlbert.cli.main import main
from mlbert.mlperf.mllog import MLPerfLogger
from user_errors import assert_error_line

SBATCH = """#!/bin/sh
echo "RESUME=$RESUME $*" >>"{notes}"
[ -e "{fails}" ] && echo "sbatch: error: invalid partition" >&2 && exit 1
echo "$(wc -l <"{notes}");cluster"
"""


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """A stand-in for sbatch that notes its words; the file of notes."""
    program, notes = tmp_path / "sbatch", tmp_path / "notes"
    program.write_text(SBATCH.format(notes=notes, fails=tmp_path / "fails"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CONFIG_FILE", "config_any_1x1x1x1.sh")
    monkeypatch.delenv("TIMED", raising=False)
    return notes


def run(*words):
    with pytest.raises(SystemExit) as end:
        main(["launch", *(str(word) for word in words)])
    return end.value.code


def test_each_link_waits_for_the_one_before(sbatch, capsys):
    assert run("chain", 3, "-N", "2", "-t", "60", "run.sub") == 0
    assert capsys.readouterr().out.split() == ["1", "2", "3"]
    assert sbatch.read_text().splitlines() == [
        "RESUME=1 --parsable -N 2 -t 60 run.sub",
        "RESUME=1 --parsable --dependency=afterany:1 -N 2 -t 60 run.sub",
        "RESUME=1 --parsable --dependency=afterany:2 -N 2 -t 60 run.sub",
    ]


def test_a_chain_prints_sbatchs_output(sbatch, capsys):
    (sbatch.parent / "fails").touch()
    assert run("chain", 2, "run.sub") == 2
    error = capsys.readouterr().err
    assert_error_line(error, "program.failed", "sbatch")
    assert "invalid partition" in error


@pytest.mark.parametrize(
    ("name", "value", "code"), [("CONFIG_FILE", "", "config.missing"), ("TIMED", "1", "config.conflict")]
)
def test_an_impossible_chain_is_refused(sbatch, monkeypatch, capsys, name, value, code):
    monkeypatch.setenv(name, value)
    assert run("chain", 2, "run.sub") == 2
    assert_error_line(capsys.readouterr().err, code, name)
    assert not sbatch.exists()


def last_event(log: Path) -> dict:
    return json.loads(log.read_text().splitlines()[-1].removeprefix(":::MLLOG "))


def test_the_log_of_a_lost_run_is_closed_once(tmp_path):
    log = tmp_path / "result_0.txt"
    logger = MLPerfLogger(log, rank=0, root=tmp_path)
    logger.start("run_start")
    logger.close()
    with log.open("a") as file:
        file.write(":::MLLOG {half a li")
    assert run("abort-log", log, "--reason", "the job was restarted") == 0
    event = last_event(log)
    assert event["key"] == "run_stop"
    assert event["metadata"]["status"] == "aborted"
    assert event["metadata"]["reason"] == "the job was restarted"
    closed = log.read_text()
    assert run("abort-log", log, "--reason", "again") == 0
    assert log.read_text() == closed


def test_a_log_without_a_start_stays_as_it_is(tmp_path):
    log = tmp_path / "result_0.txt"
    MLPerfLogger(log, rank=0, root=tmp_path).close()
    assert run("abort-log", log, "--reason", "x") == 0
    assert log.read_text() == ""
    assert run("abort-log", tmp_path / "none.txt", "--reason", "x") == 2


@pytest.mark.parametrize("sizes", ["-5", "0", "1,x", "", "1e3", "99999999999", "1," * 10_000, "²"])
def test_message_sizes_that_cannot_be(sizes, capsys):
    with pytest.raises(SystemExit) as end:
        main(["launch", "test-network", f"--sizes={sizes}"])
    assert end.value.code == 2
    assert_error_line(capsys.readouterr().err, "config.value", "--sizes")
