"""Draw weights at random and compare them bit by bit."""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

AnyModel = TypeVar("AnyModel", bound=nn.Module)


def randomize(model: AnyModel, std: float = 0.2) -> AnyModel:
    """Draw every parameter of the model, so that each one matters, and return the model."""
    for seed, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, 0.0, std, generator=torch.Generator().manual_seed(seed))
    return model


def initialized(model: AnyModel, seed: int = 1) -> AnyModel:
    """Initialize the model as a run does, and return it."""
    model.initialize(seed)
    return model


def assert_same_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Assert that both have the same names and equal tensors."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_same_parameters(model: nn.Module, expected: nn.Module) -> None:
    assert_same_tensors(dict(model.named_parameters()), dict(expected.named_parameters()))
