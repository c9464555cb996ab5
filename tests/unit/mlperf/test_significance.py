"""Whether two sets of runs differ: test and interval say the same, and agree with the tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbert.mlperf.compare import compare

NUMBERS = st.lists(st.integers(1000, 1400), min_size=1, max_size=12, unique=True)


@given(a=NUMBERS, b=NUMBERS)
def test_the_interval_leaves_out_one_where_the_test_finds_a_difference(a: list[int], b: list[int]) -> None:
    b = [value + 0.5 for value in b]  # no ties
    ratio = compare(a, b)
    assert ratio is not None
    assert min(b) / max(a) <= ratio.value <= max(b) / min(a)
    if min(len(a), len(b)) < 3:
        assert (ratio.p, ratio.low, ratio.is_significant) == (None, None, False)
    elif ratio.low is None or ratio.high is None:
        assert not ratio.is_significant, "so few runs cannot differ at 5 %"
    else:
        assert ratio.low <= ratio.value <= ratio.high
        assert ratio.is_significant == (not ratio.low <= 1 <= ratio.high)


@pytest.mark.parametrize(("runs", "critical"), [(3, None), (4, 0), (5, 2), (8, 13), (10, 23)])
def test_the_interval_is_that_of_the_tables(runs: int, critical: int | None) -> None:
    """Critical values of U at 5 %, two-sided, as printed in any table of Mann and Whitney's test."""
    ratio = compare([1.0] * runs, [100 * n + m / runs for n in range(1, 2) for m in range(runs)])
    assert ratio is not None
    expected = None if critical is None else sorted(100 + m / runs for m in range(runs) for _ in range(runs))[critical]
    assert ratio.low == expected


def test_ties_and_missing_numbers() -> None:
    assert compare([], [1.0]) is None
    same = compare([2.0] * 10, [2.0] * 10)
    assert same is not None
    assert (same.value, same.low, same.high, same.p) == (1.0, 1.0, 1.0, 1.0)
    apart = compare([1.0] * 10, [2.0] * 10)
    assert apart is not None
    assert apart.is_significant


def test_many_runs_take_no_time() -> None:
    """The normal distribution gives the interval that the exact one gives, which 51 x 50 runs still have quickly."""
    ratio = compare(range(1000, 1050), range(1000, 1051))
    assert ratio is not None
    pairs = sorted(b / a for a in range(1000, 1050) for b in range(1000, 1051))
    assert (ratio.low, ratio.high) == (pairs[986], pairs[-1 - 986])
    assert compare(range(1000, 1400), range(1000, 1400)) is not None
