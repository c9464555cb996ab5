"""Training from bins: every step takes from all of them in proportion, each sequence once an epoch."""

import numpy as np
import pytest
import torch

from host_batches import open_packed, tokens_of
from mlbert.data.formats.bins import BinnedStore
from mlbert.data.formats.open import open_store
from mlbert.data.formats.order import by_length
from mlbert.data.loading.packed import PackedSource
from mlbert.data.prepare.split_bins import make_bins
from stored_sets import make_rows, names, random_lengths, write_set
from user_errors import user_error

COUNT = 480


@pytest.fixture(scope="module")
def bins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bins")
    source = write_set(folder / "source", make_rows(random_lengths(COUNT)))
    make_bins(source, folder / "out", edges=(8, 16, 24, 32), num_shards=2)
    return folder / "out"


def found_in(batch) -> list[int]:
    return np.histogram(torch.diff(batch.cu_seqlens).numpy(), [0, 9, 17, 25, 33])[0].tolist()


def test_gathering_mixes_bins_in_the_order_asked_for(bins):
    store = open_store(bins)
    assert isinstance(store, BinnedStore)
    assert (len(store), store.info.kind, store.info.max_seq_length) == (COUNT, "bins", 32)
    whole = names(store.gather(np.arange(COUNT)))
    order = np.random.default_rng(0).permutation(COUNT)[:100]
    assert names(store.gather(order)) == [whole[i] for i in order]
    assert (store.lengths[order] == store.gather(order).lengths).all()


def test_every_sequence_once_and_every_micro_batch_in_proportion(bins):
    shares = np.histogram(open_store(bins).lengths, [0, 9, 17, 25, 33])[0] / COUNT
    seen = []
    for rank in range(2):
        source = open_packed(bins, 24, max_sequences_per_pack=1, accumulation=2, rank=rank, world_size=2)
        assert source.steps_per_epoch == COUNT // 48
        for batch in (batch for step in range(source.steps_per_epoch) for batch in source.batches_of(step)):
            assert (np.abs(found_in(batch) - shares * 12) <= 3).all()
            assert batch.num_samples == 12
            seen += tokens_of(batch)
    source = open_packed(bins, 1)
    packed = [tokens for step in range(source.steps_per_epoch) for tokens in tokens_of(source.batches_of(step)[0])]
    for found in (seen, packed):
        assert len(set(found)) == len(found) == COUNT


def composed(bins, counts, world_size=1, **options) -> list[PackedSource]:
    options |= {"bin_counts": counts, "world_size": world_size, "max_sequences_per_pack": 1}
    return [open_packed(bins, sum(counts), rank=rank, **options) for rank in range(world_size)]


def test_micro_batches_mix_the_bins(bins):
    (source,) = composed(bins, [4, 4, 4, 12], accumulation=4)
    sizes = [bin.num_sequences for bin in open_store(bins).info.bins]
    assert source.steps_per_epoch == min(size // count for size, count in zip(sizes, (4, 4, 4, 12), strict=True))
    for step in range(2 * source.steps_per_epoch):
        assert [found_in(batch) for batch in source.batches_of(step)] == [[1, 1, 1, 3]] * 4


def test_the_union_over_ranks_and_dropout_rows_do_not_depend_on_their_number(bins):
    def rows(sources) -> dict[int, bytes]:
        batches = [batch for source in sources for batch in source.batches_of(3)]
        places = [row for batch in batches for row in batch.arrays()["first_rows"].tolist()]
        return dict(zip(places, [tokens for batch in batches for tokens in tokens_of(batch)], strict=True))

    expected = rows(composed(bins, [4, 4, 4, 12]))
    assert len(expected) == 24
    for world_size in (2, 4):
        counts = [count // world_size for count in (4, 4, 4, 12)]
        assert rows(composed(bins, counts, world_size)) == expected
        assert rows(composed(bins, counts, world_size, partition=by_length(2))) == expected


def test_a_composed_position_is_resumed_with_the_same_numbers_only(bins):
    (source,) = composed(bins, [2, 1, 2, 3])
    (other,) = composed(bins, [2, 2, 1, 3])
    for another in (other, open_packed(bins, 8, max_sequences_per_pack=1)):
        with user_error("run.other-settings", bins):
            another.load_state_dict(source.state_dict())


def test_numbers_that_the_bins_cannot_give(bins):
    for folder, counts, world_size, code in (
        (".", [4, 4], 1, "config.conflict"),
        (".", [1, 100, 1, 1], 2, "data.too-small"),
        ("bin-001-008", [48], 1, "config.conflict"),
    ):
        with user_error(code, "BIN_COUNTS"):
            composed(bins / folder, counts, world_size)
