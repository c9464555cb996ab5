"""Shared by the optimizer tests: the published trajectories and parameters of ugly shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mlbert.core import native
from mlbert.optim.flat import FlatParameters

ASSET = Path(__file__).resolve().parents[2] / "assets" / "lamb" / "trajectories.npz"
# Around the kernels' block (8192 elements) and vector lengths; with and without decay next to each other.
UGLY_SHAPES = (
    ("one.weight", (1,)),
    ("one.bias", (1,)),
    ("odd.weight", (7, 11)),
    ("layer.LayerNorm.weight", (8193,)),
    ("block.weight", (8192,)),
    ("over.weight", (3, 8191)),
    ("zero.weight", (33,)),
    ("last.bias", (5,)),
)


@pytest.fixture(scope="session")
def trajectories() -> dict[str, np.ndarray]:
    """The arrays of tests/assets/lamb, by key."""
    with np.load(ASSET, allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}


@pytest.fixture
def make_flat() -> Callable[[], FlatParameters]:
    """Makes the same random parameters each time, with a random gradient of norm about 30."""

    def make() -> FlatParameters:
        generator = torch.Generator().manual_seed(1)
        parameters = []
        for name, shape in UGLY_SHAPES:
            scale = 0.0 if name.startswith("zero") else 0.02
            parameters.append((name, nn.Parameter(torch.randn(shape, generator=generator) * scale)))
        flat = FlatParameters(parameters)
        flat.grad.copy_(torch.randn(flat.numel, generator=generator) * 0.15)
        return flat

    return make


@pytest.fixture(params=["plain", "native"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Both forms of an optimizer; the native one is skipped where it cannot be compiled."""
    if request.param == "native":
        try:
            native.load("optim", ["optim.c"])
        except native.NativeUnavailable as error:
            pytest.skip(f"no native kernels: {error}")
    return str(request.param)
