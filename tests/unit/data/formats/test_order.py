"""Orders of epochs, partitions and steps: each unit once, numbers exact,
and the same in every process.
"""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlbert.data.formats import order
from mlbert.data.formats.index_cache import IndexCache
from mlbert.data.formats.order import (
    ComposedOrder,
    EpochOrder,
    RankSlice,
    StepReader,
    by_length,
    contiguous,
    even_mix,
)
from mlbert.data.formats.permutation import Permutation, even_spread
from mlbert.data.formats.prepared import ShardSet
from mlbert.data.formats.ragged import offsets_of
from random_set import random_rows
from stored_sets import write_set

BINS = st.lists(st.tuples(st.integers(8, 300), st.integers(1, 8)), min_size=1, max_size=5)
KEYS = st.one_of(st.integers(0, 2**63), st.tuples(st.integers(0, 2**40), st.integers(0, 1000)))


def naive_snake(lengths: list[int], parts: int) -> list[list[int]]:
    """Deal one unit after the other."""
    dealt: list[list[int]] = [[] for _ in range(parts)]
    turns = itertools.cycle([*range(parts), *reversed(range(parts))])
    for unit in sorted(range(len(lengths)), key=lambda unit: (-lengths[unit], unit)):
        dealt[next(turns)].append(unit)
    return dealt


@given(*(st.integers(1, most) for most in (3, 4, 5, 3)), st.data())
@settings(max_examples=40)
def test_exchange_against_naive_dealing(accumulation, each, size, groups, data):
    """Accumulation, units of a micro-batch, ranks of a group, groups,
    and lengths of all units are drawn.
    """
    count = accumulation * each * size * groups
    lengths = np.asarray(data.draw(st.lists(st.integers(5, 512), min_size=count, max_size=count)))
    world_size = size * groups
    asked = []

    def read(units: np.ndarray) -> np.ndarray:
        asked.append(units)
        return lengths[units]

    shares = [
        RankSlice(each * accumulation, accumulation, rank, world_size) for rank in range(world_size)
    ]
    held = [contiguous(share) for share in shares]
    for share in reversed(shares):  # whatever is computed first
        group, place = divmod(share.rank, size)
        asked.clear()
        parts = by_length(size)(share, read)
        for number, units in enumerate(parts):
            pool = np.concatenate([held[group * size + member][number] for member in range(size)])
            assert len(units) == each
            assert units.tolist() == pool[naive_snake(lengths[pool].tolist(), size)[place]].tolist()
        first = group * size * each * accumulation
        (once,) = asked
        assert sorted(once.tolist()) == list(range(first, first + size * each * accumulation)), (
            "its group's, once"
        )
    taken = [
        unit
        for share in shares
        for units in by_length(size)(share, read)
        for unit in units.tolist()
    ]
    assert sorted(taken) == list(range(len(lengths)))


def test_a_rank_of_a_thousand_reads_only_its_share(tmp_path, monkeypatch):
    """It looks up the lengths of its group's packs and reads only its own."""
    store = ShardSet.open(write_set(tmp_path, random_rows(2400), 1, packs=[*range(0, 2401, 2)]))
    world_size = 1024
    asked = []
    gather = store.gather_packs
    monkeypatch.setattr(store, "gather_packs", lambda packs: asked.append(packs) or gather(packs))
    monkeypatch.setattr(store, "gather", pytest.fail)
    options = {"max_tokens": 64, "max_sequences": 2, "seed": 1, "partition": by_length(world_size)}
    readers = [
        StepReader(store, RankSlice(1, 1, rank, world_size), **options)
        for rank in range(0, world_size, 97)
    ]
    shares = [reader(0)[0].units.tolist() for reader in readers]
    assert [len(packs) for packs in asked] == [1] * len(readers)
    assert len({unit for share in shares for unit in share}) == len(readers)


def test_a_machine_packs_a_set_once(make_set, own_cache, monkeypatch):
    store = ShardSet.open(make_set(300))

    def packs_of(seed: int) -> list[tuple[int, ...]]:
        units = order.make_units(store, 300, 64, 3, seed)
        rows, counts = units.gather(np.arange(units.count))
        assert (
            units.lengths(np.arange(units.count)).tolist()
            == np.diff(rows.offsets[offsets_of(counts)]).tolist()
        )
        return [
            tuple(rows.tokens[low:high])
            for low, high in zip(rows.offsets, rows.offsets[1:], strict=False)
        ]

    alone = packs_of(1)
    monkeypatch.setattr(order, "_SHARED_SEQUENCES", 0)
    assert packs_of(1) == alone
    others = [packs_of(seed) for seed in (2, 3, 4)]
    with mock.patch.object(order, "pack_lengths", side_effect=pytest.fail.Exception("not kept")):
        assert [packs_of(seed) for seed in (1, 2, 3, 4)] == [alone, *others]
    assert alone not in others
    packs_of(5)
    assert len(list((own_cache / "mlbert/packs").iterdir())) == 4


def test_one_makes_what_the_others_wait_for(tmp_path, own_cache, monkeypatch):
    (tmp_path / "data").touch()
    made = []

    def make() -> dict[str, np.ndarray]:
        made.append(1)
        time.sleep(0.2)
        return {"numbers": np.arange(5)}

    def open_it(_: int = 0) -> list[int]:
        return (
            IndexCache("test", [tmp_path / "data"], [1])
            .once(lambda numbers: numbers, ["numbers"], make)
            .tolist()
        )

    with ThreadPoolExecutor(
        4
    ) as pool:  # a lock is of an open file: threads are no different from processes
        assert list(pool.map(open_it, range(4))) == [[0, 1, 2, 3, 4]] * 4
    assert len(made) == 1
    (tmp_path / "file").touch()
    # Nothing can be stored, nor locked.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert open_it() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["numbers.npy", "checksums.json"])
def test_zeros_in_a_kept_array_are_noticed(tmp_path, own_cache, name):
    """A crash of the machine can leave a file of the right size with blocks of zeros."""
    (tmp_path / "data").touch()

    def open_it() -> list[int]:
        cache = IndexCache("test", [tmp_path / "data"], [1])
        made = {"numbers": np.arange(900)}
        return cache.once(lambda numbers: numbers, ["numbers"], lambda: made).tolist()

    assert open_it() == list(range(900))
    (path,) = own_cache.glob(f"mlbert/test/*/{name}")
    good = path.read_bytes()
    zeros = bytes(len(good) // 2)
    path.write_bytes(good[: -len(zeros)] + zeros)
    assert open_it() == list(range(900))
    assert path.read_bytes() == good


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.data())
def test_even_mix_holds_each_bin_in_proportion(counts, data):
    bins, places = even_mix(np.asarray(counts))
    assert sorted(zip(bins.tolist(), places.tolist(), strict=True)) == [
        (number, place) for number, count in enumerate(counts) for place in range(count)
    ]
    endless = np.tile(bins, 3)
    first = data.draw(st.integers(0, len(endless)))
    stretch = endless[first : data.draw(st.integers(first, len(endless)))]
    shares = np.asarray(counts) / sum(counts) * len(stretch)
    assert (np.abs(np.bincount(stretch, minlength=len(counts)) - shares) <= len(counts) + 1).all()


@given(BINS, st.integers(1, 4), st.integers(0, 9))
@settings(max_examples=10)
def test_every_rank_gets_its_numbers_and_no_unit_twice(drawn, world_size, seed):
    sizes, counts = map(list, zip(*drawn, strict=True))
    first = np.concatenate([[0], np.cumsum(sizes)])
    order = ComposedOrder(first, counts, seed)
    each = sum(counts)
    steps = order.length // (each * world_size)
    assert steps == min(
        size // (count * world_size) for size, count in zip(sizes, counts, strict=True)
    )
    for epoch in range(3):
        seen = []
        for stretch in range(steps * world_size):  # step after step, and in each rank after rank
            units = order(epoch, stretch * each + np.arange(each))
            bins = np.searchsorted(first, units, side="right") - 1
            assert np.bincount(bins, minlength=len(sizes)).tolist() == counts
            seen += units.tolist()
        assert len(set(seen)) == len(seen)
        elsewhere = ComposedOrder(first, counts, seed)(epoch, np.arange(len(seen)))
        assert elsewhere.tolist() == seen, "in any process, in pieces or at once"


def test_what_an_epoch_drops_is_drawn_again():
    order = ComposedOrder(np.asarray([0, 1000, 1010]), [1, 1], seed=3)
    assert order.length == 20
    taken = [set(order(epoch, np.arange(20)).tolist()) for epoch in range(40)]
    assert all(len({unit for unit in units if unit >= 1000}) == 10 for units in taken)
    of_first = [unit for units in taken for unit in units if unit < 1000]
    assert len(set(of_first)) > 300, "other ones of the large bin in each epoch"


def test_scattered_positions_are_those_of_the_whole():
    first = np.asarray([0, 3000, 5000, 20_000])
    for units in (ComposedOrder(first, [3, 2, 4], 1), EpochOrder(first, 1)):
        whole = units(1, np.arange(units.length))
        for size in (3, 50, 3000):
            anywhere = np.random.default_rng(size).permutation(units.length)[:size]
            assert units(1, anywhere).tolist() == whole[anywhere].tolist()


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
    assert Permutation(1000, (5, 1))(np.arange(8)).tolist() == [
        616,
        944,
        118,
        965,
        330,
        993,
        106,
        307,
    ]


def test_keys_give_unlike_orders():
    n = 5000
    first = Permutation(n, (1, 0))(np.arange(n))
    for key in ((1, 1), (2, 0), (0, 1), 1):
        equal = np.count_nonzero(first == Permutation(n, key)(np.arange(n)))
        assert equal < 12, key  # 1 expected; 12 or more has a chance below 1e-8


@pytest.mark.parametrize("n", [100_000, 65_536, 70_001])
def test_neighbors_do_not_stay_together(n):
    order = Permutation(n, 3)(np.arange(n))
    assert np.count_nonzero(np.abs(np.diff(order)) == 1) < 16  # 2 expected
    # For random orders the correlation has a standard deviation of 1 / sqrt(n).
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / np.sqrt(n)
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 5 / np.sqrt(n)


def stride_and_denominators(n: int) -> tuple[int, list[int]]:
    """Return the stride of the order of n, and the denominators of the convergents of stride /
    n.
    """
    stride = int(even_spread(n, np.asarray([1]))[0])
    above = n
    below = stride
    denominators = [0, 1]
    while below:
        denominators.append(above // below * denominators[-1] + denominators[-2])
        remainder = above % below
        above = below
        below = remainder
    return stride, denominators[1:]


@given(
    n=st.integers(1, 200_000), cut=st.floats(0, 1), start=st.floats(0, 1), size=st.integers(1, 500)
)
@example(n=764, cut=0.25, start=0, size=106)
@example(n=60_292, cut=0.5, start=0, size=378)
@settings(max_examples=100)
def test_every_number_once_and_every_stretch_visits_parts_in_proportion(n, cut, start, size):
    assert np.array_equal(np.sort(even_spread(n, np.arange(n))), np.arange(n))
    size = min(size, n)
    border = int(cut * n)
    first = int(start * (n - size))
    inside = np.count_nonzero(even_spread(n, np.arange(first, first + size)) < border)
    runs = 0
    rest = size
    for denominator in reversed(stride_and_denominators(n)[1]):
        runs = runs + rest // denominator
        rest = rest % denominator
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
