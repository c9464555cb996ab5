"""Sharded optimizers on 1, 2 and 4 ranks against one process: odd sizes, skipped steps, checkpoints, overlap.

Shards are cut over all ranks and inside make-believe nodes of two ranks or one; weights travel exact and rounded.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness import run_ranks
from mlbert.distributed.world import World
from mlbert.optim.compiled import CompiledOptimizer
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from sharded_programs import OTHERS, gradient_share, random_parameters, set_gradient, sharded_lamb
from unsharded import unsharded
from user_errors import user_error

UPDATES = 5
SKIPPED = [False, False, True, False, False]
# float32 gradients summed in another order; weights are of size 0.02 and move by 2 % an update.
TOLERANCES = {"rtol": 1e-5, "atol": 2e-8}
OVERLAP_TOLERANCE = 5e-6  # the same of gradients of size 3


def reference(
    max_grad_norm: float | None, method: type[CompiledOptimizer] = Lamb
) -> tuple[CompiledOptimizer, FlatParameters]:
    flat = FlatParameters(random_parameters())
    numbers = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": max_grad_norm}
    return unsharded(method, flat, **numbers, implementation="plain"), flat


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """`Lamb` on the whole gradient: weights, norms, and the state after three steps."""
    optimizer, flat = reference(1.0)
    norms, state = [], {}
    for update in range(UPDATES):
        set_gradient(World(), flat, update)
        norm = float(optimizer.step(0.02))
        if math.isfinite(norm):
            norms.append(norm)
        if update == 2:
            state = {key: torch.as_tensor(value).clone() for key, value in optimizer.state_dict().items()}
    return {"weights": flat.data, "norms": norms, "state": state}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], Path]:
    """What every rank returned, and the folder of saved states: of one rank ("alone"), and of all of these."""
    folder = tmp_path_factory.mktemp("sharded")
    sharded_lamb(World(), str(folder), save_as="alone")
    results = run_ranks("sharded_programs:sharded", request.param, folder, folder=str(folder))
    return [result.value for result in results], folder


@pytest.fixture(scope="module", params=[(4, 2), (2, 1)], ids=["2 nodes of 2", "2 nodes of 1"])
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], Path, int]:
    """The same with shards inside nodes, and the ranks of a node."""
    folder = tmp_path_factory.mktemp("nodes")
    sharded_lamb(World(), str(folder), save_as="alone")
    size, node_size = request.param
    results = run_ranks("sharded_programs:sharded_in_nodes", size, folder, node_size=node_size, folder=str(folder))
    return [result.value for result in results], folder, node_size


def assert_equals(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["skipped"] == SKIPPED
    assert found["norms"] == pytest.approx(plain["norms"], rel=1e-6)
    torch.testing.assert_close(torch.tensor(found["weights"]), plain["weights"], **TOLERANCES)


def test_a_single_rank_equals_plain_lamb(tmp_path: Path, plain: dict[str, Any]) -> None:
    assert_equals(sharded_lamb(World(), str(tmp_path)), plain)


@pytest.mark.parametrize("case", ["plain", "one block", "native"])
def test_several_ranks_equal_plain_lamb(ranks: tuple[list[dict], Path], plain: dict[str, Any], case: str) -> None:
    found = ranks[0][0][case]
    assert found["blocks"] == (1 if case == "one block" else pytest.approx(14, abs=4)), "shards cut tensors"
    assert found["shard"] < plain["weights"].numel() / len(ranks[0]) + 64, "moments are shared out"
    assert_equals(found, plain)


@pytest.mark.parametrize("form", ["plain", "native"])
@pytest.mark.parametrize("method", OTHERS, ids=lambda cls: cls.name)
def test_other_methods_on_several_ranks(
    ranks: tuple[list[dict], Path], method: type[CompiledOptimizer], form: str
) -> None:
    assert_equals_one_process(ranks[0][0]["methods"][f"{method.name} {form}"], method)
    for result in ranks[0]:
        assert result["methods"] == ranks[0][0]["methods"]


def assert_equals_one_process(found: dict[str, Any], method: type[CompiledOptimizer]) -> None:
    optimizer, flat = reference(1.0, method)
    for update in range(UPDATES):
        set_gradient(World(), flat, update)
        optimizer.step(0.02)
    assert found["skipped"] == SKIPPED
    # An element whose gradients nearly cancel divides two small numbers: bounds are of the update's size, 0.02.
    torch.testing.assert_close(torch.tensor(found["weights"]), flat.data, rtol=1e-4, atol=2e-6)


def test_all_ranks_hold_the_same_bits_each_time(ranks: tuple[list[dict], Path]) -> None:
    results = ranks[0]
    for result in results:
        assert result["plain"] == results[0]["plain"] == result["again"]


def assert_states_agree(results: list[dict], folder: Path, saved: str, plain: dict[str, Any]) -> None:
    """The saved state is that of one process, which goes on with it, as the ranks went on with that of one process."""
    state = load_file(folder / f"{saved}.safetensors")
    for key, value in plain["state"].items():
        torch.testing.assert_close(state[key], value, **TOLERANCES)
    for result in results:
        torch.testing.assert_close(torch.tensor(result["continued"]["weights"]), plain["weights"], **TOLERANCES)
    continued = sharded_lamb(World(), str(folder), load_from=saved)
    torch.testing.assert_close(torch.tensor(continued["weights"]), plain["weights"], **TOLERANCES)


def test_state_does_not_tell_the_number_of_ranks(ranks: tuple[list[dict], Path], plain: dict[str, Any]) -> None:
    assert_states_agree(*ranks, "saved", plain)


def clipped_by_hand(size: int) -> torch.Tensor:
    """Weights when each rank's share, scaled to the mean of its own samples, is clipped, and the sum is not."""
    optimizer, flat = reference(None)
    for update in range(UPDATES):
        flat.zero_grad()
        for shares in torch.arange(4).chunk(size):
            part = sum(gradient_share(update, share, flat.numel) for share in shares.tolist())
            own_mean = part.double() * size
            norm = float(own_mean.norm())
            flat.grad += (own_mean / max(norm, 1.0) / size).float() if math.isfinite(norm) else torch.nan
        optimizer.step(0.02)
    return flat.data


@pytest.mark.parametrize("case", ["clipped before", "clipped before, not sharded"])
def test_clipping_before_the_reduction(ranks: tuple[list[dict], Path], case: str) -> None:
    found = ranks[0][0][case]
    assert found["skipped"] == SKIPPED
    assert max(found["norms"]) <= 1.0
    torch.testing.assert_close(torch.tensor(found["weights"]), clipped_by_hand(len(ranks[0])), **TOLERANCES)


def test_nothing_starts_in_backward_when_it_must_be_clipped_first(ranks: tuple[list[dict], Path]) -> None:
    assert [result["clipped before, not sharded"]["started_in_backward"] for result in ranks[0]] == [0] * len(ranks[0])


def test_clipping_before_and_after_differ(ranks: tuple[list[dict], Path], plain: dict[str, Any]) -> None:
    found = torch.tensor(ranks[0][0]["clipped before"]["weights"])
    assert float((found - plain["weights"]).abs().max()) > 1e-4


def test_one_rank_clips_alike_before_and_after(tmp_path: Path, plain: dict[str, Any]) -> None:
    found = sharded_lamb(World(), str(tmp_path), clip_before=1.0)
    torch.testing.assert_close(torch.tensor(found["weights"]), plain["weights"], **TOLERANCES)


def test_shards_inside_nodes_equal_plain_lamb(nodes: tuple[list[dict], Path, int], plain: dict[str, Any]) -> None:
    results, folder, node_size = nodes
    assert_equals(results[0]["plain"], plain)
    for result in results:
        assert result["plain"] == results[0]["plain"], "bit for bit, on every node"
        assert result["plain"]["shard"] == pytest.approx(plain["weights"].numel() / node_size, abs=64)
    assert_states_agree(results, folder, "nodes", plain)


def test_clipping_before_the_reduction_inside_nodes(nodes: tuple[list[dict], Path, int]) -> None:
    found = nodes[0][0]["clipped before"]
    torch.testing.assert_close(torch.tensor(found["weights"]), clipped_by_hand(len(nodes[0])), **TOLERANCES)


def test_blocks_inside_nodes_start_before_backward_ends(nodes: tuple[list[dict], Path, int]) -> None:
    for result in nodes[0]:
        assert result["overlap"]["difference"] < OVERLAP_TOLERANCE
        assert result["overlap"]["overlapped"] >= 2


def test_ranks_dealt_out_over_nodes_are_refused(tmp_path: Path) -> None:
    for result in run_ranks("sharded_programs:uneven_nodes", 2, tmp_path, node_size=2):
        assert "numbered node by node" in result.value
        assert "\n" not in result.value


@pytest.mark.parametrize(("form", "dtype"), [("bf16", torch.bfloat16), ("e5m2", torch.float8_e5m2)])
def test_rounding_on_the_way_never_reaches_the_exact_weights(
    ranks: tuple[list[dict], Path], plain: dict[str, Any], form: str, dtype: torch.dtype
) -> None:
    """The gradients here do not depend on the weights, so the exact ones are those of LAMB without any rounding."""
    results = ranks[0]
    for result in results:
        assert result["rounded"][form] == results[0]["rounded"][form], "all ranks compute with the same bits"
    whole = results[0]["rounded"][form]["whole"]
    assert whole["weights"] == results[0]["plain"]["weights"]
    assert_equals(whole, plain)
    trained = torch.tensor(whole["trained"])
    assert torch.equal(trained, torch.tensor(whole["weights"]).to(dtype).float())
    assert not torch.equal(trained, torch.tensor(whole["weights"]))


@pytest.mark.parametrize("form", ["bf16", "e5m2"])
def test_a_checkpoint_of_rounded_weights_is_exact(
    ranks: tuple[list[dict], Path], plain: dict[str, Any], form: str
) -> None:
    results, folder = ranks
    saved, exact = load_file(folder / f"{form}.safetensors"), load_file(folder / "saved.safetensors")
    assert torch.equal(saved["weights"], exact["weights"])
    for result in results:
        for key in ("trained", "weights"):
            assert result["rounded"][form]["continued"][key] == result["rounded"][form]["whole"][key]


def test_madgrad_keeps_its_exact_start_among_rounded_weights(ranks: tuple[list[dict], Path]) -> None:
    """The start is the exact weights' and part of a checkpoint, or the continued run would differ."""
    results, folder = ranks
    start = torch.cat([parameter.detach().flatten() for _, parameter in random_parameters()])
    assert torch.equal(load_file(folder / "madgrad_bf16.safetensors")["start"], start)
    for result in results:
        found = result["madgrad rounded"]
        assert found["continued"]["weights"] == found["whole"]["weights"]
        assert found["whole"]["weights"] == result["methods"]["madgrad plain"]["weights"]


def test_rounded_weights_inside_nodes(nodes: tuple[list[dict], Path, int]) -> None:
    for result in nodes[0]:
        assert result["rounded"] == nodes[0][0]["rounded"]
        assert result["rounded"]["bf16"]["whole"]["weights"] == result["plain"]["weights"]


def test_blocks_start_before_backward_ends(ranks: tuple[list[dict], Path]) -> None:
    for result in ranks[0]:
        assert result["overlap"]["difference"] < OVERLAP_TOLERANCE
        assert result["overlap"]["overlapped"] >= 2


def test_triton_equals_plain_lamb(tmp_path: Path, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks in Triton's interpreter: skipped step, state and all; nothing is decided on the host."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    results = run_ranks("sharded_programs:sharded_triton", 2, tmp_path, folder=str(tmp_path))
    assert_equals(results[0].value["first"], plain)
    assert results[0].value == results[1].value
    for method in OTHERS:
        assert_equals_one_process(results[0].value["methods"][method.name], method)
    continued = results[0].value["continued"]
    assert continued["weights"] == results[0].value["first"]["weights"], "the saved state continues bit for bit"
    assert results[0].value["read on the host"] == []
    rounded = results[0].value["bf16"]
    assert rounded["weights"] == results[0].value["first"]["weights"]
    assert torch.equal(torch.tensor(rounded["trained"]), torch.tensor(rounded["weights"]).bfloat16().float())


def test_triton_is_refused_where_it_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with user_error("ops.unavailable", "triton optimizer"):
        sharded_lamb(World(), str(tmp_path), implementation="triton")
