"""LAMB and BERT's AdamW on TensorFlow variables, under any strategy.

With gradient g, weight w and update number t, from 1:

    m = beta_1 m + (1 - beta_1) g      c1 = 1 - beta_1^t
    v = beta_2 v + (1 - beta_2) g^2    c2 = 1 - beta_2^t
    LAMB     u = (m / c1) / (sqrt(v / c2) + eps) + weight_decay w      w = w - lr (||w|| / ||u||) u
    AdamW    u = (m / c1) / (sqrt(v) + eps) sqrt(c2) + weight_decay w  w = w - lr u

LayerNorm and bias parameters have neither decay nor LAMB's ratio. The ratio is 1 if a norm is 0.
Sources: You et al., arXiv 1904.00962, algorithm 2; Kingma and Ba, arXiv 1412.6980, the form at the
end of section 2, with decay as in Loshchilov and Hutter, arXiv 1711.05101. AdamW adds epsilon like
Keras' Adam, the base of Google's `AdamWeightDecay`. `mlbert.optim.adamw` adds it to the
bias-corrected root; TensorFlow 1 has no bias correction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import tensorflow as tf

from mlbert.host.errors import UserError
from mlbert.optim.config import OptimizerConfig

Event = Callable[[str, int | float | str], None]
Updated = tuple[tf.Tensor, tf.Tensor, tf.Tensor]  # weight, m, v

_UNDECAYED = re.compile("LayerNorm|layer_norm|bias")


class Optimizer(tf.Module):
    """Base class of both optimizers; create it in the strategy's scope.

    Args:
        parameters: float32, by the names of
            `mlbert.models.weights.checkpoint_names.parameter_names`.
        beta_1, beta_2, epsilon, weight_decay_rate: see the module docstring.
        max_grad_norm: maximum norm for `tf2_bert.step`; None disables clipping.
        compiled: compile the update of each parameter with XLA.

    Attributes:
        m, v: float32 moments by the parameters' names.
        iterations: int64 scalar, updates made so far.
    """

    def __init__(
        self,
        parameters: Mapping[str, tf.Variable],
        *,
        beta_1: float,
        beta_2: float,
        epsilon: float,
        weight_decay_rate: float,
        max_grad_norm: float | None = None,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.betas = (beta_1, beta_2)
        self.eps = epsilon
        self.weight_decay = weight_decay_rate
        self.max_grad_norm = max_grad_norm
        # A dict would add the model to our checkpoints.
        self._parameters = MappingProxyType(dict(parameters))
        self.m, self.v = (
            {
                name: tf.Variable(tf.zeros(w.shape), trainable=False)
                for name, w in parameters.items()
            }
            for _ in range(2)
        )
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA  # all replicas count alike
        self.iterations = tf.Variable(0, dtype=tf.int64, trainable=False, aggregation=first)
        self._update = tf.function(self.update, jit_compile=True) if compiled else self.update

    def apply(self, gradients: Sequence[tf.Tensor], lr: tf.Tensor, finite: tf.Tensor) -> None:
        """Apply one update; call it in replica context and outside any loop there.

        Args:
            gradients: float32, in the parameters' order, summed over the replicas.
            lr: float32 scalar.
            finite: bool scalar, the same on all replicas; if false, nothing changes.
        """
        step = tf.cast(self.iterations + 1, tf.float32)
        replica = tf.distribute.get_replica_context()
        replica.merge_call(self._update_all, args=(list(gradients), lr, step, finite))
        self.iterations.assign_add(tf.cast(finite, tf.int64))

    def update(
        self,
        weight: tf.Tensor,
        grad: tf.Tensor,
        m: tf.Tensor,
        v: tf.Tensor,
        lr: tf.Tensor,
        step: tf.Tensor,
        decayed: bool,
    ) -> Updated:
        """Return the new weight and moments of one parameter; `step` is t, a float32 scalar."""
        beta_1, beta_2 = self.betas
        m = beta_1 * m + (1.0 - beta_1) * grad
        v = beta_2 * v + (1.0 - beta_2) * tf.square(grad)
        direction = self._direction(m, v, step)
        if decayed:
            direction += self.weight_decay * weight
            lr *= self._ratio(weight, direction)
        return weight - lr * direction, m, v

    def hyperparameters(self, event: Event) -> None:
        """Log the hyperparameters under their MLPerf keys."""
        raise NotImplementedError

    def _direction(self, m: tf.Tensor, v: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError

    def _ratio(self, weight: tf.Tensor, direction: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError

    def _corrections(self, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return c1 and c2 via expm1: 1 - beta^t would lose four digits of float32 at beta_2
        0.999.
        """
        beta_1, beta_2 = self.betas
        c1 = -tf.math.expm1(step * math.log(beta_1))
        c2 = -tf.math.expm1(step * math.log(beta_2))
        return c1, c2

    def _update_all(
        self,
        strategy: tf.distribute.Strategy,
        gradients: Sequence[tf.Tensor],
        lr: tf.Tensor,
        step: tf.Tensor,
        finite: tf.Tensor,
    ) -> None:
        """Update each device's copy of each parameter, in cross-replica context."""
        for (name, weight), gradient in zip(self._parameters.items(), gradients, strict=True):
            update = self._update_of(decayed=_UNDECAYED.search(name) is None)
            arguments = (gradient, self.m[name], self.v[name], lr, step, finite)
            strategy.extended.update(weight, update, args=arguments)

    def _update_of(self, decayed: bool) -> Callable[..., None]:
        def update(
            weight: tf.Variable,
            grad: tf.Tensor,
            m: tf.Variable,
            v: tf.Variable,
            lr: tf.Tensor,
            step: tf.Tensor,
            finite: tf.Tensor,
        ) -> None:
            old = tuple(tf.convert_to_tensor(variable) for variable in (weight, m, v))
            new = self._update(old[0], grad, old[1], old[2], lr, step, decayed)
            for variable, before, after in zip((weight, m, v), old, new, strict=True):
                variable.assign(tf.where(finite, after, before))

        return update


class Lamb(Optimizer):
    """LAMB; see the module docstring."""

    def hyperparameters(self, event: Event) -> None:
        """Log the hyperparameters under the MLPerf keys for LAMB."""
        event("opt_name", "lamb")
        event("opt_lamb_epsilon", self.eps)
        event("opt_epsilon", self.eps)  # key in rulesets up to 2.0
        event("opt_lamb_beta_1", self.betas[0])
        event("opt_lamb_beta_2", self.betas[1])
        event("opt_lamb_weight_decay_rate", self.weight_decay)
        event("opt_gradient_clip_norm", self.max_grad_norm or 0.0)

    def _direction(self, m: tf.Tensor, v: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        c1, c2 = self._corrections(step)
        return (m / c1) / (tf.sqrt(v / c2) + self.eps)

    def _ratio(self, weight: tf.Tensor, direction: tf.Tensor) -> tf.Tensor:
        weight_norm = tf.norm(weight)
        direction_norm = tf.norm(direction)
        usable = (weight_norm > 0) & (direction_norm > 0)
        return tf.where(usable, tf.math.divide_no_nan(weight_norm, direction_norm), 1.0)


class AdamWeightDecay(Optimizer):
    """BERT's AdamW; see the module docstring."""

    def hyperparameters(self, event: Event) -> None:
        """Log the hyperparameters under the MLPerf keys for AdamW."""
        event("opt_name", "adamw")
        event("opt_adamw_epsilon", self.eps)
        event("opt_adamw_beta_1", self.betas[0])
        event("opt_adamw_beta_2", self.betas[1])
        event("opt_adamw_weight_decay", self.weight_decay)
        event("opt_gradient_clip_norm", self.max_grad_norm or 0.0)

    def _direction(self, m: tf.Tensor, v: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        c1, c2 = self._corrections(step)
        return (m / c1) / (tf.sqrt(v) + self.eps) * tf.sqrt(c2)

    def _ratio(self, weight: tf.Tensor, direction: tf.Tensor) -> tf.Tensor:
        return tf.ones([])


def make_optimizer(
    config: OptimizerConfig, parameters: Mapping[str, tf.Variable], *, compiled: bool
) -> Optimizer:
    """Return the configured optimizer for all of a model's parameters;
    ``compiled`` as in `Optimizer`.

    Raises:
        UserError: only the PyTorch implementation has this optimizer.
    """
    kinds: dict[str, type[Optimizer]] = {"lamb": Lamb, "adamw": AdamWeightDecay}
    if config.optimizer not in kinds:
        reason = f"{config.optimizer} is not supported in TensorFlow 2"
        raise UserError("config.choice", "OPTIMIZER", reason, "Use a supported one", kinds)
    return kinds[config.optimizer](
        parameters,
        beta_1=config.beta1,
        beta_2=config.beta2,
        epsilon=config.epsilon,
        weight_decay_rate=config.weight_decay_rate,
        max_grad_norm=config.max_grad_norm,
        compiled=compiled,
    )
