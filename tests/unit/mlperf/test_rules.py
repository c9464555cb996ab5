"""Rules against the official convergence checker and the published tables."""

from typing import Any

import pytest

from mlbert.mlperf import rules


@pytest.fixture(scope="module")
def official() -> Any:
    """Return the official checker, whose import takes seconds."""
    from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

    return RCP_Checker("training", "5.0.0", rules.BENCHMARK, False)


def test_every_reference_point_is_the_official_one(official: Any) -> None:
    records = {record["BS"]: (name, record) for name, record in official.rcp_data.items()}
    assert sorted(records) == [point.global_batch_size for point in rules.REFERENCE_POINTS]
    for point in rules.REFERENCE_POINTS:
        name, record = records[point.global_batch_size]
        assert point.mean_samples == pytest.approx(record["RCP Mean"], abs=0.01)
        assert point.stdev_samples == pytest.approx(record["RCP Stdev"], abs=0.01)
        assert point.min_mean_samples == pytest.approx(record["Min Epochs"], abs=0.5)
        assert point.pruned == (name in official.pruned_rcp_data)


@pytest.mark.parametrize("batch", [512, 768, 1024, 2048, 4096, 5000, 6500, 8192, 12800, 16000])
def test_interpolation_is_the_official_one(official: Any, batch: int) -> None:
    low = official._find_top_min_rcp(batch, "pruned_rcps")
    high = official._find_bottom_max_rcp(batch, "pruned_rcps")
    _, record = official._create_interp_rcp(batch, low, high)
    point = rules.reference_point(batch)
    assert point.mean_samples == pytest.approx(record["RCP Mean"], abs=0.01)
    assert point.min_mean_samples == pytest.approx(record["Min Epochs"], abs=0.5)


def test_ends_of_the_reference_table_and_batch_sizes() -> None:
    assert rules.reference_point(64).global_batch_size == 448
    assert rules.reference_point(16384).global_batch_size == 16384
    assert rules.reference_point(16385) is None
    assert (rules.global_batch_size(48, 8, 2.0), rules.global_batch_size(32, 1, 1.2)) == (768, 38)


@pytest.mark.parametrize(
    ("batch", "interval"),
    [
        *((batch, 150_000) for batch in (1, 448, 2048, 2171)),
        *((batch, 175_000) for batch in (3072, 4096)),
        *((batch, 200_000) for batch in (4608, 6144)),
        (8192, 225_000),
        (12288, 275_000),
        (16384, 325_000),
    ],
)
def test_evaluation_interval(batch: int, interval: int) -> None:
    assert rules.eval_interval(batch) == interval
