"""Scales of FP8 linear layers: delayed, one power of two a tensor, all on the device; and the weights' FP8 copies.

A step uses the scale that the largest magnitudes of the steps before it allow, so quantising needs no pass of its own
to find a maximum and the host waits for nothing:

    scale = 2^floor(log2(largest FP8 number / largest magnitude of the last HISTORY steps))

The first step, which has no history, scales each tensor by its own maximum. A weight is quantised when it is first
needed after `Scaling.weights_changed`, once for all micro-batches of a step and once for an evaluation, and always into
the same memory, so that a captured graph finds it there.

Legend: T tokens, U tokens rounded up to a multiple of 16, D columns of the input, F of the output, n linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

HISTORY = 16  # steps
INPUT, WEIGHT, GRADIENT = range(3)
TYPES = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)
LARGEST = tuple(torch.finfo(dtype).max for dtype in TYPES)
SCALE_BOUND = 2.0**100  # keeps scale and 1 / scale normal float32 numbers
INNER_MULTIPLE = 16  # cublasLt's FP8 products need inner and output dimensions in multiples of it
LINEARS_PER_LAYER = 4

Result = TypeVar("Result")


class Quantised(NamedTuple):
    """A matrix [T, F] in FP8: `rows` as it lies, `columns` [F, U] transposed, 0 behind T; both contiguous."""

    rows: Tensor
    columns: Tensor


class Scaled(NamedTuple):
    """A matrix in FP8 and the reciprocal of the scale that it was multiplied by, a float32 scalar on the device."""

    rows: Tensor
    columns: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, copies: Sequence[Tensor], inverse: Tensor) -> Scaled:
        """Of both copies, in `Quantised`'s order."""
        rows, columns = copies
        return cls(rows, columns, inverse)


def padded_tokens(tokens: int) -> int:
    """U of the legend."""
    return -(-tokens // INNER_MULTIPLE) * INNER_MULTIPLE


@dataclass(frozen=True)
class Products:
    """Which of a linear layer's three matrix products run in FP8; the others run in the activations' type.

    Attributes:
        linears: whether any of them do in an encoder layer's Q K V, attention output, first and second feed-forward.
    """

    forward: bool = True
    input_gradient: bool = True
    weight_gradient: bool = True
    linears: tuple[bool, bool, bool, bool] = (True, True, True, True)

    @property
    def all(self) -> bool:
        """Whether the three products run in FP8."""
        return self.forward and self.input_gradient and self.weight_gradient


_NONE = Products(forward=False, input_gradient=False, weight_gradient=False)


@dataclass
class WeightCopies:
    """A linear layer's weight in FP8.

    Attributes:
        small: the copies; their memory stays when they are made anew.
        fresh: whether the weight is still the one that was quantised.
        counted: whether that was in training, where its magnitude counts.
    """

    small: Scaled | None = None
    fresh: bool = False
    counted: bool = False


@dataclass(frozen=True)
class Slot:
    """One linear layer's part of a `Scaling`: views, one number for each of INPUT, WEIGHT and GRADIENT.

    Attributes:
        scale, inverse: float32 [3], factors and their reciprocals.
        amax: float32 [3], raised to the largest magnitudes seen.
        counts: whether somebody reads `amax`: in training.
        calibrated: False: scales are not known yet, each tensor takes its own.
        products: what runs in FP8.
        weight: the weight's copies.
    """

    scale: Tensor
    inverse: Tensor
    amax: Tensor
    counts: bool
    calibrated: bool
    products: Products
    weight: WeightCopies

    @property
    def takes_input(self) -> bool:
        """Whether some product reads the input in FP8."""
        return self.products.forward or self.products.weight_gradient

    def cast(self, kind: int, quantise: Callable[[Tensor, Tensor], Result]) -> tuple[Result, Tensor]:
        """quantise(scale, amax) for a tensor of this kind, and the reciprocal of the scale.

        While scales are unknown it runs twice, the first time for the maximum alone.
        """
        scale, inverse = self.scale[kind], self.inverse[kind]
        if not self.calibrated:
            seen = torch.zeros_like(scale)
            with torch.no_grad():
                quantise(scale, seen)
            scale = torch.where((seen > 0) & seen.isfinite(), scale_for(seen, LARGEST[kind]), scale)
            inverse = scale.reciprocal()
        return quantise(scale, self.amax[kind]), inverse


class Scaling(nn.Module):
    """Scales of all FP8 linear layers of a model, and the magnitudes that they follow from; moves with the model.

    Args:
        num_linears: n.
        products: what runs in FP8.

    Attributes:
        amax: float32 [n, 3], largest magnitudes of the present step.
        history: float32 [n, 3, HISTORY], of the steps before it, the last one first.
        scale, inverse: float32 [n, 3].
        is_calibrated: whether a step has set the scales.
    """

    amax: Tensor
    history: Tensor
    scale: Tensor
    inverse: Tensor
    largest: Tensor
    unread: Tensor

    def __init__(self, num_linears: int, products: Products) -> None:
        super().__init__()
        self.products, self.is_calibrated = products, False
        self.weights = [WeightCopies() for _ in range(num_linears)]
        for name, value in (
            ("amax", torch.zeros(num_linears, 3)),
            ("history", torch.zeros(num_linears, 3, HISTORY)),
            ("scale", torch.ones(num_linears, 3)),
            ("inverse", torch.ones(num_linears, 3)),
            ("largest", torch.tensor(LARGEST)),
            ("unread", torch.zeros(3)),
        ):
            self.register_buffer(name, value, persistent=False)

    def slot(self, index: int) -> Slot:
        """The part of linear layer `index`. Where no gradient is wanted, what passes leaves no trace."""
        products = self.products if self.products.linears[index % LINEARS_PER_LAYER] else _NONE
        counts = torch.is_grad_enabled()
        amax = self.amax[index] if counts else self.unread
        scales = (self.scale[index], self.inverse[index], amax)
        return Slot(*scales, counts, self.is_calibrated, products, self.weights[index])

    @torch.no_grad()
    def end_step(self, over_ranks: Callable[[Tensor], Any]) -> None:
        """Call after each optimizer step: takes the step's magnitudes into the history and sets the next scales.

        Args:
            over_ranks: raises a tensor to its largest values over all ranks, in place; so all ranks scale alike.

        Magnitudes that are not finite are passed over, and a tensor that was zero throughout keeps its scale.
        """
        over_ranks(self.amax)
        seen = torch.where(self.amax.isfinite(), self.amax, 0.0)
        self.history.copy_(torch.cat([seen.unsqueeze(-1), self.history[..., :-1]], dim=-1))
        highest = self.history.amax(-1)
        self.scale.copy_(torch.where(highest > 0, scale_for(highest, self.largest), self.scale))
        self.inverse.copy_(self.scale.reciprocal())
        self.amax.zero_()
        self.is_calibrated = True
        self.weights_changed()

    def weights_changed(self) -> None:
        """Weights or scales are not those of the FP8 copies any more. Touches the host's notes only: call it as well
        after replaying a graph that holds an update."""
        for copies in self.weights:
            copies.fresh = False

    def forget_step(self) -> None:
        """Drops the magnitudes of the present step; the weights' come again when they are quantised anew."""
        self.amax.zero_()
        self.weights_changed()

    def derived_state(self) -> dict[str, Tensor]:
        """What a checkpoint needs: the live tensors. Valid between `end_step` and the next step."""
        return {"fp8.history": self.history, "fp8.scale": self.scale}

    def load_derived_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `derived_state` gave, by copy; that of a run in another precision leaves the scales."""
        self.weights_changed()
        if "fp8.scale" in state:
            self.history.copy_(state["fp8.history"])
            self.scale.copy_(state["fp8.scale"])
            self.inverse.copy_(self.scale.reciprocal())
            self.is_calibrated = True


def scale_for(amax: Tensor, largest: Tensor | float) -> Tensor:
    """The largest power of two that keeps `amax` (positive) within `largest`; exact on every device."""
    ratio = (largest / amax).clamp(1.0 / SCALE_BOUND, SCALE_BOUND)
    exponent = torch.frexp(ratio).exponent
    return torch.ldexp(torch.ones_like(ratio), exponent - 1)
