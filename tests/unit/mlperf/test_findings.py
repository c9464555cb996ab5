"""What a row of the table says: each complaint once, however many logs have it."""

from __future__ import annotations

from pathlib import Path

from mlbert.mlperf.check import run_checks
from mlbert.mlperf.findings import Complaint, Outcome, finding_of
from mlbert.mlperf.logs import read_log
from mlbert.mlperf.result_set import ResultSet


def test_findings_shared_by_ten_logs_are_reported_once() -> None:
    common = [Complaint(Outcome.ERROR, f"result_{i}.txt: line {i + 3}: no seed", "rule") for i in range(10)]
    other = Complaint(Outcome.WARN, "result_2.txt: late")
    found = finding_of("own: x", ".", [other, *common], "")
    assert (
        found.words == "ERROR: result_0.txt: line 3: no seed (and in 9 more places) [rule]; warning: result_2.txt: late"
    )
    assert found.complaints == (*common, other)


def test_a_log_without_events_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "result_0.txt").write_text("nothing\n")
    rows = run_checks(ResultSet([read_log(tmp_path / "result_0.txt")]), ".")
    assert [(row.check, row.outcome) for row in rows] == [("own: lines", Outcome.ERROR)]
    assert "result_0.txt: has no line of an MLPerf log" in rows[0].words
