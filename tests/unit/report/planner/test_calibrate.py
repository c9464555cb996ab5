"""Calibration: the speed from a log's times, the two parts of a step, recovering a GPU's numbers."""

import dataclasses

import pytest

from mlbert.report.planner import calibrate, timing
from mlbert.report.planner.calibrate import MeasuredRun
from mlbert.report.planner.timing import TrainingJob, load
from user_errors import user_error

P = load()


def test_speed_between_evaluations_without_the_first_stretch():
    evaluations = [(10.0, 11.0, 100.0), (13.0, 14.0, 300.0), (17.0, 18.0, 600.0)]
    found = calibrate.measured(2, 20, 0.0, evaluations, 600.0)
    assert (found.sequences_per_second, found.evaluation_seconds, found.samples) == (100.0, 1.0, 600.0)
    assert found.step_ms == pytest.approx(200)
    assert calibrate.measured(1, 20, 0.0, evaluations[:1], None).sequences_per_second == 10.0
    with pytest.raises(ValueError, match="no training"):
        calibrate.measured(1, 20, 0.0, [], None)


def as_if_measured(true, job):
    step = timing.step(job, true)
    return MeasuredRun(job.gpus, job.batch, job.batch / step.total * 1e3, timing.evaluation_seconds(job, true), None)


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_gpus_numbers_are_found_again(nodes):
    true = dataclasses.replace(
        P,
        sequence_ms={**P.sequence_ms, "h200": 0.6},
        constant_ms={**P.constant_ms, "later": 9.0},
        evaluation_gpu_seconds={**P.evaluation_gpu_seconds, "h200": 5.0},
    )
    job = TrainingJob("h200", 8 * nodes, nodes, 384 * nodes)
    runs = [as_if_measured(true, job), as_if_measured(true, dataclasses.replace(job, batch=768 * nodes))]
    found = calibrate.calibrated(P, job, runs)
    assert found.sequence_ms["h200"] == pytest.approx(0.6, rel=1e-6)
    assert found.constant_ms["later"] == pytest.approx(9.0, rel=1e-6)
    assert found.evaluation_gpu_seconds["h200"] == pytest.approx(5.0)


def test_one_log_keeps_the_constant_part_and_must_be_of_the_job():
    job = TrainingJob("h200", 8, 1, 768, fp8=False)
    found = calibrate.calibrated(P, job, [as_if_measured(P, job)])
    assert found.constant_ms == pytest.approx(P.constant_ms)
    assert found.sequence_ms == pytest.approx(P.sequence_ms)
    with user_error("config.conflict", "--calibrate"):
        calibrate.calibrated(P, dataclasses.replace(job, fp8=True), [MeasuredRun(8, 768, 1.0, None, None)])
