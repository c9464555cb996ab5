"""Fixtures for the optimizer tests: published trajectories, parameters of awkward shapes, implementations."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mlbert.host import native
from mlbert.optim.flat import FlatParameters

ASSETS = Path(__file__).resolve().parents[2] / "assets"
# Sizes around the kernels' block (8192 elements) and vector lengths, with and without decay.
AWKWARD_SHAPES = {"one.weight": (1,), "one.bias": (1,), "odd.weight": (7, 11), "layer.LayerNorm.weight": (8193,)}
AWKWARD_SHAPES |= {"block.weight": (8192,), "over.weight": (3, 8191), "zero.weight": (33,), "last.bias": (5,)}
Arrays = Mapping[str, np.ndarray]


@pytest.fixture(scope="session")
def trajectories() -> Arrays:
    """Return the arrays of tests/assets/lamb and tests/assets/adamw by key."""
    arrays: dict[str, np.ndarray] = {}
    for folder in ("lamb", "adamw"):
        with np.load(ASSETS / folder / "trajectories.npz", allow_pickle=False) as archive:
            arrays |= {key: archive[key] for key in archive.files}
    return arrays


@pytest.fixture(scope="session")
def follows_trajectory(trajectories: Arrays) -> Callable[..., None]:
    """Return a check that runs ten updates on the published gradients and compares weights after 1, 2, 5 and 10."""

    def check(
        make: Callable[[FlatParameters], Any], config: str, rates: list[float], decayed: Callable[[str], bool]
    ) -> None:
        names = [key.removeprefix("w0/") for key in trajectories if key.startswith("w0/")]
        pairs = [(name, nn.Parameter(torch.from_numpy(trajectories[f"w0/{name}"]))) for name in names]
        flat = FlatParameters(pairs, decayed=decayed)
        optimizer, saved = make(flat), [1, 2, 5, 10]
        for update, lr in enumerate(rates, start=1):
            for name, grad in flat.views(flat.grad).items():
                grad.copy_(torch.from_numpy(trajectories[f"grad/{name}"][update - 1]))
            optimizer.step(lr)
            if update in saved:
                for name, weight in flat.views(flat.data).items():
                    expected = trajectories[f"{config}/w/{name}"][saved.index(update)]
                    # The published float32 programs themselves differ from float64 by 5.6e-7.
                    np.testing.assert_allclose(weight.numpy(), expected, rtol=0, atol=1e-6, err_msg=name)

    return check


@pytest.fixture
def make_flat() -> Callable[[], FlatParameters]:
    """Return a function that creates the same random parameters each time, with a random gradient of norm 30."""

    def make() -> FlatParameters:
        generator = torch.Generator().manual_seed(1)
        parameters = []
        for name, shape in AWKWARD_SHAPES.items():
            scale = 0.0 if name.startswith("zero") else 0.02
            parameters.append((name, nn.Parameter(torch.randn(shape, generator=generator) * scale)))
        flat = FlatParameters(parameters)
        flat.grad.copy_(torch.randn(flat.numel, generator=generator) * 0.15)
        return flat

    return make


@pytest.fixture(params=["plain", "native", "triton"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Parametrize over the implementations; skip those that cannot be compiled."""
    if request.param == "triton":
        request.getfixturevalue("use_triton")
    if request.param == "native":
        try:
            native.load("optim", ["optim.c"])
        except native.NativeUnavailable as error:
            pytest.skip(f"no native kernels: {error}")
    return str(request.param)
