"""Honest sets of every kind are accused of nothing, and copies in them are found."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from honest_sets import KINDS, Drawn, as_set, draw_set, honest_set
from mlaudit.checks import chance
from mlaudit.checks.duplicate_runs import check_copies
from mlaudit.findings import Complaint, Outcome
from mlaudit.result_set import ResultSet

NUM_SETS = 10_000
Copy = Callable[[Drawn, Drawn], Drawn]


def accused(results: ResultSet) -> list[Complaint]:
    return [found for found in check_copies(results) if found.outcome is Outcome.ERROR]


@pytest.mark.parametrize("kind", KINDS)
def test_honest_sets_are_not_accused(kind: str) -> None:
    for number in range(40):
        assert accused(honest_set(kind, number)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_none_of_ten_thousand_honest_sets_is_accused(kind: str) -> None:
    wrong = [n for n in range(math.ceil(NUM_SETS / len(KINDS))) if accused(honest_set(kind, n))]
    assert wrong == []


def whole(own: Drawn, model: Drawn) -> Drawn:
    return replace(copy.deepcopy(model), seed=own.seed)


def disguised(own: Drawn, model: Drawn) -> Drawn:
    """Return a copy with other times, each accuracy changed by up to 1e-5."""
    number = min(len(own.samples), len(model.samples))
    jitter = np.random.default_rng(1).uniform(-1e-5, 1e-5, number)
    return replace(
        own,
        accuracies=model.accuracies[:number] + jitter,
        samples=own.samples[:number],
        intervals=own.intervals[:number],
    )


def faster(own: Drawn, model: Drawn) -> Drawn:
    """Return a run with own numbers and the times of another, 7 % faster."""
    number = min(len(own.samples), len(model.samples))
    return replace(
        own,
        accuracies=own.accuracies[:number],
        samples=own.samples[:number],
        intervals=np.round(
            np.diff(np.round(np.cumsum(model.intervals[:number]) * 0.93), prepend=0)
        ),
    )


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"plateau", "one seed"}))
@pytest.mark.parametrize("make", [whole, disguised])
def test_a_copy_in_an_honest_set_is_found(kind: str, make: Copy) -> None:
    """At least 19 of 20; a run that diverged proves nothing, and is not copied here."""
    found = []
    for number in range(60):
        runs = draw_set(kind, 1000 + number)
        if len(runs[-1].samples) < 8:
            continue
        runs.append(make(replace(runs[0], seed=10_001), runs[-1]))
        is_varied = len(set(np.round(runs[-2].accuracies, 4))) > 0.8 * len(runs[-2].accuracies)
        if is_varied:
            found.append(bool(accused(as_set(runs))))
    assert len(found) >= 10
    assert sum(found) >= 0.95 * len(found)


def test_copied_times_are_found_unless_all_runs_are_that_even() -> None:
    found = []
    for number in range(60):
        runs = draw_set("usual", 2000 + number)
        stamps = {int(value) for run in runs for value in run.intervals}
        if len(runs) >= 5 and len(runs[0].samples) >= 10 and math.gcd(*stamps) == 1:
            runs.append(faster(replace(runs[0], seed=10_001), runs[-1]))
            found.append(bool(accused(as_set(runs))))
    assert len(found) >= 8
    assert sum(found) >= 0.7 * len(found)


def pair(**changes: object) -> list[Complaint]:
    """Return what is found if run 3 of a usual set has something of run 1."""
    runs = draw_set("usual", 6)
    assert len(runs) == 10
    own = runs[3]
    model = runs[1]
    number = min(len(own.samples), len(model.samples))
    columns = {
        name: (getattr(model, name) if name in changes else getattr(own, name))[:number]
        for name in ("accuracies", "samples", "intervals")
    }
    runs[3] = Drawn(**columns, seed=model.seed if "seed" in changes else own.seed)
    return list(check_copies(as_set(runs)))


def test_two_runs_of_one_logged_seed_may_repeat_each_other_but_not_their_times() -> None:
    (mild,) = pair(accuracies=True, samples=True, seed=True)
    assert mild.outcome is Outcome.WARN
    (severe,) = pair(accuracies=True, samples=True, intervals=True, seed=True)
    assert severe.outcome is Outcome.ERROR
    (other_seed,) = pair(accuracies=True, samples=True)
    assert other_seed.outcome is Outcome.ERROR
    assert "honest sets have less than 1e-12 of that" in other_seed.text


def test_one_order_of_the_data_is_a_warning_and_a_part_of_it_an_error() -> None:
    (mild,) = pair(samples=True)
    assert (mild.outcome, mild.honest) == (Outcome.WARN, "all runs read the data in one order")
    runs = draw_set("usual", 6)
    number = min(len(runs[1].samples), len(runs[3].samples))
    runs[3].samples[3:number] = runs[1].samples[3:number]
    (severe,) = accused(as_set(runs))
    assert "sample counts, which vary with packing" in severe.text


def test_the_part_of_a_diverged_run_before_it_diverged_proves_a_copy() -> None:
    runs = draw_set("usual", 6)
    for run in runs[1:4:2]:
        run.accuracies[8:] = 0.0445678
    assert accused(as_set(runs)) == []
    runs[3].accuracies[2:7] = runs[1].accuracies[2:7]
    (found,) = accused(as_set(runs))
    assert ": 5 accuracies, up to line " in found.text


def test_equal_times_of_an_even_machine_are_a_warning() -> None:
    runs = draw_set("usual", 6)
    for run in runs:
        run.intervals[:] = 12_001 + np.arange(len(run.intervals)) % 2
    (found,) = check_copies(as_set(runs))
    assert found.outcome is Outcome.WARN
    assert "and so are those of 44 more pairs" in found.text


def test_whole_multiples_of_the_batch_prove_nothing_but_accuracies_do() -> None:
    runs = draw_set("multiples", 3)
    assert list(check_copies(as_set(runs))) == []
    number = min(len(run.samples) for run in runs[:2])
    runs[1].accuracies[:number] = runs[0].accuracies[:number]
    assert len(accused(as_set(runs))) == 1


def test_the_model_expects_what_independent_runs_have() -> None:
    """Runs of 30 values on a lattice: equal pairs in a row, expected and found in 200 sets."""
    random = np.random.default_rng(5)
    length = 2
    expected = found = 0.0
    for _ in range(200):
        runs = np.round(random.normal(0, 10, (6, 30)))
        rows = [runs[i] - runs[j] for i in range(6) for j in range(i)]
        widths = (5.0, 20.0, 60.0)
        counts = np.sum([chance.count_stretches(row, length, widths) for row in rows], axis=0)
        expected += chance.expected_stretches(counts, length, 1.0, 0.0, widths)
        found += sum(int(chance.count_stretches(row, length, (0.0,))[0]) for row in rows)
    assert found > 50
    assert 0.5 < expected / found < 3


def test_the_density_bounds_the_noise_of_a_run() -> None:
    """Normal noise has a density of 0.4 / spread; a drift does not hide it."""
    random = np.random.default_rng(6)
    noise = random.normal(0, 50, 40)
    for drift in (0, 10_000):
        density = chance.density_of(list(noise + drift * np.arange(40) / 40))
        assert 0.5 * 0.4 / 50 < density < 4 * 0.4 / 50
    assert chance.density_of([1.0, 2.0]) == math.inf
    assert chance.density_of([7.0] * 20) == math.inf


def test_steps_of_values() -> None:
    assert chance.accuracy_step([0.5, 0.50003, 0.6]) == pytest.approx(3e-5)
    assert chance.accuracy_step([0.5]) == chance.SMALLEST_STEP
    assert chance.count_step([1536.0, 768.0]) == 768
    assert chance.count_step([1536.5, 768.0]) == 1
    assert chance.time_step([12_000.0, 3_000.0]) == 3_000
    assert chance.length_needed(1e-4, 0.1, 100) == 7
    assert chance.length_needed(1e-4, 1.0, 100) == math.inf
