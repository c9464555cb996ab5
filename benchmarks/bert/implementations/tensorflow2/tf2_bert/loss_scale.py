"""Loss scale for float16, which keeps small gradients from underflowing:
it grows until a step overflows.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mlbert.config.tensorflow import TensorFlowConfig
from mlbert.ops.config import ComputeConfig

SMALLEST = 1.0
LARGEST = 2.0**24  # as in mlbert.optim.loss_scale


class LossScale(tf.Module):
    """Loss scale that halves if a step's gradient is not finite
    and doubles after `window` finite steps in a row.

    With a fixed scale, steps that overflow are skipped as well. Keras' optimizer would apply them,
    but an infinite weight never recovers.

    Source of the rule: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740,
    section 3.2.

    Args:
        initial: initial scale.
        window: finite steps in a row after which it doubles, up to `LARGEST`.
        fixed: never change the scale.

    Attributes:
        value: float32 scalar.
        finite_steps: int32 scalar, finite steps since the scale last changed.
    """

    def __init__(self, initial: float, window: int, fixed: bool) -> None:
        super().__init__()
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA  # all replicas decide alike
        self.value = tf.Variable(initial, dtype=tf.float32, trainable=False, aggregation=first)
        self.finite_steps = tf.Variable(0, dtype=tf.int32, trainable=False, aggregation=first)
        self._window = window
        self._fixed = fixed

    @classmethod
    def of(cls, compute: ComputeConfig, tensorflow: TensorFlowConfig) -> LossScale | None:
        """Return the configured loss scale, or None unless PRECISION=fp16.

        Call it in the strategy's scope.
        """
        if compute.precision != "fp16":
            return None
        return cls(compute.loss_scale, compute.loss_scale_window, tensorflow.loss_scale_fixed)

    def scale(self, loss: tf.Tensor) -> tf.Tensor:
        """Return the loss times the scale, float32."""
        return loss * self.value

    def unscale(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return float32 gradients of the unscaled loss from those of the scaled one."""
        inverse = 1.0 / self.value
        return [tf.cast(gradient, tf.float32) * inverse for gradient in gradients]

    def update(self, finite: tf.Tensor) -> None:
        """Update the scale after a step; call it in replica context.

        Args:
            finite: bool scalar, the same on all replicas:
                whether the step's summed gradient is finite.
        """
        if self._fixed:
            return
        steps = tf.where(finite, self.finite_steps + 1, 0)
        is_due = steps >= self._window
        grown = tf.where(is_due, tf.minimum(2.0 * self.value, LARGEST), self.value)
        self.value.assign(tf.where(finite, grown, tf.maximum(0.5 * self.value, SMALLEST)))
        self.finite_steps.assign(tf.where(is_due, 0, steps))
