"""Scales of FP8 linear layers: delayed, one power of two a tensor, all on the device; and the weights' FP8 copies.

A step uses the scale that the largest magnitudes of the steps before it allow, so quantising needs no pass of its own
to find a maximum and the host waits for nothing:

    scale = 2^floor(log2(largest FP8 number / largest magnitude of the last HISTORY steps))

The first step, which has no history, scales each tensor by its own maximum. A weight is quantised when it is first
needed after `FP8Scaling.weights_changed`, once for all micro-batches of a step and once for an evaluation, and always
into the same memory, so that a captured graph finds it there.

Legend: T tokens, U tokens rounded up to a multiple of 16, D columns of the input, F of the output, n linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

HISTORY = 16  # steps
INPUT, WEIGHT, GRADIENT = range(3)
TYPES = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)
LARGEST = tuple(torch.finfo(dtype).max for dtype in TYPES)
SCALE_BOUND = 2.0**100  # keeps scale and 1 / scale normal float32 numbers
INNER_MULTIPLE = 16  # cublasLt's FP8 products need inner and output dimensions in multiples of it
LINEARS_PER_LAYER = 4


class Quantised(NamedTuple):
    """A matrix [T, F] in FP8: `rows` as it lies, `columns` [F, U] transposed, 0 behind T; both contiguous."""

    rows: Tensor
    columns: Tensor


def padded_tokens(tokens: int) -> int:
    """U of the legend."""
    return -(-tokens // INNER_MULTIPLE) * INNER_MULTIPLE


@dataclass(frozen=True)
class Products:
    """Which of a linear layer's three matrix products run in FP8; the others run in the activations' type.

    Attributes:
        linears: whether any of them do in an encoder layer's Q K V, attention output, first and second feed-forward.
        fast: whether the gradients' products, too, let the tensor cores add with fewer bits, as the forward ones do.
    """

    forward: bool = True
    input_gradient: bool = True
    weight_gradient: bool = True
    linears: tuple[bool, bool, bool, bool] = (True, True, True, True)
    fast: bool = False

    @property
    def all(self) -> bool:
        """Whether the three products of the four linear layers run in FP8."""
        return self.forward and self.input_gradient and self.weight_gradient and all(self.linears)


_NONE = Products(forward=False, input_gradient=False, weight_gradient=False)


class FP8Scaling(nn.Module):
    """A row for each FP8 linear layer of a model, a column each for INPUT, WEIGHT and GRADIENT; moves with the model.

    Args:
        num_linears: n, rows.
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
        self.num_linears, self._counts = num_linears, True
        self._copies: dict[int, Quantised] = {}  # their memory stays when they are made anew
        self._made: dict[int, bool] = {}  # rows whose copies are those of the present weights -> magnitude counted
        for name, value in (
            ("amax", torch.zeros(num_linears, 3)),
            ("history", torch.zeros(num_linears, 3, HISTORY)),
            ("scale", torch.ones(num_linears, 3)),
            ("inverse", torch.ones(num_linears, 3)),
            ("largest", torch.tensor(LARGEST)),
            ("unread", torch.zeros(3)),
        ):
            self.register_buffer(name, value, persistent=False)

    def products_of(self, row: int) -> Products:
        """What runs in FP8 in this linear layer."""
        return self.products if self.products.linears[row % LINEARS_PER_LAYER] else _NONE

    def note_pass(self) -> None:
        """Call before a forward pass: where no gradient is wanted, what passes leaves no trace in `amax`."""
        self._counts = torch.is_grad_enabled()

    def counter(self, row: int, kind: int) -> Tensor:
        """What is raised to the largest magnitude of a tensor: of `amax`, or something that nobody reads."""
        return self.amax[row, kind] if self._counts or kind == GRADIENT else self.unread[kind]

    def calibrate(self, row: int, kind: int, seen: Tensor) -> None:
        """Sets a scale by the largest magnitude of the one tensor that it is for; while no step has set it."""
        scale = self.scale[row, kind]
        scale.copy_(torch.where((seen > 0) & seen.isfinite(), scale_for(seen, LARGEST[kind]), scale))
        self.inverse[row, kind].copy_(scale.reciprocal())

    def weight_copies(self, row: int, device: torch.device) -> Quantised | None:
        """The weight's FP8 copies, or the memory for new ones; None: there is none on this device."""
        copies = self._copies.get(row)
        return copies if copies is not None and copies.rows.device == device else None

    def are_fresh(self, row: int) -> bool:
        """Whether the copies are those of the present weight. Made in an evaluation, they do for evaluations alone:
        their magnitude was not counted."""
        return row in self._made and (self._made[row] or not self._counts)

    def keep_copies(self, row: int, copies: Quantised) -> None:
        """Keeps new copies of a weight."""
        self._copies[row], self._made[row] = copies, self._counts

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
        self._made.clear()

    def forget_step(self) -> None:
        """Drops what the present step has left: magnitudes, and scales if no step has set them yet; the weights'
        magnitudes come again when they are quantised anew."""
        self.amax.zero_()
        if not self.is_calibrated:
            self.scale.fill_(1.0)
            self.inverse.fill_(1.0)
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
