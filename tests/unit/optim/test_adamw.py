"""AdamW: against torch.optim.AdamW, the published BERT AdamWeightDecayOptimizer, and its own reference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from mlbert.optim.adamw import AdamW, ReferenceAdamW
from mlbert.optim.flat import FlatParameters, is_decayed

COMMON = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.05}


def test_equals_torch(make_flat: Callable[[], FlatParameters], implementation: str) -> None:
    """With clipping, five updates of 1e-2 on weights of 0.02; tolerance 1e-7, the references differ by rounding."""
    flat, twin = make_flat(), make_flat()
    parameters = {name: nn.Parameter(view.clone()) for name, view in twin.views(twin.data).items()}
    groups = [
        {"params": [p for name, p in parameters.items() if is_decayed(name)], "weight_decay": 0.05},
        {"params": [p for name, p in parameters.items() if not is_decayed(name)], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.98), eps=1e-6)
    ours = AdamW(flat, max_grad_norm=1.0, implementation=implementation, **COMMON)
    start = flat.grad.clone()
    for update in range(5):
        flat.grad.copy_(start.roll(update))
        for name, view in twin.views(start.roll(update)).items():
            parameters[name].grad = view.clone()
        norm = torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
        theirs.step()
        result = ours.step(0.01)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
    for name, view in flat.views(flat.data).items():
        torch.testing.assert_close(view, parameters[name].data, rtol=1e-5, atol=3e-7)


def test_equals_the_float64_reference(make_flat: Callable[[], FlatParameters], implementation: str) -> None:
    flat = make_flat()
    weights = {name: view.double() for name, view in flat.views(flat.data).items()}
    grads = {name: view.double() for name, view in flat.views(flat.grad).items()}
    reference = ReferenceAdamW(weights, max_grad_norm=1.0, **COMMON)
    ours = AdamW(flat, max_grad_norm=1.0, implementation=implementation, **COMMON)
    for _ in range(5):
        reference.step(0.01, grads)
        ours.step(0.01)
    for name, view in flat.views(flat.data).items():
        torch.testing.assert_close(view.double(), weights[name], rtol=1e-5, atol=3e-7)


def test_without_bias_correction_follows_the_published_code(
    trajectories: dict[str, np.ndarray], implementation: str
) -> None:
    names = [key.removeprefix("w0/") for key in trajectories if key.startswith("w0/")]
    flat = FlatParameters((name, nn.Parameter(torch.from_numpy(trajectories[f"w0/{name}"]))) for name in names)
    adamw = AdamW(
        flat,
        betas=(0.9, 0.999),
        eps=1e-6,
        weight_decay=0.01,
        max_grad_norm=None,
        bias_correction=False,
        implementation=implementation,
    )
    for update in range(10):
        for name, grad in flat.views(flat.grad).items():
            grad.copy_(torch.from_numpy(trajectories[f"grad/{name}"][update]))
        adamw.step(0.001)
    for name, weight in flat.views(flat.data).items():
        expected = trajectories[f"adamw_no_bias_correction/w/{name}"][-1]
        np.testing.assert_allclose(weight.numpy(), expected, rtol=0, atol=1e-6)


def test_a_gradient_that_is_not_finite_changes_nothing(
    make_flat: Callable[[], FlatParameters], implementation: str
) -> None:
    flat = make_flat()
    before = flat.data.clone()
    flat.grad[0] = float("nan")
    adamw = AdamW(flat, max_grad_norm=1.0, implementation=implementation, **COMMON)
    assert adamw.step(0.01).skipped
    assert torch.equal(flat.data, before)
    assert not adamw.exp_avg.any()
