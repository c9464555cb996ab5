"""Compare weights bit by bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def assert_same_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Assert that both have the same names and equal tensors."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_same_parameters(model: nn.Module, expected: nn.Module) -> None:
    """Assert that both models have the same parameters with equal values."""
    assert_same_tensors(dict(model.named_parameters()), dict(expected.named_parameters()))
