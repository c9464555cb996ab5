"""The order of an epoch as a formula: each sample once, in blocks, without memory."""

import tracemalloc

import numpy as np
import pytest

from mlbert.data.formats.block_order import BLOCK, BlockOrder

C4 = 364_868_892  # texts
PARTS = 128  # of the set that are read in parallel


@pytest.mark.parametrize("num_samples", [1, 7, 99, 100, 101, 12_345])
def test_each_sample_is_once_in_an_epoch(num_samples: int) -> None:
    places = np.arange(num_samples)
    orders = [BlockOrder(num_samples, 5, epoch, block=100)(places) for epoch in range(3)]
    for order in orders:
        assert np.array_equal(np.sort(order), places)
    if num_samples > 50:
        assert not np.array_equal(orders[0], orders[1])
        other = BlockOrder(num_samples, 6, 0, block=100)(places)
        assert not np.array_equal(orders[0], other)
    shuffled = np.random.default_rng(0).permutation(num_samples)
    assert np.array_equal(
        BlockOrder(num_samples, 5, 0, block=100)(shuffled), orders[0][shuffled]
    ), "a place has its sample in any request"


def test_a_block_has_neighbors_and_epochs_have_other_blocks() -> None:
    places = np.arange(1000, 1100)
    samples = np.sort(BlockOrder(12_345, 1, 0, block=100)(places))
    assert (
        np.array_equal(np.sort((samples - samples[0]) % 12_345), np.arange(100))
        or (np.diff(samples) > 1).sum() == 1
    ), "one run of neighbors, which may go around the end"
    others = set(BlockOrder(12_345, 1, 1, block=100)(places).tolist())
    assert len(others & set(samples.tolist())) < 100


def test_a_step_of_c4_needs_no_table() -> None:
    """4,096 places in 128 parts, which a table of 1.46 GB would take minutes to prepare."""
    places = (np.arange(4096) % PARTS) * (C4 // PARTS) + np.arange(4096) // PARTS
    tracemalloc.start()
    samples = BlockOrder(C4, 1, 0)(places)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(np.unique(samples)) == 4096
    assert len(np.unique(samples // BLOCK)) <= 2 * PARTS
    assert peak < 2_000_000
