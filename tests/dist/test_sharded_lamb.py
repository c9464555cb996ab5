"""Sharded optimizers on 1, 2 and 4 ranks against one process:
odd sizes, skipped steps, checkpoints.

Optimizers are sharded over all ranks and inside simulated nodes of one or two ranks,
with exact and rounded all-gather.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness import run_ranks
from mlbert.distributed.groups import ShardGroups
from mlbert.distributed.sharding import ShardedReducer, ShardLayout
from mlbert.distributed.world import World
from mlbert.optim.acclip import ACClip
from mlbert.optim.adamw import AdamW, StableAdamW
from mlbert.optim.compiled import CompiledOptimizer
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from mlbert.optim.madgrad import Madgrad
from mlbert.optim.sgd import SGD
from unsharded import unsharded
from user_errors import user_error

OTHERS: tuple[type[CompiledOptimizer], ...] = (AdamW, StableAdamW, ACClip, Madgrad, SGD)
# Those whose kernels sum over a tensor's ranks or keep the initial weights;
# the interpreter takes seconds for each.
WITH_OWN_STATE = (StableAdamW, Madgrad)
NUMBERS = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01}
SHARD_SHAPES = {
    "word.weight": (37, 11),
    "one.weight": (1,),
    "LayerNorm.weight": (129,),
    "zero.weight": (33,),
}
SHARD_SHAPES |= {"wide.weight": (64, 100), "last.bias": (5,)}
UPDATES = 5
SKIPPED = [False, False, True, False, False]
# float32 gradients are summed in another order; weights are about 0.02
# and change by 2 % per update.
TOLERANCES = {"rtol": 1e-5, "atol": 2e-8}


def random_parameters() -> list[tuple[str, nn.Parameter]]:
    """Return parameters of odd sizes, one of them zero, equal on all ranks."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for name, shape in SHARD_SHAPES.items():
        values = torch.randn(shape, generator=generator) * (
            0.0 if name.startswith("zero") else 0.02
        )
        found.append((name, nn.Parameter(values)))
    return found


def gradient_share(update: int, share: int, numel: int) -> Tensor:
    """Return the gradient of one of four shares of a batch;
    in update 2, one element of one share is infinite.
    """
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(100 * update + share)) * 0.3
    if update == 2 and share == 3:
        grad[numel // 2] = torch.inf
    return grad


def set_gradient(world: World, flat: FlatParameters, update: int) -> None:
    flat.zero_grad()
    for share in torch.arange(4).chunk(world.world_size)[world.rank].tolist():
        flat.grad += gradient_share(update, share, flat.numel)


def make_layout(
    world: World, nodes: bool, block_elements: int
) -> tuple[FlatParameters, ShardLayout]:
    groups = ShardGroups.inside_nodes(world) if nodes else ShardGroups.all_ranks(world)
    flat = FlatParameters(random_parameters(), ShardLayout.multiple(groups))
    return flat, ShardLayout(flat.padded_data.numel(), groups, block_elements)


def assert_copied(flat: FlatParameters) -> None:
    assert flat.padded_copy is not None
    assert torch.equal(flat.padded_copy, flat.padded_data.bfloat16())


def sharded_lamb(
    world: World,
    folder: str,
    updates: int = 5,
    block_elements: int = 1000,
    clip_before: float | None = None,
    implementation: str = "plain",
    load_from: str | None = None,
    nodes: bool = False,
    gathered: str = "fp32",
    save_as: str | None = None,
    method: type[CompiledOptimizer] = Lamb,
) -> dict[str, Any]:
    """Run LAMB or another optimizer on fixed gradients;
    optionally save the state after update 3 or load it.
    """
    flat, layout = make_layout(world, nodes, block_elements)
    reducer = ShardedReducer(
        flat.parameters, flat.padded_grad, flat.offsets, world, layout, clip_before
    )
    numbers = {
        **NUMBERS,
        "max_grad_norm": None if clip_before else 1.0,
        "copy_dtype": torch.bfloat16,
    }
    optimizer = method(flat, layout, **numbers, implementation=implementation, gathered=gathered)
    first = 0
    norms = []
    if load_from is not None:
        first = 3
        state = load_file(f"{folder}/{load_from}.safetensors")
        flat.data.copy_(state.pop("weights"))
        optimizer.load_state_dict({**state, "num_updates": int(state["num_updates"])})
    for update in range(first, updates):
        set_gradient(world, flat, update)
        reducer.finish()
        norms.append(float(optimizer.step(0.02)))
        assert_copied(flat)
        if update == 2 and save_as:
            state = optimizer.state_dict()
            with optimizer.exact_weights():
                tensors = {k: torch.as_tensor(v) for k, v in state.items()} | {
                    "weights": flat.data.clone()
                }
            if world.rank == 0:
                save_file(tensors, f"{folder}/{save_as}.safetensors")
            world.barrier()
    trained = flat.data.tolist()
    with optimizer.exact_weights():
        exact = flat.data.tolist()
        assert_copied(flat)
    assert_copied(flat)
    assert flat.data.tolist() == trained, "rounding again must give the same bits"
    return {
        "trained": trained,
        "weights": exact,
        "norms": [norm for norm in norms if math.isfinite(norm)],
        "skipped": [not math.isfinite(norm) for norm in norms],
        "shard": optimizer.weights.shard.numel(),
        "blocks": len(layout.blocks),
    }


def sharded_triton(world: World, folder: str) -> dict[str, Any]:
    run = partial(sharded_lamb, world, folder, implementation="triton")
    found = {
        "first": run(save_as="triton"),
        "continued": run(load_from="triton"),
        "bf16": run(gathered="bf16"),
    }
    found["methods"] = {method.name: run(method=method) for method in WITH_OWN_STATE}
    return found | {"read on the host": host_reads(world)}


class HostReads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def host_reads(world: World) -> list[str]:
    """Return the host reads of one Triton update, including clipping and communication."""
    flat, layout = make_layout(world, False, 500)
    reducer = ShardedReducer(
        flat.parameters, flat.padded_grad, flat.offsets, world, layout, clip_before=1.0
    )
    optimizer = Lamb(
        flat, layout, **NUMBERS, max_grad_norm=None, implementation="triton", gathered="bf16"
    )
    set_gradient(world, flat, 0)
    with HostReads() as reads:
        reducer.finish()
        optimizer.launch()
        num_reads = len(reads.found)
        float(flat.data[0])
    assert len(reads.found) == num_reads + 1, "reads must be recorded"
    return reads.found[:num_reads]


def sharded(world: World, folder: str) -> dict[str, Any]:
    run = partial(sharded_lamb, world, folder)
    forms = ("plain", "native")
    return {
        "plain": run(save_as="saved"),
        "one block": run(block_elements=1 << 20),
        "again": run(),
        "native": run(implementation="native"),
        "methods": {
            f"{m.name} {form}": run(implementation=form, method=m) for m in OTHERS for form in forms
        },
        "clipped before": run(clip_before=1.0),
        "continued": run(load_from="alone"),
        "rounded": {form: sharded_rounded(world, folder, form) for form in ("bf16", "e5m2")},
        "madgrad rounded": sharded_rounded(world, folder, "bf16", Madgrad),
    }


def sharded_rounded(
    world: World, folder: str, form: str, method: type[CompiledOptimizer] = Lamb
) -> dict[str, Any]:
    """Run with a rounded all-gather, uninterrupted and resumed from a checkpoint."""
    name = form if method is Lamb else f"{method.name}_{form}"
    return {
        "whole": sharded_lamb(world, folder, gathered=form, save_as=name, method=method),
        "continued": sharded_lamb(world, folder, gathered=form, load_from=name, method=method),
    }


def sharded_in_nodes(world: World, folder: str) -> dict[str, Any]:
    return {
        "plain": sharded_lamb(world, folder, nodes=True, save_as="saved"),
        "continued": sharded_lamb(world, folder, nodes=True, load_from="alone"),
        "clipped before": sharded_lamb(world, folder, nodes=True, clip_before=1.0),
        "rounded": {"bf16": {"whole": sharded_lamb(world, folder, nodes=True, gathered="bf16")}},
    }


# The program, the number of ranks, and the ranks per node.
PLACEMENTS = {
    "all ranks": (sharded, 4, 4),
    "2 nodes of 2": (sharded_in_nodes, 4, 2),
    "2 nodes of 1": (sharded_in_nodes, 2, 1),
}


class Sharded(NamedTuple):
    results: list[dict[str, Any]]  # of each rank
    folder: Path  # of saved states: from one rank ("alone") and from all ("saved")
    node_size: int


def reference(
    max_grad_norm: float | None, method: type[CompiledOptimizer] = Lamb
) -> tuple[Any, FlatParameters]:
    flat = FlatParameters(random_parameters())
    return unsharded(
        method, flat, **NUMBERS, max_grad_norm=max_grad_norm, implementation="plain"
    ), flat


@pytest.fixture(scope="module")
def unsharded_run() -> dict[str, Any]:
    optimizer, flat = reference(1.0)
    norms = []
    state = {}
    for update in range(UPDATES):
        set_gradient(World(), flat, update)
        norm = float(optimizer.step(0.02))
        if math.isfinite(norm):
            norms.append(norm)
        if update == 2:
            state = {
                key: torch.as_tensor(value).clone() for key, value in optimizer.state_dict().items()
            }
    return {"weights": flat.data, "norms": norms, "state": state}


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sharded]:
    """Return a function that runs one of PLACEMENTS, unless it already has,
    and returns its `Sharded`.
    """

    @functools.cache
    def run(placement: str) -> Sharded:
        program, size, node_size = PLACEMENTS[placement]
        folder = tmp_path_factory.mktemp("sharded")
        sharded_lamb(World(), str(folder), save_as="alone")
        results = run_ranks(program, size, folder, node_size=node_size, folder=str(folder))
        return Sharded(results, folder, node_size)

    return run


@pytest.fixture
def ranks(run_once: Callable[[str], Sharded]) -> Sharded:
    return run_once("all ranks")


@pytest.fixture(params=PLACEMENTS)
def placed(request: pytest.FixtureRequest, run_once: Callable[[str], Sharded]) -> Sharded:
    return run_once(request.param)


def assert_equals(found: dict[str, Any], unsharded_run: dict[str, Any]) -> None:
    assert found["skipped"] == SKIPPED
    assert found["norms"] == pytest.approx(unsharded_run["norms"], rel=1e-6)
    torch.testing.assert_close(
        torch.tensor(found["weights"]), unsharded_run["weights"], **TOLERANCES
    )


def test_one_rank_matches_unsharded_lamb(tmp_path: Path, unsharded_run: dict[str, Any]) -> None:
    """On one rank, clipping before the reduction equals clipping after it."""
    assert_equals(sharded_lamb(World(), str(tmp_path)), unsharded_run)
    found = sharded_lamb(World(), str(tmp_path), clip_before=1.0)
    torch.testing.assert_close(
        torch.tensor(found["weights"]), unsharded_run["weights"], **TOLERANCES
    )


@pytest.mark.parametrize("case", ["plain", "one block", "native"])
def test_several_ranks_match_unsharded_lamb(
    ranks: Sharded, unsharded_run: dict[str, Any], case: str
) -> None:
    found = ranks.results[0][case]
    assert found["blocks"] == (1 if case == "one block" else pytest.approx(7, abs=2)), (
        "shards must cut tensors"
    )
    assert_equals(found, unsharded_run)
    assert all(result["again"] == result["plain"] for result in ranks.results), (
        "repeated runs must be bit-equal"
    )


@pytest.mark.parametrize("method", OTHERS, ids=lambda cls: cls.name)
def test_other_optimizers_on_several_ranks(ranks: Sharded, method: type[CompiledOptimizer]) -> None:
    for form in ("plain", "native"):
        assert_equals_one_process(ranks.results[0]["methods"][f"{method.name} {form}"], method)
    assert all(result["methods"] == ranks.results[0]["methods"] for result in ranks.results)


def assert_equals_one_process(found: dict[str, Any], method: type[CompiledOptimizer]) -> None:
    optimizer, flat = reference(1.0, method)
    for update in range(UPDATES):
        set_gradient(World(), flat, update)
        optimizer.step(0.02)
    assert found["skipped"] == SKIPPED
    # Where gradients nearly cancel, two small numbers are divided:
    # tolerances are relative to the update, 0.02.
    torch.testing.assert_close(torch.tensor(found["weights"]), flat.data, rtol=1e-4, atol=2e-6)


def test_saved_state_is_independent_of_the_number_of_ranks(
    placed: Sharded, unsharded_run: dict[str, Any]
) -> None:
    """The ranks' state equals one process's, and each can resume from the other's state."""
    state = load_file(placed.folder / "saved.safetensors")
    for key, value in unsharded_run["state"].items():
        torch.testing.assert_close(state[key], value, **TOLERANCES)
    alone = sharded_lamb(World(), str(placed.folder), load_from="saved")
    for found in (alone, *(result["continued"] for result in placed.results)):
        torch.testing.assert_close(
            torch.tensor(found["weights"]), unsharded_run["weights"], **TOLERANCES
        )


def reference_clipped_before(size: int) -> torch.Tensor:
    """Return the weights if each rank's gradient, scaled to the mean of its samples,
    is clipped before the sum.
    """
    optimizer, flat = reference(None)
    for update in range(UPDATES):
        flat.zero_grad()
        for shares in torch.arange(4).chunk(size):
            part = sum(gradient_share(update, share, flat.numel) for share in shares.tolist())
            own_mean = part.double() * size
            norm = float(own_mean.norm())
            flat.grad += (
                (own_mean / max(norm, 1.0) / size).float() if math.isfinite(norm) else torch.nan
            )
        optimizer.step(0.02)
    return flat.data


def test_clipping_before_the_reduction(placed: Sharded, unsharded_run: dict[str, Any]) -> None:
    found = placed.results[0]["clipped before"]
    assert found["skipped"] == SKIPPED
    assert max(found["norms"]) <= 1.0
    weights = torch.tensor(found["weights"])
    torch.testing.assert_close(weights, reference_clipped_before(len(placed.results)), **TOLERANCES)
    assert float((weights - unsharded_run["weights"]).abs().max()) > 1e-4, (
        "clipping after the reduction differs"
    )


def test_all_ranks_are_bit_equal(placed: Sharded, unsharded_run: dict[str, Any]) -> None:
    """An all-gather rounded to bfloat16 does not change the exact weights."""
    first = placed.results[0]
    assert_equals(first["plain"], unsharded_run)
    for result in placed.results:
        assert (result["plain"], result["rounded"]) == (first["plain"], first["rounded"])
        assert result["plain"]["shard"] == pytest.approx(
            unsharded_run["weights"].numel() / placed.node_size, abs=64
        )
        assert result["rounded"]["bf16"]["whole"]["weights"] == result["plain"]["weights"]


@pytest.mark.parametrize(("form", "dtype"), [("bf16", torch.bfloat16), ("e5m2", torch.float8_e5m2)])
def test_rounded_all_gather_does_not_change_the_exact_weights(
    ranks: Sharded, form: str, dtype: torch.dtype
) -> None:
    """The gradients do not depend on the weights here,
    so the exact weights equal those without rounding.
    """
    whole, continued = (ranks.results[0]["rounded"][form][name] for name in ("whole", "continued"))
    plain = ranks.results[0]["plain"]
    assert all(whole[key] == plain[key] for key in ("weights", "norms", "skipped"))
    trained = torch.tensor(whole["trained"])
    assert torch.equal(trained, torch.tensor(whole["weights"]).to(dtype).float())
    assert not torch.equal(trained, torch.tensor(whole["weights"]))
    saved, exact = (load_file(ranks.folder / f"{name}.safetensors") for name in (form, "saved"))
    assert torch.equal(saved["weights"], exact["weights"])
    assert all(continued[key] == whole[key] for key in ("trained", "weights"))


def test_madgrad_saves_the_exact_initial_weights(ranks: Sharded) -> None:
    """Otherwise the resumed run would differ."""
    start = torch.cat([parameter.detach().flatten() for _, parameter in random_parameters()])
    assert torch.equal(load_file(ranks.folder / "madgrad_bf16.safetensors")["start"], start)
    for result in ranks.results:
        found = result["madgrad rounded"]
        assert found["continued"]["weights"] == found["whole"]["weights"]
        assert found["whole"]["weights"] == result["methods"]["madgrad plain"]["weights"]


@pytest.mark.slow
def test_triton_matches_unsharded_lamb(
    tmp_path: Path, unsharded_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks in Triton's interpreter, with a skipped step and a resume;
    the host reads no values.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found, other = run_ranks(sharded_triton, 2, tmp_path, folder=str(tmp_path))
    assert_equals(found["first"], unsharded_run)
    assert found == other
    for method in WITH_OWN_STATE:
        assert_equals_one_process(found["methods"][method.name], method)
    assert found["continued"]["weights"] == found["first"]["weights"], "resuming must be bit-equal"
    assert found["read on the host"] == []
    rounded = found["bf16"]
    assert rounded["weights"] == found["first"]["weights"]
    assert torch.equal(
        torch.tensor(rounded["trained"]), torch.tensor(rounded["weights"]).bfloat16().float()
    )


def test_triton_without_a_gpu_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with user_error("ops.unavailable", "triton optimizer"):
        sharded_lamb(World(), str(tmp_path), implementation="triton")
