"""The grid of evaluations in closed, honest and not, and what an evaluation may lack."""

import math
import random
from pathlib import Path

import pytest

from audit import expect
from edited_logs import OWN_LOGS, committed, report, simulated
from log_edits import Run, drop, each, mark, nth, put
from mlaudit.checks.evaluation import check_grid
from mlaudit.findings import Complaint, Outcome
from mlbert.mlperf.rules import eval_interval

ERROR = Outcome.ERROR
WARN = Outcome.WARN
BATCHES = (96, 448, 576, 768, 1024, 1536, 4608, 6144, 8192, 16384)
NUM_EVALUATIONS = 20


def only(count: int, run: Run) -> None:
    """Leave out the later evaluations."""
    for key in ("eval_start", "eval_stop", "eval_accuracy"):
        for line in [line for line in run if line["key"] == key][count:]:
            run.remove(line)


def test_success_without_a_known_target_at_the_first_evaluation(tmp_path: Path) -> None:
    runs = simulated(3)
    for run in runs:
        nth(run, "submission_division")["value"] = "open"
    only(1, runs[3])
    put("train_samples", nth(runs[3], "eval_accuracy")["metadata"]["epoch_num"])(runs)
    words = "success at the very first evaluation; the target is not known"
    expect(report(runs, tmp_path), "accuracies", WARN, words)


def test_epoch_numbers_that_count_no_samples_are_a_warning(tmp_path: Path) -> None:
    runs = simulated(4)
    for run in runs:
        nth(run, "submission_division")["value"] = "open"
        for line in run:
            if "epoch_num" in line["metadata"]:
                line["metadata"]["epoch_num"] = 1
    said = report(runs, tmp_path)
    expect(said, "evaluations", WARN, "every evaluation has epoch_num 1")
    assert not [check for check, (outcome, _) in said.items() if outcome is ERROR]


def test_an_aborted_run_may_end_anywhere(tree_root: Path, tmp_path: Path) -> None:
    runs = committed(tree_root / OWN_LOGS)
    edits = [drop(key) for key in ("block_stop", "epoch_stop", "train_samples", "eval_samples")]
    only(4, runs[3])
    each(*edits, mark("run_stop", "status", "aborted"), drop("eval_accuracy", 3))(runs)
    said = report(runs, tmp_path)
    assert said["status"][0] is WARN
    assert set(said) - {"status", "speed"} == {"same settings"}  # which misses eval_samples


def step_of(counting: str, index: int, batch: int) -> int:
    """Return the step after which a program evaluates for the n-th time, by its way of counting."""
    steps = eval_interval(batch) / batch
    return {
        "up from the grid": math.ceil(index * steps),
        "up from the last": index * math.ceil(steps),
        "down": index * math.floor(steps),
    }[counting]


def unpacked(counting: str, batch: int) -> list[int]:
    return [step_of(counting, index, batch) * batch for index in range(1, NUM_EVALUATIONS + 1)]


def packed(counting: str, batch: int, seed: int) -> list[int]:
    """Packs of 1 to 3 sequences, 1.99895 on the average as in the data set, 0.5 off in each;
    batch / 2 packs a step.
    """
    source = random.Random(seed)
    samples = 0.0
    done = 0
    points = []
    for index in range(1, NUM_EVALUATIONS + 1):
        packs = (step_of(counting, index, batch) - done) * batch / 2
        done = step_of(counting, index, batch)
        samples += source.gauss(1.99895 * packs, 0.5 * math.sqrt(packs))
        points.append(round(samples))
    return points


def errors(batch: int, points: list[int]) -> list[Complaint]:
    found = check_grid(batch, points, range(1, len(points) + 1))
    return [complaint for complaint in found if complaint.outcome is Outcome.ERROR]


@pytest.mark.parametrize("counting", ["up from the grid", "up from the last", "down"])
@pytest.mark.parametrize("batch", BATCHES)
def test_honest_schedules_raise_nothing(batch: int, counting: str) -> None:
    assert list(check_grid(batch, unpacked(counting, batch), range(100))) == []
    for seed in range(20):
        assert list(check_grid(batch, packed(counting, batch, seed), range(100))) == [], seed


@pytest.mark.parametrize(
    ("batch", "points"),
    [
        # result_4 of 2xXE9680Lx8B200-SXM-180GB (Dell)
        # and result_8 of tyche_ngpu512 (NVIDIA), MLPerf Training v5.0.
        (1536, {16: 2401909, 17: 2552072}),
        (8192, {12: 2702863, 13: 2933520}),
    ],
)
def test_points_of_published_packed_runs(batch: int, points: dict[int, int]) -> None:
    grid = [n * eval_interval(batch) for n in range(1, max(points) + 1)]
    assert errors(batch, [points.get(n, samples) for n, samples in enumerate(grid, 1)]) == []


def test_late_evaluations_are_a_warning() -> None:
    # 7920T_2xA5000_hdd (krai), MLPerf Training v5.0: the first 9 batches late, each further one 2.
    points = [154048 + n * 150912 for n in range(25)]
    (complaint,) = check_grid(448, points, range(10, 10 + len(points)))
    assert complaint.outcome is Outcome.WARN
    assert complaint.text == "line 10: evaluation 1 is late, 154048 samples after the start"
    assert "floor(0.05 x (230.23 x GBS + 3,000,000) / 25,000) x 25,000" in complaint.rule


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("is_packed", [False, True])
def test_an_evaluation_left_out_and_another_interval_are_found(batch: int, is_packed: bool) -> None:
    points = (
        packed("up from the grid", batch, 1) if is_packed else unpacked("up from the grid", batch)
    )
    for index in (0, 7, NUM_EVALUATIONS - 2):
        (complaint,) = errors(batch, points[:index] + points[index + 1 :])
        assert f"evaluation {index + 1} is at {points[index + 1]} samples" in complaint.text
    for factor in (0.5, 0.9, 1.1, 1.25, 2):
        assert errors(batch, [math.ceil(samples * factor / batch) * batch for samples in points]), (
            factor
        )
        assert errors(batch, [round(samples * factor) + is_packed for samples in points]), factor


@pytest.mark.parametrize("batch", [96, 448, 768, 1536])
def test_a_last_evaluation_brought_forward_is_found(batch: int) -> None:
    points = packed("up from the grid", batch, 1)
    points[-1] -= 10_000
    (complaint,) = errors(batch, points)
    assert complaint.text.startswith(f"line 20: evaluation 20 is at {points[-1]} samples")
    assert errors(768, [148_200 * n + 1 for n in range(1, 17)]), (
        "an interval a little too short shows in the sum"
    )
