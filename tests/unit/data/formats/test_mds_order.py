"""The sample order of MDS sets: that of MosaicML Streaming, from which every world's samples follow."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mlbert.data.formats.mds_order import SHUFFLES, sample_order
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
    sizes, canonical_nodes, epoch = np.array(GOLDEN["shard_sizes"]), case["num_canonical_nodes"], case["epoch"]
    order = sample_order(sizes, shuffle=None, epoch=epoch, canonical_nodes=canonical_nodes, seed=SEED)
    if case["shuffle_algo"] != "none":
        order = SHUFFLES[case["shuffle_algo"]](sizes, canonical_nodes, SEED, epoch, 100)[order]
    found = of_workers(order.tolist(), case["world"], case["batch_size"], case.get("sample_in_epoch", 0))
    assert found == np.ravel(case["ids"]).tolist()


SEED = 9176  # Streaming's default


def of_workers(order: list[int], world: dict[str, int], batch_size: int, first: int) -> list[int]:
    """The order as Streaming gives it to the workers of a world, worker by worker; -1 is padding."""
    nodes, ranks, workers = world.values()
    result = []
    for node in range(nodes):
        mine = order[first - first % nodes + node :: nodes]
        missing, end = -len(mine) % ranks, len(mine) + 1 - ranks
        for rank in range(ranks):
            samples = iter([*mine, *mine[end - missing : end]][rank::ranks])
            batches = []
            while batch := list(islice(samples, batch_size)):
                batches.append(batch + [-1] * (batch_size - len(batch)))
            while len(batches) % workers:
                batches.append([-1] * batch_size)
            for worker in range(workers):
                result += [sample for batch in batches[worker::workers] for sample in batch]
    return result


@given(SIZES, st.integers(1, 9), st.sampled_from([None, *SHUFFLES]), st.integers(0, 3))
def test_an_epoch_has_every_sample(sizes, canonical_nodes, shuffle, epoch):
    assume(sizes.sum() >= canonical_nodes)
    options = {"shuffle": shuffle, "epoch": epoch, "canonical_nodes": canonical_nodes, "seed": SEED}
    found = sample_order(sizes, **options)
    assert np.unique(found).tolist() == list(range(sizes.sum()))
    np.testing.assert_array_equal(found, sample_order(sizes, **options))
    assert len(found) < sizes.sum() + canonical_nodes  # samples come twice only to fill rows


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


def test_fewer_samples_than_canonical_nodes():
    with user_error("config.conflict", "canonical_nodes 64"):
        sample_order(np.array([10, 20]), shuffle="py1e", epoch=0, canonical_nodes=64, seed=SEED)
