"""The system description against itself and against the logs."""

from __future__ import annotations

from mlbert.submission.findings import Complaint, Complaints, Outcome
from mlbert.submission.result_set import ResultSet


def check_submitter(results: ResultSet) -> Complaints:
    """The system description names the submitter that the logs name, and counts are numbers in text."""
    assert results.system is not None
    submitter = results.system.get("submitter")
    for said in dict.fromkeys(str(log.value("submission_org")) for log in results.logs if log.first("submission_org")):
        if said.casefold() != str(submitter).casefold():
            yield Complaint(Outcome.WARN, f"submission_org {said!r}, in the system {submitter!r}")
    for key in ("number_of_nodes", "host_processors_per_node", "accelerators_per_node"):
        if not str(results.system.get(key, "")).strip().isdecimal():
            text = f"{key} is {results.system.get(key)!r}, not a number"
            yield Complaint(Outcome.ERROR, text, "result_summarizer reads a number there")
