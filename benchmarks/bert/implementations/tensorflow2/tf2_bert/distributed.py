"""Hands each host's dataset to a strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def distributed(strategy: Any, pipeline: Callable[[Any], Any]) -> Any:
    """The tf.distribute.DistributedDataset of ``pipeline``, which makes a host's tf.data.Dataset, one element a replica
    and step, of its tf.distribute.InputContext.

    Each is repeated, an endless one too: where TensorFlow knows that a dataset has no end, it neither asks the other
    workers at every step whether there is another one, nor gives up the static number of rows.
    """
    return strategy.distribute_datasets_from_function(lambda context: pipeline(context).repeat())
