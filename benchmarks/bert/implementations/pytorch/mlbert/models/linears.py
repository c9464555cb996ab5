"""The encoder's linear layers behind one interface: their products in the activations' type, or in FP8.

`PlainLinears` derives nothing from the weights. `Fp8Linears` owns what FP8 does: scales that follow the magnitudes of
past steps, and the weights' FP8 copies (`mlbert.ops.fp8_scaling`). A layer sees its four linear layers as a
`LayerLinears` and cannot tell which it has.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mlbert import ops
from mlbert.ops import fp8
from mlbert.ops.fp8 import Hidden
from mlbert.ops.fp8_scaling import LINEARS_PER_LAYER, Products, Scaling, Slot

# Linear layers of one encoder layer, as FP8 scales are numbered; the one behind them is the next layer's first.
QKV, ATTENTION_OUTPUT, INTERMEDIATE, OUTPUT, NEXT_QKV = range(5)

# The weights of each encoder layer's linear layers, each as its parts.
LayerWeights = Iterable[Sequence[Sequence[Tensor]]]


class LayerLinears:
    """The four linear layers of one encoder layer, products in the activations' type."""

    def qkv(self, hidden: Hidden, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        """Query, key and value [T, 3 D]; see `mlbert.ops.linear_qkv`."""
        return ops.linear_qkv(hidden.product, *weights, *biases)

    def product(self, which: int, hidden: Hidden, weight: Tensor) -> Tensor:
        """x W^T of one linear layer."""
        return ops.linear(hidden.product, weight)

    def feed_forward(self, hidden: Hidden, w1: Tensor, b1: Tensor, w2: Tensor, exact: bool) -> Tensor:
        """Both feed-forward products with GELU between them; see `mlbert.ops.feed_forward`."""
        return ops.feed_forward(hidden.product, w1, b1, w2, exact)

    def dropout_add_norm(self, reader: int, *arguments: Any) -> Hidden:
        """`mlbert.ops.dropout_add_layer_norm` of the arguments; linear layer `reader` reads the result."""
        return Hidden(*ops.dropout_add_layer_norm_twice(*arguments), None)


class _Fp8LayerLinears(LayerLinears):
    """The same in FP8. ``slots``: of the four linear layers, and of the next layer's first, if there is one."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots

    def qkv(self, hidden: Hidden, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        return fp8.linear_qkv(hidden.product, weights, biases, self._slots[QKV], hidden.small)

    def product(self, which: int, hidden: Hidden, weight: Tensor) -> Tensor:
        return fp8.linear(hidden.product, weight, None, self._slots[which], hidden.small)

    def feed_forward(self, hidden: Hidden, w1: Tensor, b1: Tensor, w2: Tensor, exact: bool) -> Tensor:
        slots = self._slots[INTERMEDIATE], self._slots[OUTPUT]
        return fp8.feed_forward(hidden.product, w1, b1, w2, exact, slots, hidden.small)

    def dropout_add_norm(self, reader: int, *arguments: Any) -> Hidden:
        slot = self._slots[reader] if reader < len(self._slots) else None
        return fp8.dropout_add_layer_norm(slot, *arguments)


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
        slots = [self.slot(i) for i in range(len(self.weights))]
        starts = range(0, len(slots), LINEARS_PER_LAYER)
        return [_Fp8LayerLinears(slots[start : start + NEXT_QKV + 1]) for start in starts]

    def refresh(self, weights: LayerWeights) -> None:
        """Makes the copies that are to be made, now."""
        for i, parts in enumerate(linear for layer in weights for linear in layer):
            fp8.quantise_weight(parts, self.slot(i))


def linears(num_layers: int, products: Products | None) -> PlainLinears | Fp8Linears:
    """Those of an encoder whose ``products`` run in FP8; None: none."""
    return Fp8Linears(num_layers, products) if products else PlainLinears(num_layers)
