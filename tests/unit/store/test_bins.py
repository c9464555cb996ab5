"""Training from bins: every step takes from all of them in proportion, each sequence once an epoch."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from host_batches import tokens_of
from mlbert.feed.packed import PackedSource
from mlbert.prepare.split_bins import make_bins
from mlbert.store.bins import BinnedStore
from mlbert.store.deals import contiguous
from mlbert.store.open import open_store
from mlbert.store.order import EpochOrder
from stored_sets import make_rows, names, random_lengths, write_set

EDGES = (8, 16, 24, 32)
COUNT = 480


@pytest.fixture(scope="module")
def bins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bins")
    source = write_set(folder / "source", make_rows(random_lengths(COUNT)))
    make_bins(source, folder / "out", edges=EDGES, num_shards=2)
    return folder / "out"


def opened(folder, **options) -> PackedSource:
    source = PackedSource(
        folder, **{"packs_per_step": 48, "max_sequences_per_pack": 1, "seed": 3, "deal": contiguous, **options}
    )
    source.open()
    return source


def test_gathering_mixes_bins_in_the_order_asked_for(bins):
    store = open_store(bins)
    assert isinstance(store, BinnedStore)
    assert (len(store), store.info.kind, store.info.max_seq_length) == (COUNT, "bins", 32)
    whole = names(store.gather(np.arange(COUNT)))
    order = np.random.default_rng(0).permutation(COUNT)[:100]
    assert names(store.gather(order)) == [whole[i] for i in order]
    assert (store.lengths[order] == store.gather(order).lengths).all()


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (2, 2), (4, 1)])
def test_every_sequence_once_and_every_micro_batch_in_proportion(bins, world_size, accumulation):
    shares = np.histogram(open_store(bins).lengths, [0, 9, 17, 25, 33])[0] / COUNT
    seen, size = [], 48 // world_size // accumulation
    for rank in range(world_size):
        source = opened(
            bins, packs_per_step=48 // world_size, accumulation=accumulation, rank=rank, world_size=world_size
        )
        assert source.steps_per_epoch == COUNT // 48
        for step in range(source.steps_per_epoch):
            for batch in source.batches_of(step):
                found = np.histogram(torch.diff(batch.cu_seqlens).numpy(), [0, 9, 17, 25, 33])[0]
                assert (np.abs(found - shares * size) <= 3).all()
                assert batch.num_samples == size
                seen += tokens_of(batch)
    assert len(set(seen)) == len(seen) == COUNT


def test_epochs_and_seeds_differ_and_a_position_is_resumed(bins):
    source = opened(bins)
    first, second = (tokens_of(source.batches_of(step)[0]) for step in (0, source.steps_per_epoch))
    assert first != second
    assert first != tokens_of(opened(bins, seed=4).batches_of(0)[0])
    for _ in range(7):
        source.next_step()
    resumed = opened(bins)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert tokens_of(resumed.next_step()[0]) == tokens_of(source.next_step()[0])
    source.close()
    resumed.close()


def test_bins_can_be_packed_like_any_store(bins):
    source = opened(bins, packs_per_step=1, max_sequences_per_pack=3)
    seen = [t for step in range(source.steps_per_epoch) for t in tokens_of(source.batches_of(step)[0])]
    assert len(set(seen)) == len(seen) == COUNT


@pytest.mark.parametrize("first", [[0, 5000], [0, 100, 100, 2500, 5000]])
def test_pieces_of_an_epoch_join_to_the_whole(first):
    order = EpochOrder(np.asarray(first), seed=1)
    whole = order(2, np.arange(5000))
    assert sorted(whole.tolist()) == list(range(5000))
    pieces = [order(2, np.arange(start, min(start + 37, 5000))) for start in range(0, 5000, 37)]
    assert np.array_equal(np.concatenate(pieces), whole)
    anywhere = np.random.default_rng(0).permutation(5000)[:300]
    assert np.array_equal(order(2, anywhere), whole[anywhere])
