"""Limits and the state that a checkpoint carries."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbert.runs.progress import Limits, Pace, TrainState

LIMITS = Limits(target_accuracy=0.5, max_steps=10, max_samples=1000, max_seconds=60.0, max_skipped_steps=2)


@pytest.mark.parametrize(
    ("state", "seconds", "reason"),
    [
        (TrainState(step=9, samples=999, skipped_steps=2), 59.9, None),
        (TrainState(step=10), 0, "MAX_STEPS 10 reached"),
        (TrainState(samples=1000), 0, "MAX_SAMPLES_TERMINATION 1000 reached"),
        (TrainState(), 60.0, "MAX_SECONDS 60.0 reached"),
        (TrainState(skipped_steps=3), 0, "3 steps had non-finite gradients"),
    ],
)
def test_limits(state, seconds, reason):
    assert LIMITS.reached(state, seconds) == reason
    assert dataclasses.replace(LIMITS, max_seconds=None).reached(TrainState(), 1e9) is None


def test_state_survives_json():
    state = TrainState(step=3, samples=77, accuracy=0.123456789, train_seconds=1.5)
    copy = TrainState()
    copy.restore(json.loads(json.dumps(state.to_json())))
    assert copy == state


@pytest.mark.parametrize("value", [None, "1", True, -1, math.nan, math.inf, [1]])
@pytest.mark.parametrize("name", ["step", "next_eval_samples", "train_seconds"])
def test_a_wrong_entry_changes_nothing(name, value):
    state = TrainState(step=3)
    with pytest.raises(ValueError, match=name):
        state.restore({**TrainState(step=9).to_json(), name: value})
    assert state == TrainState(step=3)


@given(st.floats(0.1, 1e4), st.floats(0, 1e4))
def test_slow_evaluations_leave_time_to_train(every, took):
    pace = Pace(100.0, 0.1, 0.5, every, 60.0)
    assert not pace.evaluates(0.99 * every, took)
    assert not pace.evaluates(9.9 * took, took) or took == 0
    assert pace.evaluates(1.01 * max(every, 10 * took), took)
