"""Shared by the tests of all optimizer implementations: published runs, settings, specifications."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from mlbert.optim.acclip import ACClip
from mlbert.optim.adamw import Adam, AdamW, DecoupledAdamW, DecoupledStableAdamW, StableAdamW
from mlbert.optim.compiled import CompiledOptimizer
from mlbert.optim.flat import FlatParameters, is_decayed
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
from unsharded import unsharded

COMMON: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.05, "max_grad_norm": 1.0}
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
CHANGING = [0.25, 0.5, 0.75, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.02]


def _published(
    cls: type[Adam], base: float, beta_2: float, decay: float, rates: list[float], clip: float | None = None, **own: Any
) -> tuple[type[Adam], list[float], dict[str, Any]]:
    settings = {"betas": (0.9, beta_2), "eps": 1e-6, "weight_decay": decay, "max_grad_norm": clip, **own}
    return cls, [base * rate for rate in rates], settings


# Method, rates and settings of each run in tests/assets/lamb and tests/assets/adamw.
PUBLISHED = {
    "lamb_default": _published(Lamb, 0.002, 0.999, 0.01, [1.0] * 10),
    "lamb_mlperf8k": _published(Lamb, 0.00288293, 0.88, 0.0166629, [1.0] * 10, betas=(0.88, 0.88)),
    "lamb_clip_inside": _published(Lamb, 0.01, 0.999, 0.01, [1.0] * 10, clip=1.0),
    "adamw_no_bias_correction": _published(AdamW, 0.001, 0.999, 0.01, [1.0] * 10, bias_correction=False),
    "mosaic_default_const": _published(DecoupledAdamW, 0.0005, 0.98, 1e-5, [1.0] * 10, base_lr=0.0005),
    "mosaic_sched_wd1e-2": _published(DecoupledAdamW, 0.0005, 0.98, 0.01, CHANGING, base_lr=0.0005),
    "decoupled_stableadamw_modernbert": _published(DecoupledStableAdamW, 0.0008, 0.98, 1e-5, CHANGING, base_lr=0.0008),
    "decoupled_wd1e-2": _published(DecoupledStableAdamW, 0.0008, 0.98, 0.01, CHANGING, base_lr=0.0008),
    "stableadamw_wd1e-2": _published(StableAdamW, 0.003, 0.99, 0.01, CHANGING),
    "stableadamw_wd0": _published(StableAdamW, 0.003, 0.99, 0.0, CHANGING),
}
# These programs decay every tensor, including LayerNorm and biases.
DECAY_ALL = {name for name in PUBLISHED if "lamb" not in name and "no_bias" not in name}


def decayed_in(config: str) -> Callable[[str], bool]:
    """Return a predicate for the names of the parameters that a published run decays."""
    return (lambda name: True) if config in DECAY_ALL else is_decayed


@dataclass(frozen=True)
class ByHand:
    """Two updates calculated by hand from a method's formulas: a decayed weight and a bias, both 2; decay 0.25.

    Attributes:
        method, betas, eps: settings of the run.
        steps: for each update, the rate, both gradients and both resulting weights.
    """

    method: type[CompiledOptimizer]
    betas: tuple[float, float]
    eps: float
    steps: tuple[tuple[float, tuple[float, float], tuple[float, float]], ...]


BY_HAND = (
    # m = 0.5, tau = 0.25, u = 0.25 / 0.625 x 0.5 = 0.2; then m = 0.0625, tau = 0.28125, so m is not clipped.
    ByHand(
        ACClip,
        (0.5, 0.75),
        0.125,
        (
            (0.5, (1.0, 1.0), (2 - 0.5 * (0.2 + 0.5), 2 - 0.5 * 0.2)),
            (1.0, (-0.375, -0.375), (1.65 - (0.0625 + 0.25 * 1.65), 1.9 - 0.0625)),
        ),
    ),
    # With its decay the weight's gradient is 1 too. lambda = 8: s = nu = 8, z = 2 - 8 / (2 + 2) = 0.
    # Then lambda = 19: s = nu = 27, z = 2 - 27 / (3 + 2) = -3.4.
    ByHand(
        Madgrad,
        (0.75, 0.0),
        2.0,
        (
            (8.0, (0.5, 1.0), (1.5, 1.5)),
            (19 / math.sqrt(2), (1 - 0.25 * 1.5, 1.0), (0.75 * 1.5 - 0.25 * 3.4, 0.75 * 1.5 - 0.25 * 3.4)),
        ),
    ),
    # m = 1, then 0.5 - 0.25.
    ByHand(
        SGD,
        (0.5, 0.0),
        0.0,
        (
            (0.5, (1.0, 1.0), (2 - 0.5 * (1 + 0.5), 2 - 0.5)),
            (0.25, (-0.25, -0.25), (1.25 - 0.25 * (0.25 + 0.3125), 1.5 - 0.25 * 0.25)),
        ),
    ),
)


def assert_follows(
    optimizer: CompiledOptimizer, reference: Reference, updates: int, learning_rates: Sequence[float]
) -> None:
    """Step both on the flat gradient, rolled each time, once ten times as large and once not finite, and compare.

    Args:
        optimizer: optimizer with a gradient in its flat buffer.
        reference: specification on the same weights in float64.
        updates: number of updates, including the skipped one.
        learning_rates: rates, used in a cycle.
    """
    flat = optimizer.flat
    start, before = flat.grad.clone(), flat.data.clone()
    for update, lr in zip(range(updates), itertools.cycle(learning_rates), strict=False):
        flat.grad.copy_(start.roll(update) * (10.0 if update == updates - 1 else 1.0))
        if update == 1:
            flat.grad[0] = -torch.inf
        expected = reference.step(lr, {name: view.double() for name, view in flat.views(flat.grad).items()})
        assert float(optimizer.step(lr)) == pytest.approx(expected, rel=1e-12)
    assert float(optimizer.grad_norm) == pytest.approx(expected, rel=1e-12)
    assert optimizer.num_updates == reference.num_updates == updates - 1
    moved = float((flat.data - before).abs().max())
    for name, view in flat.views(flat.data).items():
        torch.testing.assert_close(view.double(), reference.weights[name], rtol=1e-5, atol=5e-5 * moved)
    for key in optimizer.STATE:
        largest = max(float(value.abs().max()) for value in reference.state[key].values())
        for name, view in flat.views(getattr(optimizer, key)).items():
            torch.testing.assert_close(view.double(), reference.state[key][name], rtol=1e-5, atol=1e-6 * largest)


def assert_madgrad_root_is_accurate(implementation: str) -> None:
    """Check the first update from 0 at rate 1 without momentum and decay: -g / cbrt(g^2), or 0 if g^2 overflows."""
    flat = FlatParameters([("w.bias", nn.Parameter(torch.zeros(5001)))])
    numbers = {"betas": (0.0, 0.0), "eps": 1e-12, "weight_decay": 0.0, "max_grad_norm": None}
    optimizer = unsharded(Madgrad, flat, **numbers, implementation=implementation)
    flat.grad.copy_(torch.logspace(-17, 19, 5001, dtype=torch.float64))
    flat.grad[-1] = 1e25
    grad = flat.grad.double()
    optimizer.step(1.0)
    expected = -grad / (grad ** (2 / 3) + 1e-12)
    expected[-1] = 0.0
    torch.testing.assert_close(flat.data.double(), expected, rtol=2e-6, atol=1e-12)
