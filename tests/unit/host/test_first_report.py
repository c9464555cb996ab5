"""Which process of a job reports an error that all of its processes may have."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlbert.host import first_report
from mlbert.host.first_report import is_first_rank, is_one_of_many, reporting_once

TORCHRUN = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
STEP = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "4"}
NAMES = (*first_report._SIZES, *first_report._RANKS, *first_report._LOCAL_RANKS, *first_report._JOB)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("exports", "is_one", "is_first"),
    [
        ({}, False, True),
        (TORCHRUN, True, False),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, False, True),
        ({"RANK": "3"}, True, False),
        (STEP, True, True),
        ({"SLURM_PROCID": "0"}, False, True),  # the batch script
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, True, False),
    ],
)
def test_launchers(
    monkeypatch: pytest.MonkeyPatch, exports: dict[str, str], is_one: bool, is_first: bool
) -> None:
    for name, value in exports.items():
        monkeypatch.setenv(name, value)
    assert is_one_of_many() == is_one
    assert is_first_rank() == is_first


def test_a_single_process_waits_for_nothing() -> None:
    begun = time.monotonic()
    with reporting_once(2) as is_first:
        assert is_first
    assert time.monotonic() - begun < 1


def report(monkeypatch: pytest.MonkeyPatch, **exports: str) -> bool:
    for name, value in exports.items():
        monkeypatch.setenv(name, value)
    with reporting_once(2) as is_first:
        return is_first


def test_one_process_of_a_job_on_a_machine_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(first_report, "HOLD_SECONDS", 0.0)
    monkeypatch.setattr(first_report, "OTHER_MACHINE_SECONDS", 0.0)
    program = (
        "import sys; from mlbert.host import first_report\n"
        "with first_report.reporting_once(2) as is_first:\n"
        "    assert is_first; print(1, flush=True); sys.stdin.read()\n"
    )
    job = {"WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    other = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout.readline() == b"1\n"
    assert not report(monkeypatch, RANK="2", LOCAL_RANK="2")
    assert report(monkeypatch, MASTER_PORT="29501"), "another job"
    monkeypatch.setenv("MASTER_PORT", "29500")
    other.kill()
    other.wait()
    assert report(monkeypatch, RANK="2"), "the name is free when the process has ended"
