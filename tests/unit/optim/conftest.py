"""Fixtures for the optimizer tests: parameters of awkward shapes, implementations."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from mlbert.host import native
from mlbert.optim.flat import FlatParameters

# Sizes around the kernels' block (8192 elements) and vector lengths, with and without decay.
AWKWARD_SHAPES = {
    "one.weight": (1,),
    "one.bias": (1,),
    "odd.weight": (7, 11),
    "layer.LayerNorm.weight": (8193,),
}
AWKWARD_SHAPES |= {
    "block.weight": (8192,),
    "over.weight": (3, 8191),
    "zero.weight": (33,),
    "last.bias": (5,),
}


@pytest.fixture
def make_flat() -> Callable[[], FlatParameters]:
    """Return a function that creates the same random parameters each time,
    with a random gradient of norm 30.
    """

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
