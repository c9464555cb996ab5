"""Masking rates: ends, shapes, and that they stay after the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbert.config.sections import settings_by_key
from mlbert.data.loading.text_run import SHAPES, MaskingRate

STEPS = 100


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.3, 0.3, 0.3, 0.3, 0.3]),
        ("linear", [0.3, 0.2625, 0.225, 0.1875, 0.15]),
        ("cosine", [0.3, 0.27803300858899106, 0.225, 0.17196699141100894, 0.15]),
        ("step", [0.3, 0.3, 0.15, 0.15, 0.15]),
    ],
)
def test_quarters(schedule, expected):
    rate = MaskingRate(schedule, 0.3, 0.15, STEPS)
    assert [rate(step) for step in (0, 25, 50, 75, 100)] == pytest.approx(expected, abs=1e-12)
    assert rate(10 * STEPS) == rate(STEPS)


@given(st.sampled_from(sorted(SHAPES)), st.integers(0, 200), st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_between_the_ends(schedule, step, first, last):
    rate = MaskingRate(schedule, first, last, STEPS)(step)
    assert min(first, last) - 1e-12 <= rate <= max(first, last) + 1e-12


def test_the_settings_offer_these():
    assert set(settings_by_key()["masking_schedule"].choices) == set(SHAPES)
