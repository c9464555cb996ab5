"""Lanes against the plain rule, and against the batches of MosaicML Streaming."""

import itertools
import json
import os
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from file_limits import largest_file
from mlbert.data.formats.mds_order import SHUFFLES
from mlbert.data.formats.streams import Mixture
from mlbert.data.loading import text_lanes as module
from mlbert.data.loading.text_lanes import EpochOrders, PieceLanes, WholeLanes
from mlbert.host.errors import UserError
from programs import wait_for, write_files
from text_sets import sample_order

COUNTS = np.array([3, 0, 1, 7, 2, 1, 1, 0, 2, 5, 1, 1])
ORDER_BYTES = 4 * 90 + 8


def orders_of(
    sizes, shuffle="py1s", nodes=1, folder=Path("unused"), warn=pytest.fail
) -> EpochOrders:
    mixture = Mixture([np.asarray(sizes)], [sum(sizes)])
    return EpochOrders(
        mixture, shuffle=shuffle, seed=3, canonical_nodes=nodes, folder=folder, warn=warn
    )


def whole_order(orders: EpochOrders, epoch: int) -> np.ndarray:
    return orders(epoch, np.arange(orders.length))


def whole_lanes(orders: EpochOrders, lanes: int) -> WholeLanes:
    return WholeLanes(orders, lanes, np.arange(lanes))


def all_pieces(orders: EpochOrders, lanes: int, pieces, **options: int) -> PieceLanes:
    return PieceLanes(orders, lanes, np.arange(lanes), pieces, lambda rows: rows, **options)


def plain_lane(
    orders: EpochOrders, lane: int, lanes: int, counts: np.ndarray
) -> Iterator[tuple[int, int]]:
    for epoch in itertools.count():
        for text in whole_order(orders, epoch)[lane::lanes].tolist():
            yield from ((text, piece) for piece in range(counts[text]))


def plain(
    orders: EpochOrders, lanes: int, counts: np.ndarray, steps: int
) -> list[list[tuple[int, int]]]:
    walks = [plain_lane(orders, lane, lanes, counts) for lane in range(lanes)]
    return [[next(walk) for walk in walks] for _ in range(steps)]


def taken(lanes: WholeLanes | PieceLanes, step: int) -> list[tuple[int, int]]:
    texts, pieces = lanes.take(step)
    return list(zip(texts.tolist(), pieces.tolist(), strict=True))


@st.composite
def cases(draw):
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    nodes = draw(st.integers(1, min(3, sum(sizes))))
    lanes = draw(st.integers(1, sum(sizes)))
    counts = draw(st.lists(st.integers(0, 4), min_size=sum(sizes), max_size=sum(sizes)))
    return sizes, lanes, nodes, draw(st.sampled_from([None, *SHUFFLES])), np.array(counts)


@given(cases())
@settings(max_examples=40)
def test_equal_to_the_plain_rule(case):
    sizes, lanes, nodes, shuffle, counts = case
    orders = orders_of(sizes, shuffle, nodes)
    assert whole_order(orders, 0).tolist() == sample_order(sizes, shuffle, 0, nodes, 3).tolist()
    whole = whole_lanes(orders, lanes)
    expected = plain(orders, lanes, np.ones_like(counts), 12)
    assert [taken(whole, step) for step in range(12)] == expected
    # unshuffled, a lane may have empty texts only.
    counts = np.maximum(counts, 1) if shuffle is None else counts
    pieces = all_pieces(orders, lanes, lambda texts: counts[texts])
    try:
        found = [taken(pieces, step) for step in range(40)]
    except UserError:
        return  # test_text.py has texts that are all empty
    assert found == plain(orders, lanes, counts, 40)


def piece_lanes(asked: list[np.ndarray] | None = None) -> PieceLanes:
    asked = [] if asked is None else asked
    return all_pieces(orders_of([5, 7]), 3, lambda texts: asked.append(texts) or COUNTS[texts])


@pytest.mark.parametrize("first", [0, 1, 7, 50])
def test_a_position_is_gone_on_from(first):
    lanes = piece_lanes()
    expected = [taken(lanes, step) for step in range(first + 20)]
    state = json.loads(json.dumps(lanes.state(first)))
    asked: list[np.ndarray] = []
    other = piece_lanes(asked)
    other.go_to(first, state)
    assert not asked
    assert [taken(other, step) for step in range(first, first + 20)] == expected[first:]
    assert other.state(first + 20) == lanes.state(first + 20)
    assert taken(other, 2) == expected[2]  # before it began, and beyond what it remembers


def test_any_step_in_any_order(monkeypatch):
    monkeypatch.setattr(module, "_KEPT_BYTES", 0)
    expected = plain(orders_of([5, 7]), 3, COUNTS, 60)
    lanes = all_pieces(orders_of([5, 7]), 3, COUNTS.__getitem__, kept_steps=4)
    for step in (0, 30, 29, 1, 59, 58, 40):
        assert taken(lanes, step) == expected[step]


def test_a_damaged_position():
    zeros = [0, 0, 0]
    states = ({"epoch": zeros, "index": index, "piece": zeros} for index in ([0, 0, -1], [0, 0, 4]))
    for state in ({}, {"epoch": [0], "index": [0], "piece": [0]}, *states):
        with pytest.raises((ValueError, TypeError)):
            piece_lanes().go_to(3, state)


def test_the_front_is_the_lane_that_is_farthest():
    lanes = piece_lanes()
    for step in (0, 5, 25):
        epochs, indices = (lanes.state(step)[name] for name in ("epoch", "index"))
        assert lanes.front(step) == max(
            (epoch, index * 3) for epoch, index in zip(epochs, indices, strict=True)
        )
    whole = whole_lanes(orders_of([5, 6]), 3)
    assert [whole.front(step) for step in (0, 2, 3)] == [(0, 0), (0, 6), (1, 0)]


@given(cases(), st.integers(1, 5))
@settings(max_examples=30)
def test_ranks_follow_their_own_lanes_only(case, world_size):
    sizes, lanes, nodes, shuffle, counts = case
    orders = orders_of(sizes, shuffle, nodes)
    lanes = lanes * world_size
    counts = np.maximum(counts, 1)
    assume(lanes <= orders.length)
    shares = [np.arange(rank, lanes, world_size) for rank in range(world_size)]
    asked: list[set[int]] = [set() for _ in shares]

    def pieces_of(rank: int):
        return lambda texts: asked[rank].update(texts.tolist()) or counts[texts]

    alone = all_pieces(orders, lanes, lambda texts: counts[texts])
    ranks = [
        PieceLanes(orders, lanes, share, pieces_of(rank), lambda r: r)
        for rank, share in enumerate(shares)
    ]
    for step in range(9):
        for rank, share in enumerate(shares):
            assert taken(ranks[rank], step) == [taken(alone, step)[lane] for lane in share]
            expected = [taken(whole_lanes(orders, lanes), step)[lane] for lane in share]
            assert taken(WholeLanes(orders, lanes, share), step) == expected
    if world_size > 1 and alone.front(9)[0] == 0:
        mine = [
            {text for lane in share for text in whole_order(orders, 0)[lane::lanes].tolist()}
            for share in shares
        ]
        assert all(found <= expected for found, expected in zip(asked, mine, strict=True))
    together = np.sum([list(rank.state(9).values()) for rank in ranks], axis=0)
    assert together.tolist() == list(alone.state(9).values())


def order_files(folder: Path) -> list[str]:
    return sorted(path.name.partition("-")[2] for path in folder.glob("orders/*-*"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in which orders are stored, however short they are."""
    monkeypatch.setattr(module, "_SHARED_TEXTS", 0)
    return tmp_path


def test_the_next_order_is_made_ahead_and_old_ones_are_deleted(folder):
    orders = orders_of([40, 50], "py1e", 4, folder)
    for epoch in range(4):
        assert (
            whole_order(orders, epoch).tolist()
            == sample_order([40, 50], "py1e", epoch, 4, 3).tolist()
        )
        expected = [f"{number}.order" for number in (epoch, epoch + 1)]
        wait_for(lambda expected=expected: order_files(folder) == expected)


def test_one_process_makes_an_order_for_all(folder, monkeypatch):
    """The others wait for it. What a killed process left is removed."""
    made = []
    shuffle_into = module.shuffle_into
    expected = sample_order([40, 50], "py1e", 0, 2, 3).tolist()

    def slow(*arguments, epoch, **options):
        made.append(epoch)
        time.sleep(0.3)
        shuffle_into(*arguments, epoch=epoch, **options)

    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        write_files(folder, {f"orders/x-0.order.{ended.pid}@{socket.gethostname()}.tmp": ""})
    monkeypatch.setattr(module, "shuffle_into", slow)
    with ThreadPoolExecutor(
        3
    ) as pool:  # a lock is of an open file: threads are no different from processes
        orders = [
            pool.submit(whole_order, orders_of([40, 50], "py1e", 2, folder), 0) for _ in range(3)
        ]
    assert [order.result().tolist() for order in orders] == [expected] * 3
    wait_for(lambda: order_files(folder) == ["0.order", "1.order"])
    assert made == [0, 1]


def _zeros(path: Path) -> None:
    path.write_bytes(bytes(ORDER_BYTES))


def _zero_end(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:300] + bytes(60) + content[360:])


def _next_epoch(path: Path) -> None:
    wait_for(lambda: order_files(path.parents[1]) == ["0.order", "1.order"])
    (other,) = path.parent.glob("*-1.order")
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, ORDER_BYTES - 1),
        lambda path: os.truncate(path, ORDER_BYTES + 1),
        _zeros,
        _zero_end,
        _next_epoch,
    ],
    ids=["empty", "short", "long", "zeros", "a block of zeros", "another order"],
)
def test_a_damaged_order_is_made_again(folder, damage):
    expected = whole_order(orders_of([40, 50], folder=folder), 0).tolist()
    (path,) = folder.glob("orders/*-0.order")
    good = path.read_bytes()
    damage(path)
    assert path.read_bytes() != good
    assert whole_order(orders_of([40, 50], folder=folder), 0).tolist() == expected
    assert path.read_bytes() == good


def test_without_a_writable_folder_the_order_is_in_memory(folder):
    (folder / "set").write_text("not a folder")
    warnings: list[str] = []
    orders = orders_of([40, 50], "py2s", 2, folder / "set", warnings.append)
    for epoch in range(2):
        expected = sample_order([40, 50], "py2s", epoch, 2, 3).tolist()
        assert whole_order(orders, epoch).tolist() == expected
    (line,) = warnings
    assert str(folder / "set") in line
    assert "keep the local copy of the data on another disk" in line


def test_a_full_disk_is_reported_once(folder, own_cache):
    warnings: list[str] = []
    orders = orders_of([40_000, 50_000], folder=own_cache / "mlbert/mds/x", warn=warnings.append)
    with largest_file(1000):
        found = whole_order(orders, 0)
        assert found.tolist() == sample_order([40_000, 50_000], "py1s", 0, 1, 3).tolist()
        whole_order(orders, 1)
    assert warnings == [
        f"warning: {own_cache}/mlbert/mds/x/orders/{orders._key}-0.order: "
        "cannot be written (File too large). Each "
        "process on this machine therefore makes the order of the texts itself, "
        "in 1 MB of memory. Free 1 MB there, "
        "or set XDG_CACHE_HOME to a folder on another disk."
    ]
    assert order_files(own_cache / "mlbert/mds/x") == []


def test_dealing_c4_to_many_ranks():
    # 365 million texts
    world_size = 1024
    sizes = np.full(11_904, 30_662)
    per_rank = 8
    orders = orders_of(sizes, None, 128)
    shares = [np.arange(rank, world_size * per_rank, world_size) for rank in range(world_size)]
    lanes = [WholeLanes(orders, world_size * per_rank, share) for share in shares]
    tracemalloc.start()
    lanes[1].take(7000)
    assert tracemalloc.get_traced_memory()[1] < 20_000  # bytes
    tracemalloc.stop()
    found = np.concatenate([lane.take(7000)[0] for lane in lanes])
    first = 7000 * world_size * per_rank
    rows, columns = np.divmod(np.sort(found), int(sizes.sum()) // 128)
    assert (rows == np.repeat(np.arange(128), world_size * per_rank // 128)).all()
    assert set(columns.tolist()) == set(
        range(first // 128, first // 128 + world_size * per_rank // 128)
    )
