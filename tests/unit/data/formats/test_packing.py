"""Packing loses nothing, keeps its limits, fills well, and is the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbert.data.formats.packing import best_fit, fit, pack_lengths, plan


def wikipedia_like(count: int) -> np.ndarray:
    """Lengths with the published quantiles and mean (254.4) of the benchmark's training set, evenly spaced."""
    shares, lengths = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.766], [5, 22, 36, 48, 84, 204, 484, 511]
    drawn = (np.arange(count) + 0.5) / count
    # Between the quartiles short lengths are the more frequent ones: straight lines would have the mean 262.
    for low, high in ((0.25, 0.5), (0.5, 0.75)):
        inside = (drawn > low) & (drawn < high)
        drawn[inside] = low + (high - low) * ((drawn[inside] - low) / (high - low)) ** 1.4
    return np.where(drawn >= 0.766, 512, np.interp(drawn, shares, lengths)).astype(np.int64)


@given(
    lengths=st.lists(st.integers(1, 40), max_size=200),
    room=st.integers(0, 30),
    max_sequences=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150)
def test_every_sequence_once_and_nothing_over_its_limit(lengths, room, max_sequences, seed):
    array = np.asarray(lengths, np.int64)
    max_tokens = max(lengths, default=1) + room
    packs = pack_lengths(array, max_tokens, max_sequences, seed)
    assert sorted(packs.order) == list(range(len(array)))
    assert packs.offsets[0] == 0
    assert packs.offsets[-1] == len(array)
    for first, end in zip(packs.offsets, packs.offsets[1:], strict=False):
        assert 1 <= end - first <= max_sequences
        assert array[packs.order[first:end]].sum() <= max_tokens


@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=400), max_sequences=st.integers(1, 4))
@settings(max_examples=60)
def test_plan_uses_the_histogram_up(lengths, max_sequences):
    histogram = np.bincount(lengths, minlength=65)
    used = np.zeros_like(histogram)
    for combination, count in plan(histogram, 64, max_sequences).items():
        assert count > 0
        assert list(combination) == sorted(combination, reverse=True)
        np.add.at(used, list(combination), count)
    assert (used == histogram).all()


def test_same_seed_same_packs_and_another_seed_another_order():
    lengths = wikipedia_like(5000)
    one, two, other = (pack_lengths(lengths, 512, 3, seed) for seed in (7, 7, 8))
    assert (one.order == two.order).all()
    assert (one.offsets == two.offsets).all()
    assert (one.order != other.order).any()


def test_the_lengths_are_the_published_ones():
    lengths = wikipedia_like(300_000)
    assert lengths.mean() == pytest.approx(254.43, abs=0.5)
    assert np.quantile(lengths, 0.5) == pytest.approx(204, abs=1)
    assert (lengths == 512).mean() == pytest.approx(0.234, abs=0.001)


@pytest.mark.parametrize("count", [300_000, 1_000_000])
def test_fills_the_benchmarks_lengths_with_three_to_a_pack(count):
    lengths = wikipedia_like(count)
    assert pack_lengths(lengths, 512, 3).filled(lengths, 512) >= 0.993


def test_a_small_set_is_filled_almost_as_well():
    lengths = wikipedia_like(20_000)
    assert pack_lengths(lengths, 512, 3).filled(lengths, 512) >= 0.99


def test_fitting_beats_longest_first():
    histogram = np.bincount(wikipedia_like(100_000), minlength=513)
    assert sum(plan(histogram, 512, 3).values()) < 0.95 * sum(best_fit(histogram, 512, 3).values())


def test_fit_makes_full_packs_only():
    histogram = np.bincount(wikipedia_like(100_000), minlength=513)
    assert all(sum(combination) == 512 for combination in fit(histogram, 512, 3))
    assert (histogram >= 0).all()


def test_order_of_packs_does_not_follow_length():
    lengths = wikipedia_like(20_000)
    packs = pack_lengths(lengths, 512, 3)
    first = lengths[packs.order[packs.offsets[:-1]]]
    halves = np.array_split(first, 2)
    assert abs(halves[0].mean() - halves[1].mean()) < 0.05 * first.mean()


@pytest.mark.parametrize("lengths", [[0, 3], [3, 9], [-1]])
def test_a_length_that_cannot_fit_is_an_error(lengths):
    with pytest.raises(ValueError, match="do not fit packs of 8 tokens"):
        pack_lengths(np.asarray(lengths), 8)
