"""Runs that were interrupted and resumed are sound: the check judges their last part and raises no error."""

import signal
from pathlib import Path

import pytest

from interrupted_runs import train
from mlbert.mlperf.check import check
from mlbert.mlperf.findings import Outcome
from mlbert.mlperf.logs import read_log
from mlbert.mlperf.result_set import samples_per_second

STEP = 120  # at which the run is interrupted
REQUEUED = 128 + signal.SIGUSR1  # what `run.sub` requeues a job for


@pytest.mark.slow
def test_a_killed_and_requeued_run_raises_no_error(tmp_path: Path) -> None:
    assert train(tmp_path, "run", signal.SIGKILL, STEP) == -signal.SIGKILL
    assert train(tmp_path, "run", signal.SIGUSR1, STEP, resume=1) == REQUEUED
    assert train(tmp_path, "run", resume=1) == 0
    logs = sorted((tmp_path / "run").glob("result_*"))
    assert [log.name for log in logs] == ["result_0.part1.txt", "result_0.part2.txt", "result_0.txt"]
    findings = check(tmp_path / "run")
    assert [finding for finding in findings if finding.outcome is Outcome.ERROR] == []
    outcomes = {finding.check: (finding.outcome, finding.subject) for finding in findings}
    assert outcomes["own: speed"] == (Outcome.PASS, "result_0.txt")
    # With the samples of the first part the last one's rate would be many times as high; a busy machine doubles it.
    rates = [samples_per_second(read_log(log)) for log in logs]
    assert rates[0] / 3 < rates[2] < 3 * rates[0]
