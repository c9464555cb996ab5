"""Delayed scaling for FP8 linear layers, one power of two per tensor, on the device;
and the weights' FP8 copies.

A step's scales follow from the largest magnitudes of previous steps, so quantising needs no extra
pass to find a maximum and no host synchronization:

    scale = 2^floor(log2(largest FP8 number / largest magnitude of the last HISTORY steps))

The first step has no history and scales each tensor by its current maximum. A weight is quantized
on first use after `FP8Scaling.weights_changed`, once for all micro-batches of a step and once per
evaluation, always into the same memory, so that captured graphs stay valid.

Legend: T tokens, U tokens rounded up to a multiple of 16, D columns of the input,
F of the output, n linear layers.
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
INNER_MULTIPLE = 16  # cublasLt's FP8 products need multiples of it as inner and output dimensions
LINEARS_PER_LAYER = 4
# Float32 numbers from one factor of a product to the next: cublasLt takes addresses that 16 divides
SPACING = 4


class Quantized(NamedTuple):
    """A matrix [T, F] in FP8: `rows` [T, F], and `columns` [F, U],
    transposed and 0 from column T; both contiguous.
    """

    rows: Tensor
    columns: Tensor


def padded_tokens(tokens: int) -> int:
    """Return U: tokens rounded up to a multiple of 16."""
    return -(-tokens // INNER_MULTIPLE) * INNER_MULTIPLE


@dataclass(frozen=True)
class Products:
    """Which of a linear layer's three matrix products run in FP8;
    the others use the activations' dtype.

    Attributes:
        linears: whether to use FP8 in an encoder layer's Q K V, attention output,
            first and second feed-forward.
        fast: whether the gradients' products also accumulate with fewer bits,
            as the forward products do.
    """

    forward: bool = True
    input_gradient: bool = True
    weight_gradient: bool = True
    linears: tuple[bool, bool, bool, bool] = (True, True, True, True)
    fast: bool = False

    @property
    def all(self) -> bool:
        """Return whether all three products of all four linear layers run in FP8."""
        return self.forward and self.input_gradient and self.weight_gradient and all(self.linears)


class FP8Scaling(nn.Module):
    """Scales of a model: a row per FP8 linear layer, columns INPUT, WEIGHT and GRADIENT.

    Moves with the model.

    Args:
        num_linears: n, rows.
        products: the products that run in FP8.

    Attributes:
        amax: float32 [n, 3], largest magnitudes of the current step.
        history: float32 [n, 3, HISTORY], of previous steps, the latest first.
        scale: float32 [n, 3].
        is_calibrated: whether a step has set the scales.
    """

    amax: Tensor
    history: Tensor
    scale: Tensor
    spaced_inverse: Tensor
    largest: Tensor
    unread: Tensor

    def __init__(self, num_linears: int, products: Products) -> None:
        super().__init__()
        self.products = products
        self._no_products = Products(forward=False, input_gradient=False, weight_gradient=False)
        self.is_calibrated = False
        self.num_linears = num_linears
        self._counts = True
        self._copies: dict[int, Quantized] = {}  # memory is reused when they are rebuilt
        # Rows with up-to-date copies -> whether their magnitude was counted.
        self._made: dict[int, bool] = {}
        buffers = {
            "amax": torch.zeros(num_linears, 3),
            "history": torch.zeros(num_linears, 3, HISTORY),
            "scale": torch.ones(num_linears, 3),
            "spaced_inverse": torch.ones(num_linears, 3, SPACING),
            "largest": torch.tensor(LARGEST),
            "unread": torch.zeros(3),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=False)

    @property
    def inverse(self) -> Tensor:
        """The scales' reciprocals, each aligned to 16 bytes."""
        return self.spaced_inverse[..., 0]

    def products_of(self, row: int) -> Products:
        """Return the products that run in FP8 in this linear layer."""
        if self.products.linears[row % LINEARS_PER_LAYER]:
            return self.products
        return self._no_products

    def note_pass(self) -> None:
        """Call before a forward pass.

        Without gradients, as in evaluation, magnitudes do not count in `amax`.
        """
        self._counts = torch.is_grad_enabled()

    def counter(self, row: int, kind: int) -> Tensor:
        """Return the scalar to raise to a tensor's largest magnitude:
        in `amax`, or a dummy if it does not count.
        """
        return self.amax[row, kind] if self._counts or kind == GRADIENT else self.unread[kind]

    def calibrate(self, row: int, kind: int, seen: Tensor) -> None:
        """Set a scale from the largest magnitude of its current tensor,
        before the first step has set it.
        """
        scale = self.scale[row, kind]
        scale.copy_(
            torch.where((seen > 0) & seen.isfinite(), scale_for(seen, LARGEST[kind]), scale)
        )
        self.inverse[row, kind].copy_(scale.reciprocal())

    def weight_copies(self, row: int, device: torch.device) -> Quantized | None:
        """Return the weight's FP8 copies, possibly outdated,
        or None if there are none on this device.
        """
        copies = self._copies.get(row)
        return copies if copies is not None and copies.rows.device == device else None

    def are_fresh(self, row: int) -> bool:
        """Return whether the copies match the current weight.

        Copies from an evaluation are only valid in evaluations: their magnitude was not counted.
        """
        return row in self._made and (self._made[row] or not self._counts)

    def keep_copies(self, row: int, copies: Quantized) -> None:
        """Store new copies of a weight."""
        self._copies[row] = copies
        self._made[row] = self._counts

    @torch.no_grad()
    def end_step(self, over_ranks: Callable[[Tensor], Any]) -> None:
        """Add the step's magnitudes to the history and set the next scales.

        Call it after each optimizer step.

        Args:
            over_ranks: in-place all-reduce MAX, so that all ranks use the same scales.

        Non-finite magnitudes are ignored, and a tensor that was always zero keeps its scale.
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
        """Mark the FP8 copies as outdated after a change of weights or scales.

        Host state only, so also call it after replaying a graph that contains an update.
        """
        self._made.clear()

    def forget_step(self) -> None:
        """Discard the current step's magnitudes, and its scales if no step has set them yet.

        Weights are quantized and counted again.
        """
        self.amax.zero_()
        if not self.is_calibrated:
            self.scale.fill_(1.0)
            self.inverse.fill_(1.0)
        self.weights_changed()

    def derived_state(self) -> dict[str, Tensor]:
        """Return the live tensors that a checkpoint saves.

        Valid between `end_step` and the next step.
        """
        return {"fp8.history": self.history, "fp8.scale": self.scale}

    def load_derived_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy in the result of `derived_state`.

        State of a run without FP8 leaves the scales unchanged.
        """
        self.weights_changed()
        if "fp8.scale" in state:
            self.history.copy_(state["fp8.history"])
            self.scale.copy_(state["fp8.scale"])
            self.inverse.copy_(self.scale.reciprocal())
            self.is_calibrated = True


def scale_for(amax: Tensor, largest: Tensor | float) -> Tensor:
    """Return the largest power of two that keeps `amax` (positive) within `largest`;
    exact on every device.
    """
    ratio = (largest / amax).clamp(1.0 / SCALE_BOUND, SCALE_BOUND)
    exponent = torch.frexp(ratio).exponent
    return torch.ldexp(torch.ones_like(ratio), exponent - 1)
