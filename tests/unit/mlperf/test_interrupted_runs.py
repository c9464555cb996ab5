"""Runs that were interrupted and resumed are sound: the check judges their last part and raises no error."""

import shutil
import signal
from pathlib import Path

import pytest

from interrupted_runs import train
from mlbert.mlperf.check import check
from mlbert.mlperf.findings import Outcome
from mlbert.mlperf.logs import read_log
from mlbert.mlperf.result_set import samples_per_second

pytestmark = pytest.mark.slow

STEP = 120  # at which a run is interrupted
REQUEUED = 128 + signal.SIGUSR1  # what `run.sub` requeues a job for
# Name of the LOGDIR to the logs in it.
RUNS = {
    "resumed": ["result_0.part1.txt", "result_0.txt"],
    "requeued": ["result_0.part1.txt", "result_0.txt"],
    "interrupted_twice": ["result_0.part1.txt", "result_0.part2.txt", "result_0.txt"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the runs of `RUNS`, made by the program."""
    folder = tmp_path_factory.mktemp("runs")
    assert train(folder, "resumed", signal.SIGKILL, STEP) == -signal.SIGKILL
    shutil.copytree(folder / "resumed", folder / "interrupted_twice")
    assert train(folder, "resumed", resume=1) == 0
    assert train(folder, "interrupted_twice", signal.SIGUSR1, STEP, resume=1) == REQUEUED
    assert train(folder, "interrupted_twice", resume=1) == 0
    assert train(folder, "requeued", signal.SIGUSR1, STEP) == REQUEUED
    assert train(folder, "requeued", resume=1) == 0
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_an_interrupted_run_raises_no_error(runs: Path, name: str) -> None:
    assert sorted(path.name for path in (runs / name).glob("result_*")) == RUNS[name]
    findings = check(runs / name)
    assert [finding for finding in findings if finding.outcome is Outcome.ERROR] == []
    outcomes = {finding.check: (finding.outcome, finding.subject) for finding in findings}
    assert outcomes["own: speed"] == (Outcome.PASS, "result_0.txt")


def test_the_rate_counts_no_sample_of_an_earlier_part(runs: Path) -> None:
    rates = [samples_per_second(read_log(runs / "requeued" / name)) for name in RUNS["requeued"]]
    # With the samples of the first part the second one's rate would be many times as high; a busy machine doubles it.
    assert rates[0] / 3 < rates[1] < 3 * rates[0]
