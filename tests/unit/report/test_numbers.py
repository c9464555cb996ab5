"""The numbers of a report against logs whose numbers are known: means, times, speeds, the reference, settings."""

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbert.mlperf.rules import reference_point
from mlbert.report.results import FASTEST, MISSED, SLOWEST, nearest_hyperparameters, read_result, scaling
from mlbert.report.runs import read_run, read_systems, thin
from simple_logs import write_log


def result_of(folder):
    (system,) = read_systems([folder])
    return read_result(system)


def write_runs(folder, seconds, missed=(), samples=lambda index: 100):
    for index, end in enumerate(seconds):
        status = "aborted" if index in missed else "success"
        write_log(folder / f"result_{index}.txt", [(samples(index), end, 0.73)], status=status, logged={"seed": index})


def write_summary(folder, rate):
    (folder / "run_0").mkdir()
    (folder / "run_0/summary.json").write_text(json.dumps({"samples": 100, "samples_per_second": rate}))


@pytest.mark.parametrize(
    ("seconds", "missed", "mean", "marks"),
    [
        ([10, 20, 30, 40], (), 25.0, {"0": FASTEST, "3": SLOWEST}),
        ([10, 20, 30, 40], (1,), 35.0, {"0": FASTEST, "1": MISSED}),
        ([10, 20, 30, 40], (1, 2), math.inf, {"0": FASTEST, "1": MISSED, "2": MISSED}),
        ([10, 20], (), None, {}),
    ],
)
def test_olympic_mean_and_what_it_leaves_out(tmp_path, seconds, missed, mean, marks):
    write_runs(tmp_path, seconds, missed)
    result = result_of(tmp_path)
    assert result.olympic_seconds == mean
    assert result.marks == marks


def test_speeds_and_times_leave_evaluations_out(tmp_path):
    write_log(tmp_path / "result_0.txt", [(100, 11.5, 0.5), (300, 22.5, 0.72)], seconds=23.0)
    (run,) = result_of(tmp_path).runs
    # Training: 0.5 (block_start) to 10.5, then 11.5 to 21.5; each evaluation takes 1 s.
    assert run.speeds == [(100, 10.0), (300, 20.0)]
    assert (run.times.untimed, run.times.start, run.times.evaluation, run.times.other) == (5.0, 0.5, 2.0, None)
    assert run.times.training == pytest.approx(20.5)
    write_log(tmp_path / "result_0.txt", [(100, 10.5, 0.5), (300, 20.5, 0.72)], eval_seconds=None)
    (run,) = result_of(tmp_path).runs
    assert (run.speeds, run.times.evaluation) == ([(100, 10.0), (300, 20.0)], None), "there is no eval_start"


def test_the_summary_shows_pauses_between_steps(tmp_path):
    write_log(tmp_path / "result_0.txt", [(100, 11.5, 0.72)])
    write_summary(tmp_path, rate=12.5)
    (run,) = result_of(tmp_path).runs
    assert (run.times.training, run.times.other) == (8.0, 2.0)


@given(
    gaps=st.lists(st.floats(1.0, 1e4), min_size=1, max_size=8),
    rest=st.floats(0, 100),
    eval_seconds=st.one_of(st.none(), st.floats(0.001, 0.9)),
    rate=st.one_of(st.none(), st.floats(1e-3, 1e6)),
)
def test_times_add_up_to_the_time_to_train(tmp_path_factory, gaps, rest, eval_seconds, rate):
    ends = list(itertools.accumulate(gaps))
    evaluations = [(100 * index, end, 0.1) for index, end in enumerate(ends, start=1)]
    folder = tmp_path_factory.mktemp("times")
    write_log(folder / "result_0.txt", evaluations, eval_seconds=eval_seconds, seconds=ends[-1] + rest)
    if rate is not None:
        write_summary(folder, rate)
    (run,) = result_of(folder).runs
    parts = (run.times.start, run.times.training, run.times.evaluation or 0, run.times.other or 0)
    assert math.fsum(parts) == pytest.approx(run.seconds, abs=1e-6)
    assert min(parts) >= -1e-6


def test_reference_and_score_factor_are_the_official_ones(tmp_path):
    """The factor is that of Dell's published scaling.json for 2 x XE9712 in v5.0: batch 768, 2361776.125 samples."""
    point = reference_point(768)
    assert scaling(2361776.125, point) == pytest.approx(1.0347862833364607, rel=1e-8)
    assert scaling(point.mean_samples + 1, point) == 1.0
    assert scaling(point.min_mean_samples - 1, point) is None
    write_runs(tmp_path, [10.0] * 10, missed=(9,), samples=lambda index: 2_400_000 + index)
    result = result_of(tmp_path)
    assert result.reference.global_batch_size == 448
    # Of ten runs the fewest samples and the one that missed the target are left out.
    assert result.mean_samples == 2_400_004.5
    assert result.scaling == pytest.approx(result.reference.mean_samples / 2_400_004.5)


def test_hyperparameters_that_differ_are_reported(tmp_path):
    batch, values = nearest_hyperparameters(460)
    assert (batch, values["opt_base_learning_rate"]) == (448, 0.000425)
    for index, rate in enumerate((0.000425, 0.0005)):
        logged = {"opt_base_learning_rate": rate, "opt_lamb_beta_1": 0.9, "seed": index}
        write_log(tmp_path / f"result_{index}.txt", logged=logged)
    values = result_of(tmp_path).hyperparameters
    assert values["opt_base_learning_rate"].text == "0.000425, 0.0005"
    assert values["opt_base_learning_rate"].differs
    assert not values["opt_lamb_beta_1"].differs
    assert result_of(tmp_path).reference_hyperparameters[0] == 448


def test_share_of_a_published_peak(tmp_path):
    """According to v4.1, 996 samples/s are 50.2 % of the dense 16-bit peak of an H200."""
    samples = 996 * 8 * 300
    write_log(tmp_path / "results" / "x" / "bert" / "result_0.txt", [(samples, 300.0, 0.72)])
    facts = {"number_of_nodes": "1", "accelerators_per_node": "8", "accelerator_model_name": "NVIDIA H200-SXM5"}
    (tmp_path / "systems").mkdir()
    (tmp_path / "systems" / "x.json").write_text(json.dumps(facts))
    (share,) = result_of(tmp_path).peak_shares.values()
    assert share == pytest.approx(0.502, abs=5e-4)


def test_systems_of_the_same_name_are_distinguished(tmp_path):
    for folder in ("a/results/x/bert", "a/results/y/bert", "b/results/x/bert"):
        write_log(tmp_path / folder / "result_0.txt")
    tree, other = tmp_path / "a", tmp_path / "b" / "results" / "x" / "bert"
    assert [system.name for system in read_systems([tree, tree])] == ["x", "y"]
    names = [system.name for system in read_systems([tree, other])]
    assert len(set(names)) == 3
    assert all(name.endswith(("/x", "/y")) for name in names)


def test_thin_keeps_both_ends():
    points = [(index, index) for index in range(5000)]
    assert thin(points, 10)[0] == points[0]
    assert thin(points, 10)[-1] == points[-1]
    assert len(thin(points, 10)) == 10
    assert thin(points[:3], 10) == points[:3]


@pytest.mark.parametrize("value", [True, "x", None, [1], float("nan"), float("inf"), 10**400])
def test_a_run_with_non_numeric_values_has_no_numbers(tmp_path, value):
    log = write_log(tmp_path / "result_0.txt", [(value, 10.0, value)], logged={"global_batch_size": value})
    result = result_of(log)
    assert result.batch is None
    assert result.runs[0].evaluations == []
    assert read_run(result.runs[0].source).samples is None
