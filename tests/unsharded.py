"""Create optimizers that own all of their parameters."""

from typing import Any, TypeVar

from mlbert.config.sections import Configuration
from mlbert.distributed.config import DistributedConfig
from mlbert.distributed.sharding import ShardLayout
from mlbert.ops.config import ComputeConfig
from mlbert.optim import optimizers
from mlbert.optim.config import OptimizerConfig, ScheduleConfig
from mlbert.optim.flat import FlatParameters
from mlbert.optim.optimizer import FlatOptimizer

AnyOptimizer = TypeVar("AnyOptimizer", bound=FlatOptimizer)


def unsharded(cls: type[AnyOptimizer], flat: FlatParameters, **settings: Any) -> AnyOptimizer:
    """Return the optimizer on one rank."""
    return cls(flat, ShardLayout.whole(flat.padded_data.numel()), **settings)


def configured(config: Configuration, flat: FlatParameters) -> FlatOptimizer:
    """Return the optimizer of a configuration."""
    return optimizers.make(
        config[OptimizerConfig],
        config[ScheduleConfig].learning_rate,
        config[DistributedConfig],
        config[ComputeConfig],
        flat,
        ShardLayout.whole(flat.numel),
    )
