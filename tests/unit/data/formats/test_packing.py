"""Packing loses nothing, keeps its limits, fills well, and is the same for the same seed."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbert.data.formats.packing import best_fit, pack_lengths


def wikipedia_like(count: int) -> np.ndarray:
    """Return evenly spaced lengths with the published quantiles
    and mean (254.4) of the benchmark's training set.
    """
    shares = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.766]
    lengths = [5, 22, 36, 48, 84, 204, 484, 511]
    drawn = (np.arange(count) + 0.5) / count
    # Between the quartiles short lengths are the more frequent ones:
    # straight lines would have the mean 262.
    for low, high in ((0.25, 0.5), (0.5, 0.75)):
        inside = (drawn > low) & (drawn < high)
        drawn[inside] = low + (high - low) * ((drawn[inside] - low) / (high - low)) ** 1.4
    return np.where(drawn >= 0.766, 512, np.interp(drawn, shares, lengths)).astype(np.int64)


@given(
    st.lists(st.integers(1, 40), max_size=200),
    st.integers(0, 30),
    st.integers(1, 5),
    st.integers(0, 2**32),
)
@settings(max_examples=70)
def test_every_sequence_once_and_nothing_over_its_limit(lengths, room, max_sequences, seed):
    array = np.asarray(lengths, np.int64)
    max_tokens = max(lengths, default=1) + room
    packs = pack_lengths(array, max_tokens, max_sequences, seed)
    assert sorted(packs.order) == list(range(len(array)))
    assert (packs.offsets[0], packs.offsets[-1]) == (0, len(array))
    for first, end in zip(packs.offsets, packs.offsets[1:], strict=False):
        assert 1 <= end - first <= max_sequences
        assert array[packs.order[first:end]].sum() <= max_tokens


@pytest.mark.parametrize(("count", "share"), [(20_000, 0.99), (1_000_000, 0.993)])
def test_fills_the_benchmarks_lengths_with_three_to_a_pack(count, share):
    lengths = wikipedia_like(count)
    assert pack_lengths(lengths, 512).filled(lengths, 512) >= share


def test_best_fit_by_hand():
    """3 goes to 5 before 4, the other 3 to 4, 1 to (4, 3) before (2), and the second 1 to (2)."""
    histogram = np.bincount([8, 5, 4, 3, 3, 2, 1, 1], minlength=9)
    assert best_fit(histogram, 8, 3) == {(8,): 1, (5, 3): 1, (4, 3, 1): 1, (2, 1): 1}
    assert best_fit(histogram, 8, 2) == {(8,): 1, (5, 3): 1, (4, 3): 1, (2, 1): 1, (1,): 1}
    assert best_fit(np.bincount([2] * 9, minlength=9), 8, 5) == {(2, 2, 2, 2): 2, (2,): 1}
    assert best_fit(np.bincount([2] * 9, minlength=9), 8, 1) == {(2,): 9}


def test_packs_stay_the_same_between_versions():
    """Prepared sets are made once and shared: another order would be another set."""
    for limits, digest in {
        (512, 1): "200415cda55fe994",
        (512, 2): "2eb6cf784f23e600",
        (512, 3): "1c0ef20ed0955198",
        (512, 5): "6def0f69114de5d4",
        (1024, 3): "c270caf84ebb73c3",
        (1025, 3): "f8122bcb78124a1d",
    }.items():
        packs = pack_lengths(wikipedia_like(3000), *limits, 7)
        found = hashlib.sha256(
            packs.order.astype("<i8").tobytes() + packs.offsets.astype("<i8").tobytes()
        )
        assert found.hexdigest()[:16] == digest, limits
    assert (packs.order != pack_lengths(wikipedia_like(3000), *limits, 8).order).any(), (
        "the seed decides"
    )


def test_the_filled_share_and_what_cannot_work():
    none = np.ones(0, np.int64)
    assert pack_lengths(none, 512).filled(none, 512) == 1.0
    some = np.array([8, 4, 3])
    assert pack_lengths(some, 8).filled(some, 8) == 15 / 16
    for limits in ((0, 3), (8, 0), (0, 0)):
        with pytest.raises(
            ValueError, match=f"max_tokens {limits[0]} and max_sequences {limits[1]}"
        ):
            pack_lengths(np.ones(1, int), *limits)
    for lengths in ([0, 3], [3, 9], [-1]):
        with pytest.raises(ValueError, match="do not fit packs of 8 tokens"):
            pack_lengths(np.asarray(lengths), 8)
