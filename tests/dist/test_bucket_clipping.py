"""Bucket-wise clipping on one and four ranks against its formula in float64."""

import math
from typing import Any

import pytest
import torch

from clipping_programs import CASES, everything
from harness import run_ranks
from mlbert.distributed.world import World

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[1, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    if request.param == 1:
        return [everything(World())]
    results = run_ranks("clipping_programs:everything", request.param, tmp_path_factory.mktemp("ranks"))
    return [result.value for result in results]


def expected_gradient(found: Ranks, max_norm: float) -> tuple[torch.Tensor, float]:
    """Return the mean over ranks and micro-batches of gradients clipped by bucket, and the root mean square before."""
    gradients = torch.tensor([part for rank in found for part in rank["own"]], dtype=torch.float64)
    limit = max_norm / math.sqrt(len(found[0]["buckets"]))
    result = torch.empty_like(gradients)
    for start, stop in found[0]["buckets"]:
        norms = gradients[:, start:stop].norm(dim=1, keepdim=True)
        result[:, start:stop] = gradients[:, start:stop] * (limit / norms).clamp(max=1.0)
    return result.mean(0), float(gradients.square().sum(1).mean().sqrt())


@pytest.mark.parametrize("case", [name for name in CASES if name != "poisoned"])
def test_gradients_match_the_formula(ranks: Ranks, case: str) -> None:
    found, max_norm = [rank[case] for rank in ranks], CASES[case]["max_norm"]
    expected, norm = expected_gradient(found, max_norm)
    for rank in found:
        for step in rank["steps"]:
            grad = torch.tensor(step["grad"], dtype=torch.float64)
            torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-8)
            assert step["norm"] == pytest.approx(norm, rel=1e-6)
        assert rank["steps"] == found[0]["steps"], "all ranks must be bit-equal"
    assert float(expected.norm()) <= max_norm
    assert len(found[0]["buckets"]) > 3
    if case != "long limit":
        assert float(expected.norm()) < 0.99 * norm, "something must be clipped"


def test_loss_scales_change_nothing_and_infinite_buckets_are_detected_on_every_rank(ranks: Ranks) -> None:
    """Scaling by a power of two is exact before clipping."""
    for rank in ranks:
        for scaled, plain in zip(rank["scaled"]["steps"], rank["two"]["steps"], strict=True):
            torch.testing.assert_close(torch.tensor(scaled["grad"]), torch.tensor(plain["grad"]), rtol=1e-6, atol=0)
        bad, good = rank["poisoned"]["steps"]
        assert not math.isfinite(bad["norm"])
        assert good == rank["two"]["steps"][1]


def test_clipping_and_reduction_overlap_backward(ranks: Ranks) -> None:
    """When the first layer's backward begins, three layers have their gradients: in the earlier micro-batch they are
    already clipped, in the last one their sums have also started."""
    if len(ranks) == 1:
        return  # one rank has no communication to overlap
    for rank in ranks:
        (clipped, started), (clipped_in_last, started_in_last) = rank["arrivals"]["seen"]
        assert clipped >= 2
        assert started == 0, "an earlier micro-batch must not start a sum"
        assert clipped_in_last >= 2
        assert started_in_last == clipped_in_last
        assert rank["arrivals"]["overlapped"] == rank["arrivals"]["buckets"] == 4
