"""The ladder: its rungs, padded batches, and steps that do not fit in memory."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from gpu_check import ladder
from gpu_check.ladder import Ladder, Rung, Sizes, fp8_rungs, rungs, token_budget, variants, without
from gpu_check.parts import tiny_scale
from mlbert.data.loading.batches import HostBatch
from mlbert.ops import forms as registry
from mlbert.programs.bench.step_time import make_batch

CPU = torch.device("cpu")
SIZES = Sizes(8, 2, 3, 1)


@pytest.fixture
def small() -> Ladder:
    yield Ladder(tiny_scale().config, CPU, torch.bfloat16, SIZES, 0.0)
    registry.select("auto")


def test_last_rung_has_everything_that_auto_selects() -> None:
    found = rungs(CPU, SIZES)
    best = registry.select("auto")
    assert found[0] == Rung("plain", {}, "plain", SIZES.plain)
    assert found[-1].forms == {op: form for op, form in best.items() if form != "plain" and not op.startswith("fp8_")}
    for before, after in itertools.pairwise(found):
        assert before.forms.items() <= after.forms.items()
    names = [rung.name for rung in [*found, *fp8_rungs(CPU, found[-1]), *variants(CPU, [found[-1]], SIZES)]]
    assert len(set(names)) == len(names)


def test_without_removes_one_family() -> None:
    rung = Rung("all", {"attention": "triton", "feed_forward": "cublaslt"}, "triton", 8)
    assert without(rung, "cublaslt").forms == {"attention": "triton"}
    assert without(rung, "cublaslt").name == "all, no cublaslt"


@pytest.mark.parametrize(("tokens", "filled"), [(117684, 117760), (10000, 10112), (1000, 1008), (52, 52), (64, 64)])
def test_padding_adds_few_tokens(tokens: int, filled: int) -> None:
    assert token_budget(tokens, CPU) == filled


def test_padded_batch_has_the_same_loss(small: Ladder) -> None:
    batch, best = make_batch(small.config, 3, None, 1), rungs(CPU, SIZES)[-1]
    assert ladder.budget_of(batch, CPU, fill=True).masked > batch.num_masked
    losses = []
    for fill in (False, True):
        measured = Ladder(small.config, CPU, torch.float32, SIZES, 0.0)
        losses.append(float(measured.step_of(dataclasses.replace(best, fill=fill), batch)()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_batch_is_halved_until_it_fits(small: Ladder) -> None:
    sizes = []

    def measure(batch: HostBatch) -> dict:
        sizes.append(batch.num_samples)
        if batch.num_samples > 2:
            raise torch.OutOfMemoryError("too large")
        return {"sequences": batch.num_samples}

    assert small.with_largest_batch(8, measure) == {"sequences": 2, "did_not_fit": 8}
    assert sizes == [8, 4, 2]
    assert small.with_largest_batch(2, measure) == {"sequences": 2}


def test_graph_rung_runs_on_a_cpu(small: Ladder) -> None:
    """On a CPU nothing is captured and the steps are the same."""
    best = rungs(CPU, SIZES)[-1]
    graphed = next(rung for rung in variants(CPU, [best], SIZES) if rung.graph)
    results = [small.measure(rung) for rung in (best, graphed)]
    assert all(row["sequences_per_second"] > 0 and row["sequences"] == SIZES.fast for row in results)
