"""Distribute each host's dataset over a strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def distributed(strategy: Any, pipeline: Callable[[Any], Any]) -> Any:
    """Return the tf.distribute.DistributedDataset of ``pipeline``.

    ``pipeline`` maps a host's tf.distribute.InputContext to a tf.data.Dataset with one element per
    replica and step. Every dataset is repeated, even an endless one: if TensorFlow knows that it
    has no end, it keeps the static number of rows and does not ask the other workers at every step
    whether they have more data.
    """
    return strategy.distribute_datasets_from_function(lambda context: pipeline(context).repeat())
