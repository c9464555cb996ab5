"""The encoder's linear layers behind one interface: their products in the activations' type, or in FP8.

`PlainLinears` derives nothing from the weights. `Fp8Linears` owns what FP8 does: scales that follow the magnitudes of
past steps, and the weights' FP8 copies (`mlbert.ops.fp8_scaling`). A layer sees its four linear layers as a
`LayerLinears` and cannot tell which it has.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from mlbert.ops import api as ops
from mlbert.ops import fp8
from mlbert.ops.fp8_scaling import LINEARS_PER_LAYER, Products, Quantised, Scaling

# Linear layers of one encoder layer, as rows of FP8 scales are numbered; the one behind them is the next layer's first.
QKV, ATTENTION_OUTPUT, INTERMEDIATE, OUTPUT, NEXT_QKV = range(5)

# The weights of each encoder layer's linear layers, each as its parts.
LayerWeights = Iterable[Sequence[Sequence[Tensor]]]


class Hidden(NamedTuple):
    """A hidden state [T, D] with two readers, whose gradients the pass that made it adds.

    Attributes:
        residual: for the residual sum.
        product: the same numbers, for the next linear layer.
        small: their FP8 copies with that layer's scale; None where the layer has to make them.
    """

    residual: Tensor
    product: Tensor
    small: Quantised | None = None


class LayerLinears:
    """The four linear layers of one encoder layer, products in the activations' type."""

    def qkv(self, hidden: Hidden, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        """Query, key and value [T, 3 D]; see `mlbert.ops.api.linear_qkv`."""
        return ops.linear_qkv(hidden.product, *weights, *biases)

    def product(self, which: int, x: Tensor, weight: Tensor) -> Tensor:
        """x W^T of one linear layer."""
        return ops.linear(x, weight)

    def feed_forward(self, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, exact: bool) -> Tensor:
        """Both feed-forward products with GELU between them; see `mlbert.ops.api.feed_forward`."""
        return ops.feed_forward(x, w1, b1, w2, exact)

    def attention_output_norm(self, context: Tensor, residual: Tensor, weight: Tensor, norm: Sequence[Any]) -> Hidden:
        """LayerNorm(residual + dropout(context W^T + b)).

        Args:
            norm: arguments of `mlbert.ops.api.dropout_add_layer_norm` from ``weight`` on, b being the last one.
        """
        x = self.product(ATTENTION_OUTPUT, context, weight)
        return Hidden(*ops.dropout_add_layer_norm_twice(x, residual, *norm))

    def feed_forward_norm(self, hidden: Hidden, weights: Sequence[Tensor], exact: bool, norm: Sequence[Any]) -> Hidden:
        """LayerNorm(residual + dropout(feed-forward + b)); ``weights`` as in `feed_forward`, ``norm`` as above."""
        w1, b1, w2 = weights
        x = self.feed_forward(hidden.product, w1, b1, w2, exact)
        return Hidden(*ops.dropout_add_layer_norm_twice(x, hidden.residual, *norm))


class _SomeFp8(LayerLinears):
    """The same where some of the products run in FP8: each linear layer is by itself."""

    def __init__(self, table: Scaling, first: int) -> None:
        self._table, self._first = table, first

    def qkv(self, hidden: Hidden, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        return fp8.linear_qkv(hidden.product, weights, biases, self._table, self._first + QKV, hidden.small)

    def product(self, which: int, x: Tensor, weight: Tensor) -> Tensor:
        return fp8.linear(x, weight, None, self._table, self._first + which)

    def feed_forward(self, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, exact: bool) -> Tensor:
        pre = fp8.linear(x, w1, b1, self._table, self._first + INTERMEDIATE)
        return self.product(OUTPUT, F.gelu(pre, approximate="none" if exact else "tanh"), w2)


class _AllFp8(_SomeFp8):
    """The same where all of them do: with the LayerNorm behind them they are one function for autograd."""

    def attention_output_norm(self, context: Tensor, residual: Tensor, weight: Tensor, norm: Sequence[Any]) -> Hidden:
        rows = self._first + ATTENTION_OUTPUT, self._first + INTERMEDIATE
        return Hidden(*fp8.attention_output(context, residual, weight, norm, self._table, *rows))

    def feed_forward_norm(self, hidden: Hidden, weights: Sequence[Tensor], exact: bool, norm: Sequence[Any]) -> Hidden:
        reader = self._first + NEXT_QKV if self._first + NEXT_QKV < self._table.num_linears else None
        rows = self._first + INTERMEDIATE, reader
        assert hidden.small is not None, "attention_output_norm has made it"
        states = hidden.product, hidden.residual, hidden.small
        return Hidden(*fp8.feed_forward(*states, weights, exact, norm, self._table, *rows))


class PlainLinears(nn.Module):
    """Nothing is derived from the weights: there is nothing to refresh, to measure or to save.

    Methods are those of `Fp8Linears` and `mlbert.ops.fp8_scaling.Scaling`, which tell what they are for.
    """

    is_calibrated = True

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self._num_layers = num_layers

    def layers(self) -> list[LayerLinears]:
        """What each encoder layer works with in this pass."""
        return [LayerLinears()] * self._num_layers

    def weights_changed(self) -> None: ...

    def refresh(self, weights: LayerWeights) -> None: ...

    def end_step(self, over_ranks: Callable[[Tensor], Any]) -> None: ...

    def forget_step(self) -> None: ...

    def derived_state(self) -> dict[str, Tensor]:
        return {}

    def load_derived_state(self, state: Mapping[str, Tensor]) -> None: ...


class Fp8Linears(Scaling):
    """Scales and FP8 copies of all linear layers; ``products`` run in FP8."""

    def __init__(self, num_layers: int, products: Products) -> None:
        super().__init__(LINEARS_PER_LAYER * num_layers, products)

    def layers(self) -> list[LayerLinears]:
        """As `PlainLinears.layers`."""
        kind = _AllFp8 if self.products.all else _SomeFp8
        return [kind(self, first) for first in range(0, self.num_linears, LINEARS_PER_LAYER)]

    def refresh(self, weights: LayerWeights) -> None:
        """Makes the copies that are to be made, now."""
        self.note_pass()
        for row, parts in enumerate(linear for layer in weights for linear in layer):
            products = self.products_of(row)
            if products.forward or products.input_gradient:
                fp8.quantise_weight(parts, self, row)


def linears(num_layers: int, products: Products | None) -> PlainLinears | Fp8Linears:
    """Those of an encoder whose ``products`` run in FP8; None: none."""
    return Fp8Linears(num_layers, products) if products else PlainLinears(num_layers)
