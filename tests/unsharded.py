"""Create an optimizer that owns all of its parameters."""

from typing import Any, TypeVar

from mlbert.distributed.sharding import ShardLayout
from mlbert.optim.flat import FlatParameters
from mlbert.optim.optimizer import FlatOptimizer

AnyOptimizer = TypeVar("AnyOptimizer", bound=FlatOptimizer)


def unsharded(cls: type[AnyOptimizer], flat: FlatParameters, **settings: Any) -> AnyOptimizer:
    """Return the optimizer on one rank."""
    return cls(flat, ShardLayout.whole(flat.padded_data.numel()), **settings)
