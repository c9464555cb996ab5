"""The optimizer kernels on a GPU against the float64 specifications."""

import pytest
import torch
from torch import nn

from mlbert.optim.flat import FlatParameters
from optimizer_cases import COMMON, METHODS, assert_follows
from unsharded import unsharded

# Full and partial blocks of 4096 elements, with and without decay.
SHAPES = {
    "first.weight": (3, 4099),
    "first.bias": (5,),
    "LayerNorm.weight": (1024,),
    "last.weight": (64, 1024),
}


@pytest.mark.parametrize("method", METHODS, ids=lambda cls: cls.name)
def test_triton_matches_the_specification(device, method):
    generator = torch.Generator(device).manual_seed(1)
    weights = {
        name: torch.randn(shape, generator=generator, device=device) * 0.02
        for name, shape in SHAPES.items()
    }
    flat = FlatParameters((name, nn.Parameter(weight)) for name, weight in weights.items())
    flat.grad.normal_(std=0.15, generator=generator)
    own, specification = METHODS[method]
    reference = specification(
        {name: view.double() for name, view in flat.views(flat.data).items()}, **own, **COMMON
    )
    optimizer = unsharded(method, flat, **own, **COMMON, implementation="triton")
    assert_follows(optimizer, reference, 6, [0.01, 0.02, 0.005])
