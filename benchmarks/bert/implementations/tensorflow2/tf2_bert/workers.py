"""The processes of a multi-worker strategy: the rank of this one, and sums over all of them."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence

import tensorflow as tf


class Workers:
    """This process among the workers of a strategy; strategies without workers count as one worker.

    Attributes:
        task, count: index of this worker and number of workers.
        replicas: total over all workers.
        is_chief: whether this worker writes the log.
        hosts: host name of each worker.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        resolver = strategy.cluster_resolver
        is_worker = resolver is not None and resolver.task_type == "worker"
        self.task = resolver.task_id if is_worker else 0
        addresses = resolver.cluster_spec().job_tasks("worker") if is_worker else [platform.node()]
        self.count = len(addresses)
        self.hosts = [re.sub(r":\d+$", "", address) for address in addresses]
        self.replicas = strategy.num_replicas_in_sync
        self.is_chief = self.task == 0
        self._strategy = strategy
        self._traced = tf.function(
            self._summed, input_signature=[tf.TensorSpec([None], tf.float64)]
        )

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Return each number summed over workers.

        All workers must call it; it is also a barrier.
        """
        if self.count == 1:
            return list(numbers)
        return self._traced(tf.constant(numbers, tf.float64)).numpy().tolist()

    def of_chief(self, number: int) -> int:
        """Return the chief's ``number``; all workers must call it."""
        return round(self.sum([number if self.is_chief else 0])[0])

    def _summed(self, numbers: tf.Tensor) -> tf.Tensor:
        first = self.task * (self.replicas // self.count)

        def replica() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            mine = tf.where(
                tf.equal(context.replica_id_in_sync_group, first), numbers, tf.zeros_like(numbers)
            )
            return context.all_reduce(tf.distribute.ReduceOp.SUM, mine)

        return self._strategy.experimental_local_results(self._strategy.run(replica))[0]
