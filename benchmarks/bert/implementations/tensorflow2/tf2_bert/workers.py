"""The processes of a multi-worker strategy: which one this is, and numbers that all have to agree on."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence

import tensorflow as tf


class Workers:
    """This process's place among the workers of a strategy; alone for all other strategies.

    Attributes:
        task, count: which of how many.
        replicas: over all workers.
        is_chief: whether it writes the log.
        hosts: the machine of each.
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
        self._traced = tf.function(self._summed, input_signature=[tf.TensorSpec([None], tf.float64)])

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """The sum over workers of each; all call it together, so nobody is ahead of the others behind it."""
        if self.count == 1:
            return list(numbers)
        return self._traced(tf.constant(numbers, tf.float64)).numpy().tolist()

    def of_chief(self, number: int) -> int:
        """The chief's."""
        return round(self.sum([number if self.is_chief else 0])[0])

    def _summed(self, numbers: tf.Tensor) -> tf.Tensor:
        first = self.task * (self.replicas // self.count)

        def replica() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            mine = tf.where(tf.equal(context.replica_id_in_sync_group, first), numbers, tf.zeros_like(numbers))
            return context.all_reduce(tf.distribute.ReduceOp.SUM, mine)

        return self._strategy.experimental_local_results(self._strategy.run(replica))[0]
