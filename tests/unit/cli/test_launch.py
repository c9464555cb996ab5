"""`mlbert launch`: chains of jobs, starting ranks, closing a log."""

import json
import socket

import pytest

from mlbert.cli import launch
from mlbert.mlperf.mllog import MLPerfLogger
from programs import write_program

SBATCH = """#!/bin/sh
echo "RESUME=$RESUME $*" >>"{notes}"
[ -e "{fails}" ] && echo "sbatch: error: invalid partition" >&2 && exit 1
echo "$(wc -l <"{notes}");cluster"
"""


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    notes = tmp_path / "notes"
    write_program(tmp_path / "sbatch", SBATCH.format(notes=notes, fails=tmp_path / "fails"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CONFIG_FILE", "config_any_1x1x1x1.sh")
    monkeypatch.delenv("TIMED", raising=False)
    return notes


def test_each_link_waits_for_the_one_before(sbatch, run_mlbert):
    status, out, _ = run_mlbert("launch", "chain", 3, "-N", "2", "-t", "60", "run.sub")
    assert (status, out.split()) == (0, ["1", "2", "3"])
    assert sbatch.read_text().splitlines() == [
        "RESUME=1 --parsable -N 2 -t 60 run.sub",
        "RESUME=1 --parsable --dependency=afterany:1 -N 2 -t 60 run.sub",
        "RESUME=1 --parsable --dependency=afterany:2 -N 2 -t 60 run.sub",
    ]


def test_an_impossible_chain_is_refused_by_us_or_by_sbatch(sbatch, monkeypatch, assert_fails):
    for name, value, code in (
        ("TIMED", "1", "config.conflict"),
        ("CONFIG_FILE", "", "config.missing"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert_fails(["launch", "chain", 2, "run.sub"], code, name)
    assert not sbatch.exists()
    (sbatch.parent / "fails").touch()
    assert "invalid partition" in assert_fails(
        ["launch", "chain", 2, "run.sub"], "program.failed", "sbatch"
    )


def test_the_log_of_a_lost_run_is_closed_once(tmp_path, run_mlbert):
    log = tmp_path / "result_0.txt"
    logger = MLPerfLogger(log, rank=0, root=tmp_path)
    logger.start("run_start")
    logger.close()
    with log.open("a") as file:
        file.write(":::MLLOG {half a li")
    assert run_mlbert("launch", "abort-log", log, "--reason", "the job was restarted")[0] == 0
    event = json.loads(log.read_text().splitlines()[-1].removeprefix(":::MLLOG "))
    assert (event["key"], event["metadata"]["status"]) == ("run_stop", "aborted")
    assert event["metadata"]["reason"] == "the job was restarted"
    closed = log.read_text()
    assert run_mlbert("launch", "abort-log", log, "--reason", "again")[0] == 0
    assert log.read_text() == closed
    MLPerfLogger(log, rank=0, root=tmp_path).close()  # without a start it stays as it is
    assert run_mlbert("launch", "abort-log", log, "--reason", "x")[0] == 0
    assert log.read_text() == ""
    assert run_mlbert("launch", "abort-log", tmp_path / "none.txt", "--reason", "x")[0] == 2


@pytest.mark.parametrize("sizes", ["-5", "0", "1,x", "", "1e3", "99999999999", "1," * 10_000, "²"])
def test_message_sizes_that_cannot_be(sizes, assert_fails):
    assert_fails(["launch", "test-network", f"--sizes={sizes}"], "config.value", "--sizes")


@pytest.mark.parametrize("option", ["--wrld-size", "--worldsize=4", "--what"])
def test_an_unknown_option_before_the_script(option, assert_fails):
    name = option.partition("=")[0]
    assert_fails(["launch", "local", option, "4", "main.py"], "config.unknown-name", name)


def ranks_command(node_rank, address, port):
    return [*launch.local_command(1, 2, node_rank, address, port)[3:], "--", "main.py"]


def test_the_first_node_cannot_be_found_at_its_address(monkeypatch, assert_fails):
    """torchrun would wait for fifteen minutes."""
    monkeypatch.setattr(launch, "_OWN_ADDRESS_SECONDS", 0.2)
    monkeypatch.setattr(launch, "_NOTICE_SECONDS", 0.2)
    monkeypatch.setattr(launch, "_FIRST_NODE_SECONDS", 0.0)
    place = "MASTER_ADDR=no-such-host.invalid"
    words = ranks_command(0, "no-such-host.invalid", 29510)
    assert_fails(words, "distributed.join", place, wording=False)
    with socket.create_server(("", 0)) as other_program:
        port = other_program.getsockname()[1]
        words = ranks_command(0, "127.0.0.1", port)
        assert_fails(words, "distributed.join", f"MASTER_PORT={port}", wording=False)


def test_a_node_that_waits_for_the_first_one_says_so(monkeypatch, run_mlbert):
    monkeypatch.setattr(launch, "_NOTICE_SECONDS", 0.2)
    monkeypatch.setattr(launch, "_FIRST_NODE_SECONDS", 0.4)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and nobody listens
        words = ranks_command(1, "127.0.0.1", closed.getsockname()[1])
        status, _, err = run_mlbert(*words)
    notice, error = err.splitlines()
    assert status == 2
    assert "node 1 waits for node 0: MASTER_ADDR=127.0.0.1: port" in notice
    assert "does not answer" in error


def test_hosts_that_cannot_be_started(tmp_path, monkeypatch, assert_fails):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\nb slots=2\n")
    hosts = ["launch", "hosts"]
    named = [*hosts, "--hosts", "a,b"]
    assert_fails([*hosts, "-n", 2, "main.py"], "config.missing", "--hosts")
    assert_fails([*named, "main.py"], "config.missing", "--nproc")
    both = [*named, "--hostfile", hostfile, "main.py"]
    assert_fails(both, "config.conflict", "--hosts and --hostfile")
    more = [*hosts, "--hostfile", hostfile, "-n", 3, "main.py"]
    assert_fails(more, "config.conflict", "--nproc 3")
    assert_fails([*named, "--hostflie", "x", "main.py"], "config.unknown-name", "--hostflie")
    unset = [*named, "-n", 1, "--export", "NO_SUCH", "main.py"]
    assert_fails(unset, "config.missing", "--export NO_SUCH")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_fails([*named, "-n", 1, "main.py"], "program.missing", "ssh")
