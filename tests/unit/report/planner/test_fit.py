"""The fitted numbers: fitting the published table again gives the same ones; the errors are those of the record."""

import csv
import dataclasses
import json

import numpy as np
import pytest

import fit_plan
from mlbert.report.planner.timing import GPUS, PATH, load

HELD_OUT = fit_plan.ROOT / "records/2026-11-26_plan-held-out_epyc-2cpu/held_out.csv"


@pytest.fixture(scope="module")
def rows():
    return fit_plan.read()


@pytest.fixture(scope="module")
def stated():
    return json.loads(PATH.read_text())["provenance"]["held_out"]


def test_table_has_no_resubmission_twice_and_plausible_figures(rows):
    assert len(rows) == 171
    keys = {(row.submitter, row.job.gpus, row.job.batch, row.seconds, row.samples) for row in rows}
    assert len(keys) == len(rows)
    for row in rows:
        assert GPUS[row.job.gpu].has_results
        assert row.job.gpus % row.job.nodes == 0
        assert row.score_seconds >= row.seconds * 0.999


@pytest.mark.slow
def test_fit_is_reproducible(rows):
    again, stored = dataclasses.asdict(fit_plan.fit(rows)), dataclasses.asdict(load())
    for name in stored.keys() - {"error_90", "unseen_error_90"}:
        assert again[name] == pytest.approx(stored[name], rel=0.01), name


@pytest.fixture(scope="module")
def record():
    with HELD_OUT.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_the_error_without_a_submitter_is_that_of_the_record(rows, record):
    recorded = [line for line in record if " Cisco " in line["system"]]
    (found,) = fit_plan._without(rows, fit_plan.SUBMITTER, "Cisco")
    assert np.expm1(found) == pytest.approx(float(recorded[0]["error_without_its_submitter"]), abs=0.02)


@pytest.mark.parametrize("kind", [fit_plan.SUBMITTER, fit_plan.ROUND, fit_plan.GPU])
def test_the_stated_errors_are_those_of_the_record(rows, stated, record, kind):
    assert [line["system"] for line in record] == [row.name for row in rows]
    errors = np.array([float(line[f"error_without_its_{kind}"]) for line in record])
    found = fit_plan.summary(np.log1p(errors))
    share = found.pop("within_15")
    assert share == pytest.approx(stated[kind]["within_15"], abs=1.1 / len(rows)), "one may be rounded to the border"
    assert found == pytest.approx({name: stated[kind][name] for name in found}, abs=2e-4)
    if kind == fit_plan.SUBMITTER:
        assert stated[kind]["mean"] < 0.075
        assert stated[kind]["median"] < 0.045
    bands = {fit_plan.SUBMITTER: load().error_90, fit_plan.GPU: load().unseen_error_90}
    if kind in bands:
        assert (np.abs(np.log1p(errors)) <= bands[kind] + 1e-3).mean() >= 0.89


def test_document_and_picture(rows, stated, tmp_path):
    assert fit_plan.document(load(), 171, stated) == PATH.read_text()
    fit_plan.draw(tmp_path / "errors.svg", rows, np.zeros(len(rows)))
    assert (tmp_path / "errors.svg").read_text().lstrip().startswith("<?xml")
