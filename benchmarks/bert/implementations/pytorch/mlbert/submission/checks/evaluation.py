"""Evaluations: when they come, on how many samples."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mlbert.core.rules import NUM_EVAL_SAMPLES
from mlbert.submission.findings import Complaint, Complaints, Outcome
from mlbert.submission.grid import check_grid
from mlbert.submission.logs import Log
from mlbert.submission.result_set import SAMPLE_COUNTS, ResultSet, error, is_number, is_ours

_MAX_COUNT_SLACK = 0.01
_THOROUGH = f"rules, BERT: an evaluation is of all {NUM_EVAL_SAMPLES} samples"


def check_evaluations(results: ResultSet) -> Complaints:
    """Evaluations come in order, up to the end of training; in closed on the grid of the rules, on 10,000 samples."""
    for log in results.logs:
        points = [samples for samples, _ in log.evaluations if is_number(samples)]
        if any(after <= before for before, after in itertools.pairwise(points)):
            yield error(log, "evaluations are not in the order of samples", SAMPLE_COUNTS)
        trained = log.value("train_samples")
        if points and is_number(trained) and points[-1] > trained:
            is_near = points[-1] <= trained * (1 + _MAX_COUNT_SLACK) and not is_ours(log)  # nominal and real samples
            text = f"{log.path.name}: evaluated at {points[-1]} samples but trained on {trained}"
            yield Complaint(Outcome.WARN if is_near else Outcome.ERROR, text, SAMPLE_COUNTS)
        if results.wanted_division == "closed":
            yield from _closed_evaluations(log, points)


def _closed_evaluations(log: Log, points: Sequence[float]) -> Complaints:
    batch, evaluated = log.value("global_batch_size"), log.value("eval_samples")
    if is_number(batch) and batch >= 1:
        for complaint in check_grid(int(batch), [samples for samples in points if samples > 0]):
            yield complaint._replace(text=f"{log.path.name}: {complaint.text}")
    if is_number(evaluated) and evaluated < NUM_EVAL_SAMPLES:
        yield error(log, f"eval_samples is {evaluated}, the rules say {NUM_EVAL_SAMPLES}", _THOROUGH)
