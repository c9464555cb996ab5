"""The sample order of MDS sets: that of MosaicML Streaming,
from which every world's samples follow.
"""

import json
import tracemalloc
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mlbert.data.formats.mds_order import SHUFFLES, epoch_length, places_at, shuffle_into
from mlbert.data.formats.mds_shuffles import _spread
from mlbert.data.formats.streams import Mixture, samples_of_epoch, streams_of
from mlbert.data.loading.text_lanes import EpochOrders
from text_sets import plain_shuffle, sample_order
from user_errors import user_error

GOLDEN = json.loads((Path(__file__).parents[3] / "assets/mds/sample_order.json").read_bytes())
BLOCK = 1 << 16
PY1E = SHUFFLES["py1e"]
SEED = 9176  # Streaming's default
STREAMS = json.loads((Path(__file__).parents[3] / "assets/mds/streams_order.json").read_bytes())
SET_SIZES = [np.array(sizes) for sizes in STREAMS["shard_sizes"]]


def shuffled(
    sizes: np.ndarray, shuffle: str, nodes: int, seed: int, epoch: int, block_size: int
) -> np.ndarray:
    samples = np.full(sizes.sum(), -1, np.int32)
    SHUFFLES[shuffle](samples, sizes, nodes, seed, epoch, block_size)
    return samples


@pytest.mark.parametrize("case", GOLDEN["cases"])
def test_order_of_streaming(case):
    sizes = np.array(GOLDEN["shard_sizes"])
    canonical_nodes = case["num_canonical_nodes"]
    epoch = case["epoch"]
    order = places_at(
        np.arange(epoch_length(sizes.sum(), canonical_nodes)), sizes.sum(), canonical_nodes
    )
    if case["shuffle_algo"] != "none":
        order = shuffled(sizes, case["shuffle_algo"], canonical_nodes, SEED, epoch, 100)[order]
    found = of_workers(
        order.tolist(), case["world"], case["batch_size"], case.get("sample_in_epoch", 0)
    )
    assert found == np.ravel(case["ids"]).tolist()


def of_workers(order: list[int], world: dict[str, int], batch_size: int, first: int) -> list[int]:
    """Return the order that Streaming gives to the workers of a world, worker by worker;
    -1 is padding.
    """
    nodes, ranks, workers = world.values()
    result = []
    for node in range(nodes):
        mine = order[first - first % nodes + node :: nodes]
        missing = -len(mine) % ranks
        end = len(mine) + 1 - ranks
        for rank in range(ranks):
            padded = [*mine, *mine[end - missing : end]]
            samples = iter(padded[rank::ranks])
            batches = []
            while batch := list(islice(samples, batch_size)):
                batches.append(batch + [-1] * (batch_size - len(batch)))
            while len(batches) % workers:
                batches.append([-1] * batch_size)
            for worker in range(workers):
                result += [sample for batch in batches[worker::workers] for sample in batch]
    return result


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=30).map(np.array),
    st.integers(1, 9),
    st.sampled_from(sorted(SHUFFLES)),
    st.integers(0, 3),
    st.integers(0, 99),
    st.integers(2, 300),
)
def test_equal_to_the_plain_order(sizes, nodes, shuffle, epoch, seed, block_size):
    assume(sizes.sum() >= nodes)
    found = shuffled(sizes, shuffle, nodes, seed, epoch, block_size)
    np.testing.assert_array_equal(
        found, plain_shuffle(sizes.tolist(), shuffle, epoch, nodes, seed, block_size)
    )
    positions = np.arange(epoch_length(sizes.sum(), nodes))
    whole = found[places_at(positions, sizes.sum(), nodes)]
    assert np.unique(whole).tolist() == list(range(sizes.sum()))
    assert len(whole) < sizes.sum() + nodes  # samples come twice only to fill rows
    np.testing.assert_array_equal(
        whole, sample_order(sizes.tolist(), shuffle, epoch, nodes, seed, block_size)
    )


def test_samples_shifted_to_the_same_place_keep_their_order():
    """Sorting breaks ties in other ways on other processors."""

    class Halves:
        def integers(self, least, most):
            return most - 1

        def uniform(self, low, high, size):
            return np.resize([0.5, -0.5], size)

    samples = np.arange(4000, dtype=np.int32)
    _spread(samples, np.full(40, 100), Halves(), 400)
    places = np.arange(4000) + np.resize([0.5, -0.5], 4000)
    np.testing.assert_array_equal(samples, np.argsort(places, kind="stable"))


def test_fewer_samples_than_canonical_nodes():
    with user_error("config.conflict", "canonical_nodes 64"):
        epoch_length(30, 64)


def test_memory_is_that_of_a_block():
    def peak(num_samples: int) -> int:
        samples = np.empty(num_samples, np.int32)
        tracemalloc.start()
        try:
            sizes = np.full(num_samples // 5000, 5000)
            shuffle_into(samples, sizes, shuffle="py1e", epoch=1, canonical_nodes=1, seed=SEED)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHUFFLES, "py1e", lambda *arguments: PY1E(*arguments[:-1], BLOCK))
        assert peak(2_000_000) < 1.2 * peak(1_000_000) < 120 * BLOCK


def streams(*weights: dict, **more: object) -> str:
    return json.dumps(
        {
            "streams": [
                {"local": f"set{number}", **one, **more} for number, one in enumerate(weights)
            ]
        }
    )


@pytest.mark.parametrize("case", STREAMS["cases"])
def test_order_of_several_sets(case: dict, tmp_path: Path) -> None:
    found = streams_of("", streams(*case["weights"]), Path())
    seed = case["seed"]
    is_shuffled = case["shuffle"] is not None
    samples = samples_of_epoch(found, [int(sizes.sum()) for sizes in SET_SIZES], seed)
    options = {"shuffle": case["shuffle"], "seed": seed, "canonical_nodes": case["canonical_nodes"]}
    mixture = Mixture(SET_SIZES, samples, seed, is_shuffled)
    orders = EpochOrders(mixture, **options, folder=tmp_path)
    assert orders(case["epoch"], np.arange(orders.length)).tolist() == case["ids"]


def test_invalid_streams_are_named() -> None:
    invalid = [
        "[",
        '{"streams": []}',
        *(streams(one) for one in ({"proportions": 1}, {"repeat": -1}, {"choose": 1.5})),
    ]
    in_conflict = [streams({"choose": 1, "repeat": 1}), streams({"proportion": 1}, {})]
    for texts, code in ((invalid, "file.json"), (in_conflict, "config.conflict")):
        for text in texts:
            with user_error(code, "DATA_STREAMS"):
                streams_of("DATA_STREAMS", text, Path())
