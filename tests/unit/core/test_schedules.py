"""Schedules against what public reference programs gave (tests/assets/schedules)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbert.core import schedules

ASSETS = Path(__file__).parents[2] / "assets" / "schedules"
BENCHMARK = json.loads((ASSETS / "benchmark.json").read_text())
MULTIPLIERS = json.loads((ASSETS / "multipliers.json").read_text())
FLOAT32_REFERENCE = 1e-9


@pytest.mark.parametrize("name", BENCHMARK)
def test_polynomial_is_the_benchmarks(name: str) -> None:
    wanted, settings = BENCHMARK[name]["lr"], BENCHMARK[name]["settings"]
    assert len(wanted) == 201
    for step, lr in enumerate(wanted):
        ours = schedules.polynomial_with_warmup(
            step,
            settings["init_lr"],
            settings["num_warmup_steps"],
            settings["start_warmup_step"],
            settings["num_train_steps"],
            settings["poly_power"],
        )
        assert ours == pytest.approx(lr, abs=FLOAT32_REFERENCE), step


@pytest.mark.parametrize("case", MULTIPLIERS["cases"], ids=lambda case: case["name"])
def test_multipliers(case: dict) -> None:
    # The WSD reference begins its ramp at 1e-10 instead of 0.
    tolerance = 1.01e-10 if case["function"] == "wsd" else 1e-12
    schedule = getattr(schedules, case["function"])
    for step, factor in zip(MULTIPLIERS["steps"], case["factor"], strict=True):
        assert schedule(step, 1.0, **case["arguments"]) == pytest.approx(factor, abs=tolerance), step


def test_the_benchmarks_rate_drops_where_the_ramp_ends() -> None:
    rates = [schedules.polynomial_with_warmup(step, 2.88293e-3, 57, -15, 120, 1.0) for step in (41, 42)]
    assert rates[0] == pytest.approx(2.83e-3, abs=1e-5)
    assert rates[1] == pytest.approx(1.87e-3, abs=1e-5)


@settings(deadline=None)
@given(st.integers(0, 400), st.integers(0, 100), st.integers(-100, 0), st.integers(1, 200), st.floats(0.1, 3))
def test_a_legal_polynomial_stays_between_zero_and_base(step, warmup, start, max_steps, power) -> None:
    rate = schedules.polynomial_with_warmup(step, 1.0, warmup, start, max_steps, power)
    assert 0.0 <= rate <= 1.0


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(0, 50), st.integers(0, 50), st.integers(100, 200), st.floats(0, 1))
def test_wsd_and_linear_end_at_the_final_factor(step, warmup, decay, max_steps, final) -> None:
    for rate in (
        schedules.wsd(step, 1.0, warmup, decay, max_steps, final),
        schedules.linear(step, 1.0, warmup, max_steps, final),
    ):
        assert -1e-12 <= rate <= 1.0 + 1e-12
    assert schedules.linear(max_steps, 2.0, warmup, max_steps, final) == pytest.approx(2.0 * final)
    assert schedules.wsd(max_steps, 2.0, warmup, decay, max_steps, final) == pytest.approx(
        2.0 * (final if decay else 1)
    )
