"""The training source, also of bins: every sequence once an epoch,
the same step whatever the ranks, exact resume.
"""

import json
from unittest import mock

import numpy as np
import pytest
import torch

from host_batches import numbers, open_packed, rows_of, same, tokens_of
from mlbert.data.batches import HostBatch
from mlbert.data.formats import open as module
from mlbert.data.formats import prepared
from mlbert.data.formats.bins import BinnedStore
from mlbert.data.formats.open import open_store
from mlbert.data.formats.order import by_length, contiguous
from mlbert.data.formats.packing import pack_lengths
from mlbert.data.formats.prepared import ShardSet
from mlbert.data.loading.packed import PackedSource
from mlbert.data.prepare.shuffle import Packing, shuffle_set
from mlbert.data.prepare.split_bins import make_bins
from random_set import MAX_SEQ_LENGTH, VOCAB_SIZE
from stored_sets import make_rows, names, random_lengths, write_set
from user_errors import user_error

COUNT = 300
BINNED = 480
SETTINGS = {"packs_per_step": 12, "max_sequences_per_pack": 3, "seed": 3, "partition": contiguous}


def epoch(source: PackedSource) -> list[list[HostBatch]]:
    steps = [source.next_step() for _ in range(source.steps_per_epoch)]
    source.close()
    return steps


def equal(a: HostBatch, b: HostBatch) -> bool:
    return same(a.to("cpu"), b.to("cpu")) == ""


@pytest.fixture
def folder(make_set):
    return make_set(COUNT)


@pytest.mark.parametrize(
    ("max_tokens", "most"), [(MAX_SEQ_LENGTH, 3), (MAX_SEQ_LENGTH, 1), (64, 2), (128, 8)]
)
def test_every_sequence_once_an_epoch(folder, max_tokens, most):
    packs = pack_lengths(ShardSet.open(folder).lengths, max_tokens, most, 3)
    steps = epoch(open_packed(folder, max_tokens=max_tokens, max_sequences_per_pack=most))
    seen = [number for (batch,) in steps for number in numbers(batch)]
    assert len(steps) == packs.num_packs // 12
    assert len(seen) == len(set(seen)) >= COUNT - most * (packs.num_packs % 12)
    for (batch,) in steps:
        first_rows = batch.arrays()["first_rows"]
        assert np.unique(first_rows // max_tokens).tolist() == list(range(12))
        assert (first_rows % max_tokens + np.diff(batch.arrays()["cu_seqlens"]) <= max_tokens).all()


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 4), (2, 1), (4, 3)])
def test_union_over_ranks_and_micro_batches_is_the_plain_step(folder, world_size, accumulation):
    plain = [rows_of(batch) for (batch,) in epoch(open_packed(folder))]
    options = {
        "packs_per_step": 12 // world_size,
        "accumulation": accumulation,
        "world_size": world_size,
    }
    ranks = [epoch(open_packed(folder, rank=rank, **options)) for rank in range(world_size)]
    assert {len(step) for rank in ranks for step in rank} == {accumulation}
    for *steps, whole in zip(*ranks, plain, strict=True):
        assert joined([batch for step in steps for batch in step]) == whole


@pytest.mark.parametrize(("stop", "world_size"), [(0, 1), (3, 1), (40, 1), (5, 2)])
def test_resume_is_exact_at_any_step(folder, stop, world_size):
    options = {"packs_per_step": 12 // world_size, "accumulation": 2, "world_size": world_size}
    straight = open_packed(folder)
    ranks = [open_packed(folder, rank=rank, **options) for rank in range(world_size)]
    for _ in range(stop):
        straight.next_step()
    for source in ranks:
        source.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    for _ in range(3):
        resumed = [batch for source in ranks for batch in source.next_step()]
        assert joined(resumed) == joined(straight.next_step())
    for source in (straight, *ranks):
        assert source.state_dict() == straight.state_dict()
        source.close()


def test_epochs_and_seeds_differ(folder):
    source = open_packed(folder)
    first = source.batches_of(0)[0]
    second = source.batches_of(source.steps_per_epoch)[0]
    assert numbers(first) != numbers(second)
    assert numbers(first) != numbers(open_packed(folder, seed=4).batches_of(0)[0])
    assert equal(first, open_packed(folder).batches_of(0)[0])


@pytest.mark.parametrize(
    "change", [{"seed": 9}, {"packs_per_step": 6}, {"max_tokens": 64}, {}], ids=str
)
def test_a_position_of_other_settings_or_data_is_refused(folder, make_set, change):
    state = open_packed(folder).state_dict()
    other = folder if change else make_set(COUNT, name="other", seed=1)
    with user_error("run.other-settings", other):
        open_packed(other, **change).load_state_dict(state)


def test_only_the_manifest_is_read_before_open(folder):
    for path in folder.glob("*.h5"):
        path.unlink()
    source = PackedSource(folder, **SETTINGS)
    assert (source.info.num_sequences, source.vocab_size) == (COUNT, VOCAB_SIZE)
    with user_error("data.incomplete", folder / "shard-00000-of-00003.h5"):
        source.open()


def test_settings_that_cannot_work(folder):
    with user_error("config.conflict", "GRADIENT_STEPS"):
        PackedSource(folder, **(SETTINGS | {"accumulation": 5}))
    with user_error("data.too-small", folder):
        open_packed(folder, packs_per_step=4000)
    with user_error("data.too-long", folder):
        PackedSource(folder, **SETTINGS, max_tokens=16)


def test_an_error_in_the_background_reaches_the_caller(folder, monkeypatch):
    source = open_packed(folder)
    monkeypatch.setattr(ShardSet, "gather", lambda *_: (_ for _ in ()).throw(OSError("disk gone")))
    with pytest.raises(OSError, match="disk gone"):
        source.next_step()
    source.close()


@pytest.fixture
def stored_packs(folder, tmp_path):
    return shuffle_set(folder, tmp_path / "packs", num_shards=4, packing=Packing(40, 3)).path.parent


def test_stored_packs_are_used_as_they_are(stored_packs):
    store = ShardSet.open(stored_packs)
    packs = set()
    for shard in range(4):
        rows = store.shard(shard).rows
        offsets = store.shard(shard).pack_offsets
        # The number of each pack's first sequence.
        packs |= set(rows.tokens[rows.offsets[offsets[:-1]] + 1].tolist())
    source = open_packed(stored_packs, packs_per_step=1)
    assert (source.max_tokens, source.steps_per_epoch) == (40, store.num_packs)
    batches = [batch for step in range(source.steps_per_epoch) for batch in source.batches_of(step)]
    assert all(batch.num_tokens <= 40 and batch.num_samples <= 3 for batch in batches)
    assert sorted(number for batch in batches for number in numbers(batch)) == list(range(COUNT))
    assert {numbers(batch)[0] for batch in batches} == packs
    source = open_packed(stored_packs, packs_per_step=4, max_sequences_per_pack=1)
    assert (source.max_tokens, source.steps_per_epoch) == (MAX_SEQ_LENGTH, COUNT // 4)
    assert sorted(
        n for step in range(COUNT // 4) for n in numbers(source.batches_of(step)[0])
    ) == list(range(COUNT))


def test_memory_and_maps_give_the_same_batches(stored_packs, folder):
    for data, most in ((stored_packs, 3), (stored_packs, 1), (folder, 3), (folder, 1)):
        plain = open_packed(data, max_sequences_per_pack=most)
        with mock.patch.object(module, "IN_MEMORY_BYTES", 0):
            mapped = open_packed(data, max_sequences_per_pack=most)
        for step in range(6):
            assert equal(plain.batches_of(step)[0], mapped.batches_of(step)[0])


@pytest.mark.parametrize(("data", "each"), [("stored_packs", 3), ("folder", 1)])
def test_a_large_set_is_opened_without_arrays_over_its_rows(data, each, monkeypatch, request):
    data = request.getfixturevalue(data)
    monkeypatch.setattr(module, "IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(prepared, "VERIFY_BYTES", 0)
    monkeypatch.setattr(ShardSet, "lengths", property(lambda _: pytest.fail("reads every length")))
    open_packed(data, packs_per_step=1, max_sequences_per_pack=each).batches_of(0)


def joined(batches: list[HostBatch]) -> dict[int, tuple[int, ...]]:
    parts = [rows_of(batch) for batch in batches]
    whole = {row: token for part in parts for row, token in part.items()}
    assert len(whole) == sum(map(len, parts))
    return whole


@pytest.fixture(scope="module")
def bins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bins")
    source = write_set(folder / "source", make_rows(random_lengths(BINNED)))
    make_bins(source, folder / "out", edges=(8, 16, 24, 32), num_shards=2)
    return folder / "out"


def found_in(batch) -> list[int]:
    return np.histogram(torch.diff(batch.cu_seqlens).numpy(), [0, 9, 17, 25, 33])[0].tolist()


def test_gathering_mixes_bins_in_the_order_asked_for(bins):
    store = open_store(bins)
    assert isinstance(store, BinnedStore)
    assert (len(store), store.info.kind, store.info.max_seq_length) == (BINNED, "bins", 32)
    whole = names(store.gather(np.arange(BINNED)))
    order = np.random.default_rng(0).permutation(BINNED)[:100]
    assert names(store.gather(order)) == [whole[i] for i in order]
    assert (store.lengths[order] == store.gather(order).lengths).all()


def test_every_sequence_once_and_every_micro_batch_in_proportion(bins):
    shares = np.histogram(open_store(bins).lengths, [0, 9, 17, 25, 33])[0] / BINNED
    seen = []
    for rank in range(2):
        source = open_packed(
            bins, 24, max_sequences_per_pack=1, accumulation=2, rank=rank, world_size=2
        )
        assert source.steps_per_epoch == BINNED // 48
        for batch in (
            batch for step in range(source.steps_per_epoch) for batch in source.batches_of(step)
        ):
            assert (np.abs(found_in(batch) - shares * 12) <= 3).all()
            assert batch.num_samples == 12
            seen += tokens_of(batch)
    source = open_packed(bins, 1)
    packed = [
        tokens
        for step in range(source.steps_per_epoch)
        for tokens in tokens_of(source.batches_of(step)[0])
    ]
    for found in (seen, packed):
        assert len(set(found)) == len(found) == BINNED


def composed(bins, counts, world_size=1, **options) -> list[PackedSource]:
    options |= {"bin_counts": counts, "world_size": world_size, "max_sequences_per_pack": 1}
    return [open_packed(bins, sum(counts), rank=rank, **options) for rank in range(world_size)]


def test_micro_batches_mix_the_bins(bins):
    (source,) = composed(bins, [4, 4, 4, 12], accumulation=4)
    sizes = [bin.num_sequences for bin in open_store(bins).info.bins]
    assert source.steps_per_epoch == min(
        size // count for size, count in zip(sizes, (4, 4, 4, 12), strict=True)
    )
    for step in range(2 * source.steps_per_epoch):
        assert [found_in(batch) for batch in source.batches_of(step)] == [[1, 1, 1, 3]] * 4


def test_the_union_over_ranks_and_dropout_rows_do_not_depend_on_their_number(bins):
    def rows(sources) -> dict[int, bytes]:
        batches = [batch for source in sources for batch in source.batches_of(3)]
        places = [row for batch in batches for row in batch.arrays()["first_rows"].tolist()]
        return dict(
            zip(places, [tokens for batch in batches for tokens in tokens_of(batch)], strict=True)
        )

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
