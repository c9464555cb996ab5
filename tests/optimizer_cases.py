"""Shared by the tests of all optimizer implementations: settings and specifications."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mlbert.optim.acclip import ACClip
from mlbert.optim.adamw import AdamW, DecoupledAdamW, DecoupledStableAdamW, StableAdamW
from mlbert.optim.compiled import CompiledOptimizer
from mlbert.optim.lamb import Lamb
from mlbert.optim.madgrad import Madgrad
from mlbert.optim.sgd import SGD
from reference_optimizers import (
    Reference,
    ReferenceACClip,
    ReferenceAdamW,
    ReferenceLamb,
    ReferenceMadgrad,
    ReferenceSGD,
    ReferenceStableAdamW,
)

COMMON: dict[str, Any] = {
    "betas": (0.9, 0.98),
    "eps": 1e-6,
    "weight_decay": 0.05,
    "max_grad_norm": 1.0,
}
DECOUPLED = {"base_lr": 0.5}
# Method -> its extra settings, its float64 specification.
METHODS: dict[type[CompiledOptimizer], tuple[dict[str, float], type[Reference]]] = {
    Lamb: ({}, ReferenceLamb),
    AdamW: ({}, ReferenceAdamW),
    DecoupledAdamW: (DECOUPLED, ReferenceAdamW),
    StableAdamW: ({}, ReferenceStableAdamW),
    DecoupledStableAdamW: (DECOUPLED, ReferenceStableAdamW),
    ACClip: ({}, ReferenceACClip),
    Madgrad: ({}, ReferenceMadgrad),
    SGD: ({}, ReferenceSGD),
}


def assert_follows(
    optimizer: CompiledOptimizer, reference: Reference, updates: int, rates: Sequence[float]
) -> None:
    """Step both on the flat gradient, rolled each time,
    once ten times as large and once not finite, and compare.

    `reference` is the specification on the same weights in float64; `rates` are used in a cycle.
    """
    flat = optimizer.flat
    start = flat.grad.clone()
    before = flat.data.clone()
    for update, lr in zip(range(updates), itertools.cycle(rates), strict=False):
        flat.grad.copy_(start.roll(update) * (10.0 if update == updates - 1 else 1.0))
        if update == 1:
            flat.grad[0] = -torch.inf
        expected = reference.step(
            lr, {name: view.double() for name, view in flat.views(flat.grad).items()}
        )
        assert float(optimizer.step(lr)) == pytest.approx(expected, rel=1e-12)
    assert float(optimizer.grad_norm) == pytest.approx(expected, rel=1e-12)
    assert optimizer.num_updates == reference.num_updates == updates - 1
    moved = float((flat.data - before).abs().max())
    for name, view in flat.views(flat.data).items():
        torch.testing.assert_close(
            view.double(), reference.weights[name], rtol=1e-5, atol=5e-5 * moved
        )
    for key in optimizer.STATE:
        largest = max(float(value.abs().max()) for value in reference.state[key].values())
        for name, view in flat.views(getattr(optimizer, key)).items():
            torch.testing.assert_close(
                view.double(), reference.state[key][name], rtol=1e-5, atol=1e-6 * largest
            )
