"""Create optimizers that own all of their parameters."""

from typing import Any, TypeVar

from mlbert.config.configuration import Configuration
from mlbert.distributed.sharding import ShardLayout
from mlbert.optim.flat import FlatParameters
from mlbert.optim.optimizer import FlatOptimizer
from mlbert.recipes import assembly

AnyOptimizer = TypeVar("AnyOptimizer", bound=FlatOptimizer)


def unsharded(cls: type[AnyOptimizer], flat: FlatParameters, **settings: Any) -> AnyOptimizer:
    """Return the optimizer on one rank."""
    return cls(flat, ShardLayout.whole(flat.padded_data.numel()), **settings)


def configured(config: Configuration, flat: FlatParameters) -> FlatOptimizer:
    """Return the optimizer of a configuration."""
    return assembly.make_optimizer(config, flat, ShardLayout.whole(flat.numel))
