"""Several sets as one: the samples of an epoch and their order are those of MosaicML Streaming."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mlbert.data.formats.streams import Mixture, samples_of_epoch, streams_of
from mlbert.data.loading.text_lanes import EpochOrders
from user_errors import user_error

GOLDEN = json.loads((Path(__file__).parents[3] / "assets/mds/streams_order.json").read_bytes())
SIZES = [np.array(sizes) for sizes in GOLDEN["shard_sizes"]]


def streams(*weights: dict, **more: object) -> str:
    return json.dumps({"streams": [{"local": f"set{number}", **one, **more} for number, one in enumerate(weights)]})


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['shuffle']}-{case['weights']}")
def test_order_of_streaming(case: dict, tmp_path: Path) -> None:
    found = streams_of("", streams(*case["weights"]), Path())
    seed, is_shuffled = case["seed"], case["shuffle"] is not None
    samples = samples_of_epoch(found, [int(sizes.sum()) for sizes in SIZES], seed)
    options = {"shuffle": case["shuffle"], "seed": seed, "canonical_nodes": case["canonical_nodes"]}
    mixture = Mixture(SIZES, samples, seed, is_shuffled)
    orders = EpochOrders(mixture, **options, folder=tmp_path)
    assert orders(case["epoch"], np.arange(orders.length)).tolist() == case["ids"]


@pytest.mark.parametrize(
    ("weights", "samples"),
    [
        (({}, {}), [30, 10]),
        (({"repeat": 0.25}, {"choose": 25}), [7, 25]),
        (({"proportion": 1}, {"proportion": 3}), [10, 30]),
    ],
)
def test_weights(weights: tuple[dict, ...], samples: list[int]) -> None:
    found = streams_of("", streams(*weights), Path())
    assert samples_of_epoch(found, [30, 10], 1) == samples
    sizes, ids = Mixture([np.array([20, 10]), np.array([10])], samples, 1, True)(0)
    assert sizes.sum() == len(ids) == sum(samples)
    counts = np.bincount(ids, minlength=40)
    for part, number, wanted in ((counts[:30], 30, samples[0]), (counts[30:], 10, samples[1])):
        assert part.sum() == wanted
        assert set(part.tolist()) <= {wanted // number, -(-wanted // number)}, "none occurs twice more than another"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[", "file.json"),
        ('{"streams": []}', "file.json"),
        (streams({"proportions": 1}), "file.json"),
        (streams({"repeat": -1}), "file.json"),
        (streams({"choose": 1.5}), "file.json"),
        (streams({"choose": 1, "repeat": 1}), "config.conflict"),
        (streams({"proportion": 1}, {}), "config.conflict"),
    ],
)
def test_invalid_streams_are_named(text: str, code: str) -> None:
    with user_error(code, "DATA_STREAMS"):
        streams_of("DATA_STREAMS", text, Path())
