"""The sample order of MDS sets: that of MosaicML Streaming, the same for every world, resumed anywhere."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mlbert.data.formats.mds_order import SHUFFLES, StreamWorld, partition, sample_order
from user_errors import user_error

GOLDEN = json.loads((Path(__file__).parents[3] / "assets/mds/sample_order.json").read_bytes())
SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=10).map(np.array)


def case_name(case: dict) -> str:
    world = "x".join(map(str, case["world"].values()))
    return (
        f"{case['shuffle_algo']}-{case['num_canonical_nodes']}-{case['epoch']}-{world}-{case.get('sample_in_epoch', 0)}"
    )


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=case_name)
def test_order_of_streaming(case):
    found = sample_order(
        np.array(GOLDEN["shard_sizes"]),
        StreamWorld(**case["world"], batch_size=case["batch_size"]),
        shuffle=None if case["shuffle_algo"] == "none" else case["shuffle_algo"],
        epoch=case["epoch"],
        first=case.get("sample_in_epoch", 0),
        canonical_nodes=case["num_canonical_nodes"],
        block_size=100,
    )
    expected = np.array(case["ids"])
    np.testing.assert_array_equal(found.reshape(expected.shape), expected)


def slow_partition(num_samples: int, world: StreamWorld, canonical_nodes: int, first: int) -> list[int]:
    """`partition` place by place, flat; for nodes that divide the canonical ones."""
    rows = []
    for row in range(canonical_nodes):
        begin, end = (num_samples * edge // canonical_nodes for edge in (row, row + 1))
        rows.append([*range(begin, end), end - 1][: -(-num_samples // canonical_nodes)])
    in_turn = [place for column in zip(*rows, strict=True) for place in column]
    result = []
    for node in range(world.nodes):
        mine = in_turn[first - first % world.nodes + node :: world.nodes]
        missing, end = -len(mine) % world.ranks_per_node, len(mine) + 1 - world.ranks_per_node
        again = mine[end - missing : end] if end >= missing else [mine[k % len(mine)] for k in range(missing)]
        for rank in range(world.ranks_per_node):
            places = iter([*mine, *again][rank :: world.ranks_per_node])
            batches = []
            while batch := list(islice(places, world.batch_size)):
                batches.append(batch + [-1] * (world.batch_size - len(batch)))
            while len(batches) % world.workers_per_rank:
                batches.append([-1] * world.batch_size)
            for worker in range(world.workers_per_rank):
                result += [place for batch in batches[worker :: world.workers_per_rank] for place in batch]
    return result


@st.composite
def worlds(draw: st.DrawFn) -> tuple[StreamWorld, int]:
    """A world and a multiple of its nodes."""
    nodes = draw(st.integers(1, 4))
    world = StreamWorld(nodes, *(draw(st.integers(1, most)) for most in (5, 3, 5)))
    return world, nodes * draw(st.integers(1, 4))


@given(st.integers(1, 300), worlds(), st.data())
def test_partition_is_the_slow_one(num_samples, case, data):
    world, canonical_nodes = case
    assume(num_samples >= canonical_nodes)
    first = data.draw(st.integers(0, num_samples - 1))
    found = partition(num_samples, world, canonical_nodes, first)
    assert found.shape[:3] == (world.nodes, world.ranks_per_node, world.workers_per_rank)
    assert found.ravel().tolist() == slow_partition(num_samples, world, canonical_nodes, first)


@given(SIZES, worlds(), st.sampled_from([None, *SHUFFLES]), st.integers(0, 3), st.integers(2, 200))
def test_an_epoch_has_every_sample(sizes, case, shuffle, epoch, block_size):
    world, canonical_nodes = case
    assume(sizes.sum() >= canonical_nodes)
    options = {"shuffle": shuffle, "epoch": epoch, "canonical_nodes": canonical_nodes, "block_size": block_size}
    found = sample_order(sizes, world, **options)
    assert np.setdiff1d(found, [-1]).tolist() == list(range(sizes.sum()))
    np.testing.assert_array_equal(found, sample_order(sizes, world, **options))
    # Samples come twice only to fill rows and ranks.
    assert (found >= 0).sum() < sizes.sum() + canonical_nodes + world.nodes * world.ranks_per_node


@given(
    SIZES, st.integers(1, 6), st.sampled_from(sorted({*SHUFFLES} - {"naive"})), st.integers(2, 200), st.integers(0, 99)
)
def test_a_canonical_node_has_the_same_samples_in_every_epoch(sizes, canonical_nodes, shuffle, block_size, seed):
    assume(sizes.sum() >= canonical_nodes)
    edges = np.arange(1, canonical_nodes) * sizes.sum() // canonical_nodes
    epochs = [
        [
            sorted(node.tolist())
            for node in np.split(SHUFFLES[shuffle](sizes, canonical_nodes, seed, e, block_size), edges)
        ]
        for e in (0, 1, 7)
    ]
    assert epochs[0] == epochs[1] == epochs[2]


@pytest.mark.parametrize("shuffle", list(SHUFFLES))
def test_epochs_and_seeds_differ(shuffle):
    orders = [SHUFFLES[shuffle](np.array([98, 90, 62]), 2, seed, epoch, 50) for seed, epoch in ((1, 0), (1, 1), (5, 0))]
    assert len({order.tobytes() for order in orders}) == 3


def global_batches(order: np.ndarray) -> list[list[int]]:
    """Samples of each step over all ranks, sorted, as far as there are whole batches."""
    batches = order.transpose(3, 2, 0, 1, 4).reshape(-1, order.shape[0] * order.shape[1] * order.shape[4])
    return [sorted(batch) for batch in batches.tolist() if -1 not in batch]


WORLDS = [StreamWorld(n, r, w, 24 // (n * r)) for n in (1, 2, 4, 8) for r in (1, 3) for w in (1, 2)]


@given(SIZES, st.sampled_from([None, *SHUFFLES]), st.integers(0, 3), st.data())
def test_every_world_takes_the_same_and_can_go_on(sizes, shuffle, epoch, data):
    assume(sizes.sum() >= 48)
    options = {"shuffle": shuffle, "epoch": epoch, "canonical_nodes": 4, "block_size": 30}
    expected = global_batches(sample_order(sizes, StreamWorld(batch_size=24), **options))
    whole = sizes.sum() // 24
    step = data.draw(st.integers(0, int(whole) - 1))
    world = data.draw(st.sampled_from(WORLDS))
    assert global_batches(sample_order(sizes, world, **options))[:whole] == expected[:whole]
    resumed = sample_order(sizes, world, first=24 * step, **options)
    assert global_batches(resumed)[: whole - step] == expected[step:whole]


def test_more_nodes_than_canonical_ones():
    found = partition(10, StreamWorld(nodes=4, batch_size=2), 2)
    # Rows 0..4 and 5..9 have an odd number of columns: one comes twice.
    assert found.reshape(4, -1).tolist() == [[0, 2, 4, -1], [5, 7, 9, -1], [1, 3, 3, -1], [6, 8, 8, -1]]


BAD = {
    "unknown shuffle": ({"shuffle": "py3s"}, "config.choice", "shuffle 'py3s'"),
    "nodes": ({"world": StreamWorld(nodes=3), "canonical_nodes": 4}, "config.conflict", "canonical_nodes 4"),
    "few samples": ({"canonical_nodes": 64}, "config.conflict", "canonical_nodes 64"),
    "many nodes": ({"world": StreamWorld(nodes=32)}, "config.conflict", "32 nodes"),
    "end": ({"first": 30}, "config.range", "first sample 30"),
    "block": ({"block_size": 1}, "config.range", "block_size 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_ordered(case):
    options, code, subject = BAD[case]
    with user_error(code, subject):
        sample_order(np.array([10, 20]), **{"world": StreamWorld(), "shuffle": "py1e", **options})
