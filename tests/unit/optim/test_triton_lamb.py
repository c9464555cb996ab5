"""LAMB and AdamW as Triton kernels: the published trajectories, the specification, skips, resumption, the copy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mlbert.optim.adamw import AdamW, ReferenceAdamW
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb, ReferenceLamb

triton_lamb = pytest.importorskip("mlbert.optim.triton_lamb", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("use_triton")

CONFIGS = {
    "lamb_default": (0.002, {"betas": (0.9, 0.999), "weight_decay": 0.01, "max_grad_norm": None}),
    "lamb_mlperf8k": (0.00288293, {"betas": (0.88, 0.88), "weight_decay": 0.0166629, "max_grad_norm": None}),
    "lamb_clip_inside": (0.01, {"betas": (0.9, 0.999), "weight_decay": 0.01, "max_grad_norm": 1.0}),
}
COMMON = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.05, "max_grad_norm": 1.0}
FORMS = [(Lamb, ReferenceLamb), (AdamW, ReferenceAdamW)]
SAVED_UPDATES = (1, 2, 5, 10)
GOLDEN_TOLERANCE = 1e-6  # as for the other forms


@pytest.mark.parametrize("config", CONFIGS)
def test_follows_the_published_code(trajectories: dict[str, np.ndarray], config: str) -> None:
    lr, arguments = CONFIGS[config]
    names = [key.removeprefix("w0/") for key in trajectories if key.startswith("w0/")]
    flat = FlatParameters((name, nn.Parameter(torch.from_numpy(trajectories[f"w0/{name}"]))) for name in names)
    lamb = Lamb(flat, eps=1e-6, implementation="triton", **arguments)
    assert lamb.implementation == "triton"
    for update in range(1, 11):
        for name, grad in flat.views(flat.grad).items():
            grad.copy_(torch.from_numpy(trajectories[f"grad/{name}"][update - 1]))
        lamb.step(lr)
        if update in SAVED_UPDATES:
            for name, weight in flat.views(flat.data).items():
                expected = trajectories[f"{config}/w/{name}"][SAVED_UPDATES.index(update)]
                np.testing.assert_allclose(weight.numpy(), expected, rtol=0, atol=GOLDEN_TOLERANCE)


def run(flat: FlatParameters, optimizer: Lamb | AdamW, updates: int) -> None:
    """Updates with gradients that change each time."""
    start = flat.grad.clone()
    for update in range(updates):
        flat.grad.copy_(start.roll(update))
        optimizer.step(0.01)


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize(("form", "specification"), FORMS)
def test_equals_the_float64_reference(
    make_flat: Callable[[], FlatParameters], form: type, specification: type, bias_correction: bool
) -> None:
    """Tolerance: 1e-6 on weights of size 0.02 after 3 updates that move them by 1e-3."""
    settings = COMMON | {"bias_correction": bias_correction}
    flat = make_flat()
    weights = {name: view.double() for name, view in flat.views(flat.data).items()}
    reference = specification(weights, **settings)
    optimizer = form(flat, implementation="triton", **settings)
    start = flat.grad.clone()
    for update in range(3):
        flat.grad.copy_(start.roll(update))
        expected = reference.step(0.01, {name: view.double() for name, view in flat.views(flat.grad).items()})
        result = optimizer.step(0.01)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)
    assert not result.skipped
    for name, view in flat.views(flat.data).items():
        torch.testing.assert_close(view.double(), weights[name], rtol=0, atol=1e-6)
    for name, view in flat.views(optimizer.exp_avg_sq).items():
        torch.testing.assert_close(view.double(), reference.v[name], rtol=1e-5, atol=0)


@pytest.mark.parametrize("form", [Lamb, AdamW])
def test_runs_are_bit_equal(make_flat: Callable[[], FlatParameters], form: type) -> None:
    results = []
    for _ in range(2):
        flat = make_flat()
        run(flat, form(flat, implementation="triton", **COMMON), 2)
        results.append(flat.data)
    assert torch.equal(*results)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("form", [Lamb, AdamW])
def test_a_gradient_that_is_not_finite_changes_nothing(
    make_flat: Callable[[], FlatParameters], form: type, bad: float
) -> None:
    flat = make_flat()
    copy = torch.zeros(flat.numel, dtype=torch.bfloat16)
    optimizer = form(flat, implementation="triton", weights_copy=copy, **COMMON)
    run(flat, optimizer, 1)
    buffers = (flat.data, optimizer.exp_avg, optimizer.exp_avg_sq, copy)
    before = [buffer.clone() for buffer in buffers]
    good = flat.grad[12345].item()
    flat.grad[12345] = bad
    skipped = optimizer.step(0.01)
    flat.grad[12345] = good
    following = optimizer.step(0.0)
    assert skipped.skipped
    assert not np.isfinite(skipped.grad_norm), "a result keeps its own norm when the next update has run"
    assert not following.skipped
    assert optimizer.num_updates == 2
    for buffer, expected in zip((flat.data, copy), (before[0], before[3]), strict=True):
        assert torch.equal(buffer, expected)


def test_skipped_moments_stay(make_flat: Callable[[], FlatParameters]) -> None:
    flat = make_flat()
    lamb = Lamb(flat, implementation="triton", **COMMON)
    run(flat, lamb, 1)
    before = [buffer.clone() for buffer in (lamb.exp_avg, lamb.exp_avg_sq)]
    flat.grad[0] = float("nan")
    lamb.step(0.01)
    assert all(torch.equal(a, b) for a, b in zip((lamb.exp_avg, lamb.exp_avg_sq), before, strict=True))


def test_a_huge_finite_gradient_is_clipped_not_skipped(make_flat: Callable[[], FlatParameters]) -> None:
    """Squares of 1e25 overflow float32; the norm is taken in float64."""
    flat = make_flat()
    flat.grad.mul_(1e25)
    assert not Lamb(flat, implementation="triton", **COMMON).step(0.01).skipped
    assert flat.data.isfinite().all()


def test_only_decayed_tensors_have_a_trust_ratio() -> None:
    """With the first update's direction near +-1, a step is lr times the ratio: ||w|| / ||u|| = 4, or 1."""
    names = ("dense.weight", "dense.bias", "out.LayerNorm.weight", "still.weight")
    flat = FlatParameters((name, nn.Parameter(torch.full((16,), 4.0))) for name in names)
    flat.views(flat.data)["still.weight"].zero_()
    flat.grad.fill_(1.0)
    before = {name: view.clone() for name, view in flat.views(flat.data).items()}
    Lamb(flat, implementation="triton", **COMMON | {"weight_decay": 0.0, "max_grad_norm": None}).step(0.125)
    moved = {name: float((before[name] - view)[0]) for name, view in flat.views(flat.data).items()}
    assert moved == pytest.approx(
        {"dense.weight": 0.5, "dense.bias": 0.125, "out.LayerNorm.weight": 0.125, "still.weight": 0.125}, rel=1e-4
    )


@pytest.mark.parametrize("form", [Lamb, AdamW])
def test_the_copy_holds_the_rounded_weights(make_flat: Callable[[], FlatParameters], form: type) -> None:
    flat = make_flat()
    copy = torch.zeros(flat.numel, dtype=torch.bfloat16)
    run(flat, form(flat, implementation="triton", weights_copy=copy, **COMMON), 2)
    assert torch.equal(copy, flat.data.bfloat16())


@pytest.mark.parametrize("other", ["triton", "plain"])
def test_resumed_state_goes_on(make_flat: Callable[[], FlatParameters], other: str) -> None:
    """Bit-equal in the same form; a checkpoint is good for any form."""
    straight, first, second = make_flat(), make_flat(), make_flat()
    whole = Lamb(straight, implementation="triton", **COMMON)
    run(straight, whole, 2)
    run(straight, whole, 1)
    lamb = Lamb(first, implementation="triton", **COMMON)
    run(first, lamb, 2)
    state = {key: value.clone() if isinstance(value, Tensor) else value for key, value in lamb.state_dict().items()}
    second.data.copy_(first.data)
    second.grad.copy_(first.grad)
    resumed = Lamb(second, implementation=other, **COMMON)
    resumed.load_state_dict(state)
    run(second, resumed, 1)
    assert resumed.num_updates == 3
    torch.testing.assert_close(second.data, straight.data, rtol=0, atol=0.0 if other == "triton" else 1e-8)


def test_an_update_is_launches_alone(make_flat: Callable[[], FlatParameters]) -> None:
    """What a captured graph replays: `launch` with the rate on the device equals `step`."""
    flat, other = make_flat(), make_flat()
    run(flat, Lamb(flat, implementation="triton", **COMMON), 2)
    lamb = Lamb(other, implementation="triton", **COMMON)
    lamb.device_update.lr.fill_(0.01)
    start = other.grad.clone()
    for update in range(2):
        other.grad.copy_(start.roll(update))
        lamb.device_update.launch((other.data, other.grad, lamb.exp_avg, lamb.exp_avg_sq))
    assert torch.equal(other.data, flat.data)
