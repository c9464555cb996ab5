"""The optimizers as Triton kernels: published runs, the specification, skipped steps, resuming, graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mlbert.optim.acclip import ACClip
from mlbert.optim.adamw import Adam
from mlbert.optim.compiled import CompiledOptimizer
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from mlbert.optim.madgrad import Madgrad
from mlbert.optim.optimizer import FlatOptimizer
from mlbert.optim.sgd import SGD
from optimizer_cases import (
    COMMON,
    METHODS,
    PUBLISHED,
    assert_follows,
    assert_madgrad_root_is_accurate,
    decayed_in,
)
from unsharded import AnyOptimizer, unsharded

pytest.importorskip("mlbert.optim.triton_update", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("use_triton")
each_method = pytest.mark.parametrize("method", METHODS, ids=lambda cls: cls.name)
MakeFlat = Callable[[], FlatParameters]


@pytest.mark.parametrize("config", PUBLISHED)
def test_follows_the_published_program(follows_trajectory: Callable, config: str) -> None:
    cls, rates, settings = PUBLISHED[config]

    def make(flat: FlatParameters) -> Adam:
        optimizer = unsharded(cls, flat, implementation="triton", **settings)
        assert optimizer.implementation == "triton"
        return optimizer

    follows_trajectory(make, config, rates, decayed_in(config))


def make_one(
    method: type[AnyOptimizer], flat: FlatParameters, implementation: str = "triton", **changes: Any
) -> AnyOptimizer:
    return unsharded(method, flat, implementation=implementation, **METHODS[method][0], **COMMON | changes)


def run(flat: FlatParameters, optimizer: FlatOptimizer, updates: int) -> None:
    """Run updates with a different gradient each time."""
    start = flat.grad.clone()
    for update in range(updates):
        flat.grad.copy_(start.roll(update))
        optimizer.step(0.01)


@pytest.mark.parametrize(
    ("method", "bias_correction"),
    [(method, flag) for method in METHODS for flag in (True, False) if flag or issubclass(method, Adam)],
)
def test_matches_the_specification_in_float64(
    make_flat: MakeFlat, method: type[CompiledOptimizer], bias_correction: bool
) -> None:
    own, specification = METHODS[method]
    changes = {} if bias_correction else {"bias_correction": False}
    flat = make_flat()
    weights = {name: view.double() for name, view in flat.views(flat.data).items()}
    reference = specification(weights, **own, **COMMON | changes)
    assert_follows(make_one(method, flat, **changes), reference, 4, [0.01, 0.02, 0.005])


@each_method
def test_runs_are_bit_equal(make_flat: MakeFlat, method: type[CompiledOptimizer]) -> None:
    results = []
    for _ in range(2):
        flat = make_flat()
        run(flat, make_one(method, flat), 2)
        results.append(flat.data)
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("method", "bad"),
    # All methods share the kernel of the norm, but each has its own update kernel.
    [*((method, float("nan")) for method in METHODS), (Lamb, float("inf")), (Lamb, -float("inf"))],
)
def test_non_finite_gradient_changes_nothing(make_flat: MakeFlat, method: type[CompiledOptimizer], bad: float) -> None:
    flat = make_flat()
    optimizer = make_one(method, flat)
    run(flat, optimizer, 1)
    buffers = (flat.data, *(getattr(optimizer, key) for key in method.STATE))
    before = [buffer.clone() for buffer in buffers]
    good = flat.grad[12345].item()
    flat.grad[12345] = bad
    skipped = optimizer.step(0.01)
    for buffer, expected in zip(buffers, before, strict=True):
        assert torch.equal(buffer, expected)
    flat.grad[12345] = good
    following = optimizer.step(0.0)
    assert not np.isfinite(float(skipped)), "the next update must not change the norm of this one"
    assert following.isfinite()
    assert optimizer.num_updates == 2
    if method is not Madgrad:  # Madgrad's momentum still changes the weights
        assert torch.equal(flat.data, before[0])


def test_huge_finite_gradient_is_clipped_not_skipped(make_flat: MakeFlat) -> None:
    """Squares of 1e25 overflow float32, so the norm is computed in float64."""
    flat = make_flat()
    flat.grad.mul_(1e25)
    assert make_one(Lamb, flat).step(0.01).isfinite()
    assert flat.data.isfinite().all()


def test_madgrad_root_is_accurate_for_all_magnitudes() -> None:
    assert_madgrad_root_is_accurate("triton")


def test_only_decayed_tensors_have_a_trust_ratio() -> None:
    """With the first update's direction near +-1, a step is lr times the ratio: ||w|| / ||u|| = 4, or 1."""
    names = ("dense.weight", "dense.bias", "out.LayerNorm.weight", "still.weight")
    flat = FlatParameters((name, nn.Parameter(torch.full((16,), 4.0))) for name in names)
    flat.views(flat.data)["still.weight"].zero_()
    flat.grad.fill_(1.0)
    before = {name: view.clone() for name, view in flat.views(flat.data).items()}
    make_one(Lamb, flat, weight_decay=0.0, max_grad_norm=None).step(0.125)
    moved = {name: float((before[name] - view)[0]) for name, view in flat.views(flat.data).items()}
    assert moved == pytest.approx(
        {"dense.weight": 0.5, "dense.bias": 0.125, "out.LayerNorm.weight": 0.125, "still.weight": 0.125}, rel=1e-4
    )


@pytest.mark.parametrize("other", ["triton", "plain"])
@pytest.mark.parametrize("method", [Lamb, ACClip, Madgrad, SGD], ids=lambda cls: cls.name)
def test_resume_with_any_implementation(make_flat: MakeFlat, method: type[CompiledOptimizer], other: str) -> None:
    """Resuming is bit-equal with the same implementation, and close with another."""
    straight, first, second = make_flat(), make_flat(), make_flat()
    whole = make_one(method, straight)
    run(straight, whole, 2)
    run(straight, whole, 1)
    optimizer = make_one(method, first)
    run(first, optimizer, 2)
    state = {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in optimizer.state_dict().items()
    }
    second.data.copy_(first.data)
    second.grad.copy_(first.grad)
    resumed = make_one(method, second, other)
    resumed.load_state_dict(state)
    run(second, resumed, 1)
    assert resumed.num_updates == 3
    torch.testing.assert_close(second.data, straight.data, rtol=0, atol=0.0 if other == "triton" else 1e-8)


@each_method
def test_launch_equals_step(make_flat: MakeFlat, method: type[CompiledOptimizer]) -> None:
    """`launch`, which graphs capture, with the rate on the device equals `step`."""
    flat, other = make_flat(), make_flat()
    run(flat, make_one(method, flat), 2)
    optimizer = make_one(method, other)
    assert optimizer.can_capture
    optimizer.set_learning_rate(0.01)
    start = other.grad.clone()
    for update in range(2):
        other.grad.copy_(start.roll(update))
        optimizer.launch()
    assert torch.equal(other.data, flat.data)
    assert optimizer.grad_norm.isfinite()


def test_known_norm_is_used(make_flat: MakeFlat) -> None:
    flat, norm = make_flat(), torch.tensor(4.0, dtype=torch.float64)
    optimizer = make_one(SGD, flat, known_norm=norm, max_grad_norm=1.0)
    optimizer.step(0.01)
    assert optimizer.grad_norm == 4.0
    weights = flat.data.clone()
    norm.fill_(float("nan"))
    optimizer.step(0.01)
    assert torch.equal(flat.data, weights)
    assert optimizer.num_updates == 1


@each_method
def test_update_writes_the_copy(make_flat: MakeFlat, method: type[CompiledOptimizer]) -> None:
    """Each update also writes the weights in bfloat16, bit-equal to a cast; a skipped step changes neither."""
    flat = make_flat()
    optimizer = make_one(method, flat, copy_dtype=torch.bfloat16)
    address = flat.padded_copy.data_ptr()
    for _ in range(2):
        assert torch.equal(flat.padded_copy, flat.padded_data.bfloat16())
        run(flat, optimizer, 1)
    flat.grad[3] = torch.nan
    run(flat, optimizer, 1)
    assert torch.equal(flat.padded_copy, flat.padded_data.bfloat16())
    assert flat.padded_copy.data_ptr() == address, "graphs rely on the address"
