"""Lanes against the plain rule, and against the batches of MosaicML Streaming."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbert.data.formats.mds_order import SHUFFLES, sample_order
from mlbert.data.loading import text_lanes as module
from mlbert.data.loading.text_lanes import EpochOrders, PieceLanes, WholeLanes
from mlbert.host.errors import UserError
from user_errors import user_error


def orders_of(sizes, shuffle="py1s", nodes=1) -> EpochOrders:
    return EpochOrders(np.asarray(sizes), shuffle=shuffle, seed=3, canonical_nodes=nodes)


def plain_lane(orders: EpochOrders, lane: int, lanes: int, counts: np.ndarray) -> Iterator[tuple[int, int]]:
    """The rule, one lane after the other."""
    for epoch in itertools.count():
        for text in orders(epoch)[lane::lanes].tolist():
            yield from ((text, piece) for piece in range(counts[text]))


def plain(orders: EpochOrders, lanes: int, counts: np.ndarray, steps: int) -> list[list[tuple[int, int]]]:
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
@settings(max_examples=60)
def test_equal_to_the_plain_rule(case):
    sizes, lanes, nodes, shuffle, counts = case
    orders = orders_of(sizes, shuffle, nodes)
    assert (orders(0) >= 0).all()
    assert len(orders(0)) == orders.length
    whole = WholeLanes(orders, lanes)
    expected = plain(orders, lanes, np.ones_like(counts), 12)
    assert [taken(whole, step) for step in range(12)] == expected
    counts = np.maximum(counts, 1) if shuffle is None else counts  # unshuffled, a lane may have empty texts only
    pieces = PieceLanes(orders, lanes, lambda texts: counts[texts])
    try:
        found = [taken(pieces, step) for step in range(40)]
    except UserError:
        return  # of the next test
    assert found == plain(orders, lanes, counts, 40)


def test_a_lane_with_empty_texts_only():
    counts = np.array([1, 0, 1, 0])
    lanes = PieceLanes(orders_of([4], None), 2, lambda texts: counts[texts])
    with user_error("data.too-small", "texts"):
        lanes.take(0)


@pytest.mark.parametrize("shuffle", [None, "py1s", "py1e"])
def test_whole_texts_come_in_the_batches_of_streaming(shuffle):
    sizes, lanes, nodes = np.array([40, 33, 55]), 8, 4
    ours = WholeLanes(orders_of(sizes, shuffle, nodes), lanes)
    theirs = sample_order(sizes, shuffle=shuffle, epoch=0, canonical_nodes=nodes, seed=3)
    for step in range(sizes.sum() // lanes):
        assert ours.take(step)[0].tolist() == theirs[step * lanes :][:lanes].tolist()


COUNTS = np.array([3, 0, 1, 7, 2, 1, 1, 0, 2, 5, 1, 1])


def piece_lanes(asked: list[int] | None = None) -> PieceLanes:
    def pieces(texts: np.ndarray) -> np.ndarray:
        if asked is not None:
            asked.extend(texts.tolist())
        return COUNTS[texts]

    return PieceLanes(orders_of([5, 7]), 3, pieces)


@pytest.mark.parametrize("first", [0, 1, 7, 50])
def test_a_position_is_gone_on_from(first):
    lanes = piece_lanes()
    expected = [taken(lanes, step) for step in range(first + 20)]
    state = json.loads(json.dumps(lanes.state(first)))
    asked: list[int] = []
    other = piece_lanes(asked)
    other.go_to(first, state)
    assert not asked
    assert [taken(other, step) for step in range(first, first + 20)] == expected[first:]
    assert other.state(first + 20) == lanes.state(first + 20)
    assert taken(other, 2) == expected[2]  # before it began, and beyond what it remembers


def test_any_step_in_any_order(monkeypatch):
    monkeypatch.setattr(module, "_KEPT_STEPS", 4)
    monkeypatch.setattr(module, "_KEPT_BYTES", 0)
    expected = plain(orders_of([5, 7]), 3, COUNTS, 60)
    lanes = piece_lanes()
    for step in (0, 30, 29, 1, 59, 58, 40):
        assert taken(lanes, step) == expected[step]


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"epoch": [0], "index": [0], "piece": [0]},
        {"epoch": [0, 0, 0], "index": [0, 0, -1], "piece": [0, 0, 0]},
        {"epoch": [0, 0, 0], "index": [0, 0, 4], "piece": [0, 0, 0]},
    ],
)
def test_a_damaged_position(state):
    with pytest.raises((ValueError, TypeError)):
        piece_lanes().go_to(3, state)


def test_the_front_is_the_lane_that_is_farthest():
    lanes = piece_lanes()
    for step in (0, 5, 25):
        epochs, indices = (lanes.state(step)[name] for name in ("epoch", "index"))
        assert lanes.front(step) == max((epoch, index * 3) for epoch, index in zip(epochs, indices, strict=True))
    whole = WholeLanes(orders_of([5, 6]), 3)
    assert [whole.front(step) for step in (0, 2, 3)] == [(0, 0), (0, 6), (1, 0)]
