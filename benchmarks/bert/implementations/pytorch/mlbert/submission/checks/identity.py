"""Whether a log leads to the code that wrote it."""

from __future__ import annotations

from mlbert.submission.call_sites import Sources
from mlbert.submission.findings import Complaint, Complaints, Outcome
from mlbert.submission.result_set import OWN_FORM, ResultSet, is_ours


def check_call_sites(results: ResultSet) -> Complaints:
    """Every file:lineno of this code's logs is in the tree, and is the call that logged the key."""
    assert results.tree is not None
    for log in filter(is_ours, results.logs):
        sources = Sources(results.tree, log)
        if sources.gap:
            text = f"{log.path.name}: {sources.gap}, so its lines are looked up in the tree"
            yield Complaint(Outcome.WARN, text, OWN_FORM)
        for event in log.events:
            if event.call_site is None:
                yield Complaint(Outcome.WARN, f"{log.path.name}: {event.key} names no file and line", OWN_FORM)
                continue
            name, number = event.call_site
            if sources.line(name, number) is None:
                yield Complaint(Outcome.WARN, f"{name}:{number} is not in the tree", OWN_FORM)
            elif sources.call_of(name, number, event.key) is None:
                outcome = Outcome.WARN if sources.gap else Outcome.ERROR
                yield Complaint(outcome, f"{name}:{number} does not log {event.key}", OWN_FORM)
