"""One training step, and a loop that runs many steps in one call.

Each of R replicas has a batch of A micro-batches of b rows:

    1. counts    predictions and sequences of the step, averaged over A and R
    2. micro     for each micro-batch: loss, gradient of loss (/ R with SCALE_LOSS) (* loss scale
                 for float16)
    3. sum       accumulate gradient / A in float32, sum over replicas
    4. update    LAMB or AdamW; if the sum is not finite, no replica changes anything

The loss of a micro-batch is divided by the step's mean counts, so the mean over micro-batches and
replicas is the loss of the entire batch, however it is split. The published program divides by each
micro-batch's own counts, so all micro-batches weigh the same.

There are two forms of clipping. The published form unscales and clips the gradient of each
micro-batch on each replica before accumulating it. With SCALE_LOSS it is already divided by R, so
MAX_GRAD_NORM acts like R MAX_GRAD_NORM on the mean over replicas. With EXPLICIT_ALLREDUCE, the
still scaled gradient is first summed over the replicas, in float16 for PRECISION=fp16 and in packs
of ALLREDUCE_BYTES_PER_PACK, then unscaled and clipped. With GRADIENT_CLIPPING=after, the sum is
likewise clipped, not its parts.

Legend: n steps per loop, B = A b rows per replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from mlbert.config.tensorflow import TensorFlowConfig
from tf2_bert import objective
from tf2_bert.distributed import distributed
from tf2_bert.loss_scale import LossScale
from tf2_bert.model import BertPretrainer
from tf2_bert.objective import Counts, Sums
from tf2_bert.optimizers import Optimizer
from tf2_bert.rows import Rows

SUM = tf.distribute.ReduceOp.SUM
MEAN = tf.distribute.ReduceOp.MEAN
Gradients = list[tf.Tensor]  # float32 in the order of the model's parameters


class LoopResult(NamedTuple):
    """Results of a loop of n steps."""

    losses: np.ndarray  # float32 [n], over each step's global batch
    grad_norms: np.ndarray  # float32 [n], of the summed gradient before it is clipped
    sequences: np.ndarray  # float32 [n], in each step's global batch
    tokens: np.ndarray  # float32 [n], likewise
    squared_lengths: np.ndarray  # float32 [n], sum over the sequences, likewise
    masked: np.ndarray  # float32 [n], masked tokens, likewise

    @property
    def skipped(self) -> int:
        """Number of steps that changed nothing because their gradient was not finite."""
        return int(np.count_nonzero(~np.isfinite(self.grad_norms)))


class TrainStep:
    """Train a model under a strategy.

    Args:
        strategy: the model, optimizer and loss scale must have been created in its scope.
        model, optimizer, loss_scale: the objects that a step updates;
            without a loss scale the loss is not scaled.
        config: TensorFlow settings.
        accumulation: A.
        gradient_clipping: GRADIENT_CLIPPING; the maximum norm is the optimizer's.
        seed: dropout seed.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        model: BertPretrainer,
        optimizer: Optimizer,
        loss_scale: LossScale | None,
        config: TensorFlowConfig,
        *,
        accumulation: int,
        gradient_clipping: str,
        seed: int,
    ) -> None:
        self._strategy = strategy
        self._model = model
        self._optimizer = optimizer
        self._loss_scale = loss_scale
        self._config = config
        self._seed = seed
        self._parameters = list(model.parameters().values())
        self._accumulation = accumulation
        self._replicas = strategy.num_replicas_in_sync
        self._sum_scaled = config.explicit_allreduce
        self._clip_before = not self._sum_scaled and gradient_clipping == "before"
        packs = config.allreduce_bytes_per_pack if self._sum_scaled else 0
        self._communication = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=packs)
        compiled = config.enable_xla and not config.run_eagerly
        self._forward_backward = self._loss_and_gradients
        self._forward = self._sums
        if compiled:
            self._forward_backward = tf.function(self._loss_and_gradients, jit_compile=True)
            self._forward = tf.function(self._sums, jit_compile=True)
        self._evaluate = self._evaluation if config.run_eagerly else tf.function(self._evaluation)
        self._loops: dict[Any, Callable[..., tf.Tensor]] = {}

    # Called by the host.

    def run_loop(
        self, iterator: Any, learning_rates: Sequence[float] | np.ndarray, first_step: int
    ) -> LoopResult:
        """Run one step per learning rate in one call into TensorFlow;
        one traced function serves any n.

        Args:
            iterator: the strategy's iterator over `Rows`, B rows for each replica.
            learning_rates: float32 [n].
            first_step: number of the first step; dropout depends on it.
        """
        rates = tf.convert_to_tensor(np.asarray(learning_rates, np.float32))
        loop = self._loop if self._config.run_eagerly else self._traced_loop(iterator)
        results = loop(iterator, rates, tf.constant(first_step, tf.int64)).numpy()
        return LoopResult(*results.T)

    def evaluate_batch(self, rows: Rows) -> Sums:
        """Return the sums over the rows of all replicas;
        ``rows`` comes from the strategy's iterator.
        """
        return self._evaluate(rows)

    def warm_up(self, rows: Rows) -> None:
        """Compile and run one step, then restore all variables that it changed.

        Args:
            rows: dummy numpy rows for one replica, with the shapes used in training.
        """
        variables = [*self._parameters, *self._optimizer.variables]
        variables += self._loss_scale.variables if self._loss_scale else ()
        saved = [variable.numpy() for variable in variables]
        same_rows = distributed(self._strategy, lambda _: tf.data.Dataset.from_tensors(rows))
        self.run_loop(iter(same_rows), [0.0], first_step=0)
        for variable, value in zip(variables, saved, strict=True):
            variable.assign(value)

    # Across replicas.

    def _traced_loop(self, iterator: Any) -> Callable[..., tf.Tensor]:
        """Return the traced loop for this type of iterator, for any n."""
        kind = tf.type_spec_from_value(iterator)
        if kind not in self._loops:
            signature = (kind, tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.int64))
            self._loops[kind] = tf.function(self._loop, input_signature=signature)
        return self._loops[kind]

    def _loop(self, iterator: Any, rates: tf.Tensor, first_step: tf.Tensor) -> tf.Tensor:
        """Run the steps and return float32 [n, fields of `LoopResult`]."""
        count = tf.shape(rates)[0]
        results = tf.TensorArray(tf.float32, count)
        for index in tf.range(count):
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            step = first_step + tf.cast(index, tf.int64)
            numbers = self._strategy.run(
                self._replica_step, args=(next(iterator), rates[index], step)
            )
            results = results.write(index, self._strategy.reduce(MEAN, numbers, axis=None))
        return results.stack()

    def _evaluation(self, rows: Rows) -> Sums:
        sums = self._strategy.run(self._replica_sums, args=(rows,))
        return Sums(*(self._strategy.reduce(SUM, value, axis=None) for value in sums))

    # Per replica.

    def _replica_step(self, rows: Rows, lr: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Run one step on one replica; its `LoopResult` fields averaged over replicas are those of
        the step.
        """
        counts, work = self._step_counts(rows)
        loss, gradients = self._accumulated(rows, counts, step)
        gradients, norm = self._summed(gradients)
        finite = tf.math.is_finite(norm)  # identical bits on every replica, so all decide alike
        self._optimizer.apply(gradients, lr, finite)
        if self._loss_scale:
            self._loss_scale.update(finite)
        return tf.stack([loss, norm, *work])

    def _step_counts(self, rows: Rows) -> tuple[Counts, list[tf.Tensor]]:
        """Return mean counts per micro-batch over the step,
        and the step's totals in the order of `LoopResult`.
        """
        numbers = tf.range(1, rows.first_positions.shape[1] + 1)
        of_sequence = tf.cast(rows.sequence_ids[:, :, None] == numbers, tf.float32)
        lengths = tf.reduce_sum(of_sequence, 1)
        sums = [*objective.counts(rows), tf.reduce_sum(lengths), tf.reduce_sum(lengths**2)]
        *counts, tokens, squared = tf.distribute.get_replica_context().all_reduce(SUM, sums)
        whole = Counts(*counts)
        mean = Counts(*(count / (self._accumulation * self._replicas) for count in whole))
        return mean, [whole.sequences, tokens, squared, whole.masked]

    def _accumulated(
        self, rows: Rows, counts: Counts, step: tf.Tensor
    ) -> tuple[tf.Tensor, Gradients]:
        """Return loss and gradient, averaged over micro-batches;
        the gradient is ready to be summed over replicas.
        """
        parts = Rows(*(tf.reshape(x, [self._accumulation, -1, *x.shape[1:]]) for x in rows))
        loss = tf.zeros([])
        gradients = [tf.zeros(parameter.shape) for parameter in self._parameters]
        for index in tf.range(self._accumulation):
            # Keep only one micro-batch's activations.
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            part = Rows(*[x[index] for x in parts])
            part_loss, part_gradients = self._forward_backward(
                part, counts, self._dropout_seed(step, index)
            )
            if not self._sum_scaled:
                part_gradients = self._unscaled(part_gradients)
            if self._clip_before:
                part_gradients = self._clipped(
                    part_gradients, tf.linalg.global_norm(part_gradients)
                )
            loss += part_loss / self._accumulation
            gradients = [
                old + new / self._accumulation
                for old, new in zip(gradients, part_gradients, strict=True)
            ]
        return loss, gradients

    def _loss_and_gradients(
        self, rows: Rows, counts: Counts, seed: tf.Tensor
    ) -> tuple[tf.Tensor, Gradients]:
        """Return the loss of one micro-batch and the gradient of its scaled loss."""
        with tf.GradientTape() as tape:
            loss = objective.loss(self._model(rows, seed), rows, counts)
            scaled = loss / self._replicas if self._config.scale_loss else loss
            if self._loss_scale:
                scaled = self._loss_scale.scale(scaled)
        gradients = tape.gradient(scaled, self._parameters)
        return loss, [tf.convert_to_tensor(gradient) for gradient in gradients]  # densify slices

    def _summed(self, gradients: Gradients) -> tuple[Gradients, tf.Tensor]:
        """Return the gradient summed over replicas, unscaled and clipped,
        and its norm before clipping.
        """
        if self._sum_scaled and self._loss_scale:
            gradients = [tf.cast(gradient, tf.float16) for gradient in gradients]
        replica = tf.distribute.get_replica_context()
        gradients = replica.all_reduce(SUM, gradients, options=self._communication)
        if self._sum_scaled:
            gradients = self._unscaled(gradients)
        norm = tf.linalg.global_norm(gradients)
        return gradients if self._clip_before else self._clipped(gradients, norm), norm

    def _unscaled(self, gradients: Gradients) -> Gradients:
        return self._loss_scale.unscale(gradients) if self._loss_scale else gradients

    def _clipped(self, gradients: Gradients, norm: tf.Tensor) -> Gradients:
        """Clip to MAX_GRAD_NORM; the result is all NaN if the norm is not finite."""
        most = self._optimizer.max_grad_norm
        return (
            gradients if most is None else tf.clip_by_global_norm(gradients, most, use_norm=norm)[0]
        )

    def _dropout_seed(self, step: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
        """Return int64 [2]: the seed and a number unique to this step, micro-batch and replica."""
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)
        number = (step * self._accumulation + tf.cast(part, tf.int64)) * self._replicas + replica
        return tf.stack([tf.constant(self._seed, tf.int64), number])

    def _replica_sums(self, rows: Rows) -> Sums:
        # A separate function, so that XLA compiles it for each replica's device.
        return self._forward(rows)

    def _sums(self, rows: Rows) -> Sums:
        return objective.sums(self._model(rows, None), rows)
