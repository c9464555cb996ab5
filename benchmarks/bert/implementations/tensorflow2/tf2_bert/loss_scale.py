"""A loss scale for float16, whose smallest numbers gradients would fall below: it grows until a step overflows."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mlbert.config.tensorflow import TensorFlowConfig
from mlbert.ops.config import ComputeConfig

SMALLEST = 1.0
LARGEST = 2.0**24  # as in mlbert.optim.loss_scale


class LossScale(tf.Module):
    """A loss scale: halved where a step's gradient is not finite, doubled after `window` steps in a row that were.

    A fixed one stays as it is. Steps that overflow are skipped all the same: Keras' optimizer with a fixed scale
    applies them, and one infinity in a weight is there for good.

    Source of the rule: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.2.

    Args:
        initial: first scale.
        window: finite steps in a row after which it doubles, up to `LARGEST`.
        fixed: it never changes.

    Attributes:
        value: float32 scalar.
        finite_steps: int32 scalar, finite steps since it last changed.
    """

    def __init__(self, initial: float, window: int, fixed: bool) -> None:
        super().__init__()
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA  # all replicas decide alike
        self.value = tf.Variable(initial, dtype=tf.float32, trainable=False, aggregation=first)
        self.finite_steps = tf.Variable(0, dtype=tf.int32, trainable=False, aggregation=first)
        self._window, self._fixed = window, fixed

    @classmethod
    def of(cls, compute: ComputeConfig, tensorflow: TensorFlowConfig) -> LossScale | None:
        """Return the loss scale of the settings; None unless PRECISION=fp16. Call it in the strategy's scope."""
        if compute.precision != "fp16":
            return None
        return cls(compute.loss_scale, compute.loss_scale_window, tensorflow.loss_scale_fixed)

    def scale(self, loss: tf.Tensor) -> tf.Tensor:
        """The loss times the scale, float32."""
        return loss * self.value

    def unscale(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Gradients of the loss itself, in float32, from those of the scaled one."""
        inverse = 1.0 / self.value
        return [tf.cast(gradient, tf.float32) * inverse for gradient in gradients]

    def update(self, finite: tf.Tensor) -> None:
        """After each step, in replica context.

        Args:
            finite: bool scalar, the same on all replicas: whether the step's summed gradient was.
        """
        if self._fixed:
            return
        steps = tf.where(finite, self.finite_steps + 1, 0)
        is_due = steps >= self._window
        grown = tf.where(is_due, tf.minimum(2.0 * self.value, LARGEST), self.value)
        self.value.assign(tf.where(finite, grown, tf.maximum(0.5 * self.value, SMALLEST)))
        self.finite_steps.assign(tf.where(is_due, 0, steps))
