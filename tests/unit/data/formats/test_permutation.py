"""A permutation is a bijection, the same for the same key, and looks random."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlbert.data.formats.permutation import EvenSpread, Permutation

KEYS = st.one_of(st.integers(0, 2**63), st.tuples(st.integers(0, 2**40), st.integers(0, 1000)))


@given(n=st.integers(0, 3000), key=KEYS)
@example(n=0, key=0)
@example(n=1, key=0)
@example(n=64, key=0)
@example(n=65, key=0)
@settings(max_examples=150)
def test_every_number_once(n, key):
    order = Permutation(n, key)(np.arange(n))
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(n))
    with pytest.raises(ValueError, match="out of range"):
        Permutation(-1 - n, key)


@given(n=st.integers(1, 2**50), key=KEYS, positions=st.lists(st.integers(0, 2**50), max_size=20))
@settings(max_examples=100)
def test_a_position_does_not_depend_on_which_others_are_asked(n, key, positions):
    order = Permutation(n, key)
    wanted = np.asarray(positions, np.int64) % n
    together = order(wanted)
    assert [int(order(np.asarray([position]))[0]) for position in wanted] == together.tolist()
    assert ((together >= 0) & (together < n)).all()
    assert len(set(together.tolist())) == len(set(wanted.tolist()))


def test_the_order_of_a_key_never_changes():
    # A change here changes the order of every run that is resumed.
    assert Permutation(1000, (5, 1))(np.arange(8)).tolist() == [616, 944, 118, 965, 330, 993, 106, 307]


def test_keys_give_unlike_orders():
    n = 5000
    first = Permutation(n, (1, 0))(np.arange(n))
    for key in ((1, 1), (2, 0), (0, 1), 1):
        equal = np.count_nonzero(first == Permutation(n, key)(np.arange(n)))
        assert equal < 12, key  # 1 expected; 12 or more has a chance below 1e-8


@pytest.mark.parametrize("n", [100_000, 65_536, 70_001])
def test_neighbours_do_not_stay_together(n):
    order = Permutation(n, 3)(np.arange(n))
    assert np.count_nonzero(np.abs(np.diff(order)) == 1) < 16  # 2 expected
    # For random orders the correlation has a standard deviation of 1 / sqrt(n).
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / np.sqrt(n)
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 5 / np.sqrt(n)


def test_every_place_is_as_likely_for_every_position():
    counts = np.zeros((10, 10))
    for key in range(600):
        counts[np.arange(10), Permutation(10, key)(np.arange(10))] += 1
    chi_square = ((counts - 60) ** 2 / 60).sum()  # 81 degrees of freedom
    assert abs(chi_square - 81) < 5 * np.sqrt(2 * 81)


def stride_and_denominators(n: int) -> tuple[int, list[int]]:
    """Return the stride of the order of n, and the denominators of the convergents of stride / n."""
    stride = int(EvenSpread(n)(np.asarray([1]))[0])
    above, below, denominators = n, stride, [0, 1]
    while below:
        denominators.append(above // below * denominators[-1] + denominators[-2])
        above, below = below, above % below
    return stride, denominators[1:]


@given(n=st.integers(1, 200_000), cut=st.floats(0, 1), start=st.floats(0, 1), size=st.integers(1, 500))
@example(n=764, cut=0.25, start=0, size=106)
@example(n=60_292, cut=0.5, start=0, size=378)
@settings(max_examples=100)
def test_every_number_once_and_every_stretch_visits_parts_in_proportion(n, cut, start, size):
    assert np.array_equal(np.sort(EvenSpread(n)(np.arange(n))), np.arange(n))
    size = min(size, n)
    border, first = int(cut * n), int(start * (n - size))
    inside = np.count_nonzero(EvenSpread(n)(np.arange(first, first + size)) < border)
    runs, rest = 0, size
    for denominator in reversed(stride_and_denominators(n)[1]):
        runs, rest = runs + rest // denominator, rest % denominator
    assert abs(inside - size * border / n) <= 2 * runs


@given(n=st.integers(100, 2**31))
@settings(max_examples=150)
def test_short_stretches_of_even_spread_take_few_runs(n):
    stride, denominators = stride_and_denominators(n)
    assert denominators[-1] == n
    steps = stride - round(n * 0.6180339887498949)
    fibonacci = [1, 2]
    while fibonacci[-1] <= 0.3 * np.sqrt(n / (1 + 2 * steps)):
        fibonacci.append(sum(fibonacci[-2:]))
    assert set(fibonacci[:-1]) <= set(denominators)
