"""The planner's model, its calibration and its fitted numbers,
which the published table gives again.
"""

import csv
import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fit_plan
from mlaudit.planner import calibrate, request, timing
from mlaudit.planner import cost as memory
from mlaudit.planner.calibrate import MeasuredRun
from mlaudit.planner.cost import Prices, estimate
from mlaudit.planner.gpus import GPUS
from mlaudit.planner.timing import PATH, TrainingJob, load
from mlbert.mlperf import rules
from user_errors import user_error

P = load()
LARGE = timing.named("large")
HELD_OUT = fit_plan.ROOT / "records/2026-11-26_plan-held-out_epyc-2cpu/held_out.csv"
STATED = json.loads(PATH.read_text())["provenance"]["held_out"]


def ask(job, shape=LARGE, needed=None, prices=None):
    return estimate(job, shape, P, prices or Prices(), needed)


@given(st.sampled_from(sorted(GPUS)), st.integers(1, 64), st.integers(256, 16384))
def test_parts_are_positive_and_a_larger_batch_is_never_faster_a_step(gpu, nodes, batch):
    gpus = nodes * GPUS[gpu].per_node
    small, large = (
        timing.step(TrainingJob(gpu, gpus, nodes, size), P) for size in (batch, 2 * batch)
    )
    assert 0 < small.total < large.total < 2 * small.total
    assert small.network >= 0
    assert large.compute == pytest.approx(2 * small.compute)


def test_network():
    def cost(gpu, gpus, nodes, gbps=None):
        return timing.step(TrainingJob(gpu, gpus, nodes, 4608, gbps), P).network

    assert cost("h100-sxm", 8, 1) == 0
    assert cost("gb200", 64, 16) == 0, "one NVLink domain"
    assert cost("gb200", 128, 32) > 0
    assert cost("h100-sxm", 64, 8, 1600) == pytest.approx(2 * cost("h100-sxm", 64, 8, 3200))
    assert cost("a100-pcie", 16, 4, 100) == pytest.approx(2 * cost("a100-pcie", 16, 4, 400)), (
        "root of the bandwidth"
    )
    assert cost("h100-sxm", 64, 8) == cost("h100-sxm", 64, 8, 3200)
    assert cost("a100-sxm", 64, 16, 400) > 1.5 * cost("a100-sxm", 64, 8, 400), (
        "no switch in the node"
    )


def test_known_results_are_near():
    """The score of eight H100, the record, and the FLOPs without the unused rows of the last
    layer.
    """
    assert LARGE.flops == pytest.approx(0.4986e12, rel=0.04)
    assert ask(TrainingJob("h100-sxm", 8, 1, 768)).seconds / 60 == pytest.approx(5.4, rel=0.1)
    assert ask(TrainingJob("h100-sxm", 3472, 434, 13888)).seconds == pytest.approx(7.14, rel=0.1)


def test_samples_follow_the_reference_from_the_rules_points_on_and_software_matters():
    for point in rules.REFERENCE_POINTS:
        least = rules.reference_point(point.global_batch_size).mean_samples
        found = timing.samples(TrainingJob("h200", 128, 16, point.global_batch_size), P)
        assert found == pytest.approx(max(P.samples_share * point.mean_samples, least))
    job = TrainingJob("a100-sxm", 8, 1, 768)
    old = dataclasses.replace(job, round="1.1")
    assert timing.samples(old, P) > timing.samples(job, P)
    assert timing.step(old, P).compute > timing.step(job, P).compute
    hopper = TrainingJob("h200", 8, 1, 768)
    assert (
        timing.step(dataclasses.replace(hopper, fp8=False), P).compute
        > timing.step(hopper, P).compute
    )
    with pytest.raises(ValueError, match="20000"):
        timing.samples(TrainingJob("h200", 8, 1, 20000), P)


def test_bands_cost_and_energy():
    found = ask(TrainingJob("h200", 64, 8, 4608), prices=Prices(3.0, 1000.0))
    low, high = found.score_band
    run_low, run_high = found.run_band
    assert run_low < low < found.seconds < high < run_high
    assert high / found.seconds == pytest.approx(math.exp(P.error_90))
    assert found.dollars == pytest.approx(64 * found.seconds / 3600 * 3)
    assert found.kilowatt_hours == pytest.approx(64 * found.seconds / 3600)
    assert ask(TrainingJob("h200", 64, 8, 4608)).dollars is None


def test_a_gpu_without_results_is_estimated_by_its_peak_with_a_wide_band():
    job = TrainingJob("rtx4090", 8, 1, 256)
    step = timing.step(job, P)
    rate = job.sequences / step.compute * 1e3
    assert rate * timing.FLOPS / (GPUS["rtx4090"].peak_tflops * 1e12) == pytest.approx(
        P.efficiency["pcie"], rel=1e-3
    )
    found = ask(job)
    assert found.score_band[1] / found.seconds == pytest.approx(math.exp(P.unseen_error_90))
    assert P.unseen_error_90 > P.error_90


def test_limits():
    assert ask(TrainingJob("h200", 8, 1, 768)).limit == "compute"
    assert ask(TrainingJob("h200", 1024, 128, 16384)).limit == "convergence"
    assert ask(TrainingJob("h200", 1024, 128, 4096)).limit == "constant part of a step"
    assert ask(TrainingJob("h200", 256, 32, 4608, network_gbps=10)).limit == "network"


def test_memory_counts_states_and_cuts_a_step_into_micro_batches():
    one, two = (memory.of(LARGE.config, "h200", size, 1, fp8=False) for size in (100, 200))
    assert two.activations == pytest.approx(2 * one.activations)
    assert one.optimizer == pytest.approx(12 * LARGE.config.num_parameters / 1e9)
    assert memory.of(LARGE.config, "h200", 100, 8, fp8=False).optimizer == pytest.approx(
        one.optimizer / 8
    )
    assert (
        memory.of(LARGE.config, "h200", one.most_sequences, 1, fp8=False).total <= 0.92 * 141 + 1e-6
    )
    cut = ask(TrainingJob("h100-sxm", 1, 1, 768))
    assert cut.micro_batches == 3
    assert cut.memory.total < 0.92 * 80


def test_another_model_needs_its_samples():
    base = timing.named("base")
    assert 0.2 < base.work < 0.4
    assert 0.3 < base.gradient < 0.35
    job = TrainingJob("h200", 8, 1, 768, work=base.work, gradient=base.gradient)
    assert (
        ask(job, base, needed=2e6).seconds < ask(TrainingJob("h200", 8, 1, 768), needed=2e6).seconds
    )
    with user_error("config.choice", "--model"):
        timing.named("huge")


def test_sweep_gets_faster_and_a_budget_buys_the_fastest_that_it_pays():
    def sized(gpus, batch):
        return ask(TrainingJob("h200", gpus, -(-gpus // 8), batch), prices=Prices(3.5))

    found = request.sweep(sized)
    assert [item.job.gpus for item in found] == list(request.GPU_COUNTS)
    seconds = [item.seconds for item in found]
    assert seconds == sorted(seconds, reverse=True)
    cheapest, fastest = request.within(found, 4.0)
    assert cheapest.dollars == min(item.dollars for item in found)
    assert fastest.seconds == min(item.seconds for item in found if item.dollars <= 4.0)
    with user_error("plan.impossible", "--budget"):
        request.within(found, 0.01)


def test_speed_between_evaluations_without_the_first_stretch():
    evaluations = [(10.0, 11.0, 100.0), (13.0, 14.0, 300.0), (17.0, 18.0, 600.0)]
    found = calibrate.measured(2, 20, 0.0, evaluations, 600.0)
    assert (found.sequences_per_second, found.evaluation_seconds, found.samples) == (
        100.0,
        1.0,
        600.0,
    )
    assert found.step_ms == pytest.approx(200)
    assert calibrate.measured(1, 20, 0.0, evaluations[:1], None).sequences_per_second == 10.0
    with pytest.raises(ValueError, match="no training"):
        calibrate.measured(1, 20, 0.0, [], None)


def as_if_measured(true, job):
    step = timing.step(job, true)
    return MeasuredRun(
        job.gpus,
        job.batch,
        job.batch / step.total * 1e3,
        timing.evaluation_seconds(job, true),
        None,
    )


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_gpus_numbers_are_found_again(nodes):
    true = dataclasses.replace(
        P,
        sequence_ms={**P.sequence_ms, "h200": 0.6},
        constant_ms={**P.constant_ms, "later": 9.0},
        evaluation_gpu_seconds={**P.evaluation_gpu_seconds, "h200": 5.0},
    )
    job = TrainingJob("h200", 8 * nodes, nodes, 384 * nodes)
    runs = [
        as_if_measured(true, job),
        as_if_measured(true, dataclasses.replace(job, batch=768 * nodes)),
    ]
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
        calibrate.calibrated(
            P, dataclasses.replace(job, fp8=True), [MeasuredRun(8, 768, 1.0, None, None)]
        )


@pytest.fixture(scope="module")
def rows():
    return fit_plan.read()


@pytest.fixture(scope="module")
def record():
    with HELD_OUT.open(newline="") as file:
        return list(csv.DictReader(file))


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
    again = dataclasses.asdict(fit_plan.fit(rows))
    stored = dataclasses.asdict(P)
    for name in stored.keys() - {"error_90", "unseen_error_90"}:
        assert again[name] == pytest.approx(stored[name], rel=0.01), name


@pytest.mark.slow
def test_the_error_without_a_submitter_is_that_of_the_record(rows, record):
    recorded = [line for line in record if " Cisco " in line["system"]]
    (found,) = fit_plan._without(rows, fit_plan.SUBMITTER, "Cisco")
    assert np.expm1(found) == pytest.approx(
        float(recorded[0]["error_without_its_submitter"]), abs=0.02
    )


@pytest.mark.parametrize("kind", [fit_plan.SUBMITTER, fit_plan.ROUND, fit_plan.GPU])
def test_the_stated_errors_are_those_of_the_record(rows, record, kind):
    assert [line["system"] for line in record] == [row.name for row in rows]
    errors = np.array([float(line[f"error_without_its_{kind}"]) for line in record])
    found = fit_plan.summary(np.log1p(errors))
    share = found.pop("within_15")
    assert share == pytest.approx(STATED[kind]["within_15"], abs=1.1 / len(rows)), (
        "one may be rounded to the border"
    )
    assert found == pytest.approx({name: STATED[kind][name] for name in found}, abs=2e-4)
    if kind == fit_plan.SUBMITTER:
        assert STATED[kind]["mean"] < 0.075
        assert STATED[kind]["median"] < 0.045
    bands = {fit_plan.SUBMITTER: P.error_90, fit_plan.GPU: P.unseen_error_90}
    if kind in bands:
        assert (np.abs(np.log1p(errors)) <= bands[kind] + 1e-3).mean() >= 0.89


def test_the_errors_by_kind_of_system_are_those_of_the_record(rows, record):
    errors = np.array([float(line["error_without_its_submitter"]) for line in record])
    found = fit_plan.by_kind(rows, np.log1p(errors))
    assert found == pytest.approx(timing.held_out_by_kind(), abs=2e-4)
    assert list(found) == list(timing.held_out_by_kind())


def test_the_page_for_planning_begins_with_the_error_to_expect():
    page = (fit_plan.ROOT / "docs/plan.md").read_text()
    assert request.expected_error() in " ".join(page.split())


def test_document_and_picture(rows, tmp_path):
    assert fit_plan.document(P, 171, STATED, timing.held_out_by_kind()) == PATH.read_text()
    fit_plan.draw(tmp_path / "errors.svg", rows, np.zeros(len(rows)))
    assert (tmp_path / "errors.svg").read_text().lstrip().startswith("<?xml")
