"""Sharded LAMB on 1, 2 and 4 ranks against `Lamb` in one process: odd sizes, skipped steps, checkpoints, overlap."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness import run_ranks
from mlbert.core.errors import UserError
from mlbert.dist.world import World
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from rank_programs import gradient_share, random_parameters, set_gradient, sharded_lamb

UPDATES = 5
SKIPPED = [False, False, True, False, False]
# float32 gradients summed in another order; weights are of size 0.02 and move by 2 % an update.
TOLERANCES = {"rtol": 1e-5, "atol": 2e-8}


def reference_lamb(max_grad_norm: float | None) -> tuple[Lamb, FlatParameters]:
    flat = FlatParameters(random_parameters())
    numbers = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": max_grad_norm}
    return Lamb(flat, **numbers, implementation="plain"), flat


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """`Lamb` on the whole gradient: weights, norms, and the state after three steps."""
    optimizer, flat = reference_lamb(1.0)
    norms, state = [], {}
    for update in range(UPDATES):
        set_gradient(World(), flat, update)
        result = optimizer.step(0.02)
        if not result.skipped:
            norms.append(result.grad_norm)
        if update == 2:
            state = {key: torch.as_tensor(value).clone() for key, value in optimizer.state_dict().items()}
    return {"weights": flat.data, "norms": norms, "state": state}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], Path]:
    """What every rank returned, and the folder of saved states: of one rank, and of all of these."""
    folder = tmp_path_factory.mktemp("sharded")
    sharded_lamb(World(), str(folder))
    results = run_ranks("rank_programs:sharded", request.param, folder, folder=str(folder))
    return [result.value for result in results], folder


def assert_equals(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["skipped"] == SKIPPED
    assert found["norms"] == pytest.approx(plain["norms"], rel=1e-6)
    torch.testing.assert_close(torch.tensor(found["weights"]), plain["weights"], **TOLERANCES)


def test_a_single_rank_equals_plain_lamb(tmp_path: Path, plain: dict[str, Any]) -> None:
    assert_equals(sharded_lamb(World(), str(tmp_path)), plain)


@pytest.mark.parametrize("case", ["plain", "one block"])
def test_several_ranks_equal_plain_lamb(ranks: tuple[list[dict], Path], plain: dict[str, Any], case: str) -> None:
    found = ranks[0][0][case]
    assert found["blocks"] == (1 if case == "one block" else pytest.approx(14, abs=4)), "shards cut tensors"
    assert found["shard"] < plain["weights"].numel() / len(ranks[0]) + 64, "moments are shared out"
    assert_equals(found, plain)


def test_all_ranks_hold_the_same_bits_each_time(ranks: tuple[list[dict], Path]) -> None:
    results = ranks[0]
    for result in results:
        assert result["plain"] == results[0]["plain"] == result["again"]


def test_state_does_not_tell_the_number_of_ranks(ranks: tuple[list[dict], Path], plain: dict[str, Any]) -> None:
    results, folder = ranks
    saved = load_file(folder / f"{len(results)}.safetensors")
    for key, value in plain["state"].items():
        torch.testing.assert_close(saved[key], value, **TOLERANCES)
    for result in results:
        torch.testing.assert_close(torch.tensor(result["continued"]["weights"]), plain["weights"], **TOLERANCES)
    continued = sharded_lamb(World(), str(folder), load_from=len(results))
    torch.testing.assert_close(torch.tensor(continued["weights"]), plain["weights"], **TOLERANCES)


def test_clipping_before_the_reduction(ranks: tuple[list[dict], Path]) -> None:
    """Each rank's share, scaled to the mean of its own samples, is clipped; nothing is clipped after the sum."""
    size = len(ranks[0])
    optimizer, flat = reference_lamb(None)
    for update in range(UPDATES):
        flat.zero_grad()
        for shares in torch.arange(4).chunk(size):
            part = sum(gradient_share(update, share, flat.numel) for share in shares.tolist())
            norm = float(part.double().norm()) * size
            flat.grad += part * (1.0 / max(norm, 1.0)) if math.isfinite(norm) else torch.nan
        optimizer.step(0.02)
    found = ranks[0][0]["clipped before"]
    assert found["skipped"] == SKIPPED
    assert max(found["norms"]) <= 1.0
    torch.testing.assert_close(torch.tensor(found["weights"]), flat.data, **TOLERANCES)


def test_blocks_start_before_backward_ends(ranks: tuple[list[dict], Path]) -> None:
    for result in ranks[0]:
        assert result["overlap"]["difference"] < 1e-6
        assert result["overlap"]["overlapped"] >= 2


def test_triton_equals_plain_lamb(tmp_path: Path, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks in Triton's interpreter: skipped step, state and all; nothing is decided on the host."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    results = run_ranks("rank_programs:sharded_triton", 2, tmp_path, folder=str(tmp_path))
    assert_equals(results[0].value["first"], plain)
    assert results[0].value == results[1].value
    continued = results[0].value["continued"]
    assert continued["weights"] == results[0].value["first"]["weights"], "the saved state continues bit for bit"


def test_triton_is_refused_where_it_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="triton optimizer"):
        sharded_lamb(World(), str(tmp_path), implementation="triton")
