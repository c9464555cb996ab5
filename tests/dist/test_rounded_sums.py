"""bfloat16 gradient reduction on four ranks, against float64 within the expected error bound."""

import math
from typing import Any

import pytest
import torch

from harness import run_ranks
from mlbert.distributed.world import World
from rounded_programs import LIMIT, gradients

ROUNDING = 2.0**-8  # of bfloat16
FLOAT32 = 1e-6  # several float32 additions
TINY = 1e-37  # underflows in any format

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    results = run_ranks("rounded_programs:everything", 4, tmp_path_factory.mktemp("rounded"), node_size=2)
    return [result.value for result in results]


def shares(ranks: Ranks) -> torch.Tensor:
    return torch.stack(gradients(World(world_size=len(ranks)), 1.0)).double()


def assert_within(found: torch.Tensor, addends: torch.Tensor, roundings: tuple[float, float]) -> None:
    total = addends.sum(0)
    bound = roundings[0] * addends.abs().sum(0) + roundings[1] * total.abs() + FLOAT32 * addends.abs().sum(0) + TINY
    assert ((found - total).abs() <= bound).all()


@pytest.mark.parametrize(
    ("way", "roundings"),
    [
        ("whole", (ROUNDING, ROUNDING * (1 + ROUNDING))),
        ("all", (ROUNDING, 0.0)),
        # Partial sums are rounded again between nodes, and so is their sum.
        ("node", (2 * ROUNDING + ROUNDING**2, 2 * ROUNDING)),
    ],
)
def test_sums_are_bit_equal_and_within_the_error_bound(ranks: Ranks, way: str, roundings: tuple[float, float]) -> None:
    for form, allowed in (("fp32", (0.0, 0.0)), ("bf16", roundings)):
        name = f"{way} {form}"
        assert all(rank[name] == ranks[0][name] for rank in ranks)
        found = torch.tensor(ranks[0][name]["sum"], dtype=torch.float64)
        # A sum that cancels is rounded relative to its computed value, which may be off by one addend's rounding.
        assert_within(found, shares(ranks), (allowed[0] + allowed[1] * allowed[0], allowed[1]))
    assert ranks[0][f"{way} bf16"]["sum"] != ranks[0][f"{way} fp32"]["sum"], "bf16 must round"


def test_rounded_sums_overlap_backward(ranks: Ranks) -> None:
    for way in ("whole", "buckets", "all", "node"):
        found = ranks[0][f"{way} bf16"]
        assert found["overlapped"] == found["buckets"] > 1


def test_clipping_is_applied_before_rounding(ranks: Ranks) -> None:
    """Each rank clips its gradient in float32 and then rounds it for the reduction."""
    own = shares(ranks) * len(ranks)
    clipped = own * (LIMIT / own.norm(dim=1, keepdim=True)).clamp(max=1.0) / len(ranks)
    found = torch.tensor(ranks[0]["before bf16"]["sum"], dtype=torch.float64)
    assert ranks[0]["before bf16"]["overlapped"] == 0
    assert_within(found, clipped, (2 * ROUNDING, ROUNDING))


def test_clipped_buckets_match_float32_up_to_rounding(ranks: Ranks) -> None:
    exact, rounded = (torch.tensor(ranks[0][f"buckets {form}"]["sum"]) for form in ("fp32", "bf16"))
    assert float(exact.norm()) <= LIMIT
    assert float((exact - rounded).norm()) <= 3 * ROUNDING * float(exact.norm())


@pytest.mark.parametrize("way", ["whole", "node"])
def test_non_finite_values_stay_in_place(ranks: Ranks, way: str) -> None:
    for rank in ranks:
        found, good = rank["bad"][way]["sum"], rank[f"{way} bf16"]["sum"]
        assert [i for i, value in enumerate(found) if not math.isfinite(value)] == [100]
        assert found[:100] + found[101:] == good[:100] + good[101:]
    assert rank["scaled"]["sum"] == rank["whole bf16"]["sum"], "scaling by a power of two is exact"
