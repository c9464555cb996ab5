"""What a step counted is taken back when its update turns out to be left out, whenever that becomes known."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mlbert.runs.progress import StepCounts, TrainState
from mlbert.training.sample_counter import SampleCounter
from mlbert.training.step import StepResult


def result(norm: float) -> StepResult:
    return StepResult(torch.zeros((), dtype=torch.float64), torch.tensor(norm, dtype=torch.float64))


@example([(True, True, 1)])
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 50)), max_size=20))
def test_only_steps_that_updated_count(steps):
    """However often the counter settles in between; each skipped step is reported once."""
    state, found = TrainState(), []
    sample_counter = SampleCounter(state, lambda now: found.append(now.step))
    for skipped, settles, samples in steps:
        sample_counter.count(result(math.nan if skipped else 1.0), StepCounts(samples, 2 * samples, 3 * samples))
        if settles:
            sample_counter.settle()
            assert not sample_counter.is_open
    sample_counter.settle()
    kept = sum(samples for skipped, _, samples in steps if not skipped)
    assert (state.samples, state.tokens, state.flops) == (kept, 2 * kept, 3 * kept)
    assert state.step == len(steps)
    assert found == [number for number, (skipped, *_) in enumerate(steps, start=1) if skipped]
    assert state.skipped_steps == len(found)


@pytest.mark.parametrize("norm", [math.inf, -math.inf, math.nan])
def test_non_finite_steps_are_skipped(norm):
    assert result(norm).skipped
