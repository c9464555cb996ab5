"""Linear layers whose matrix products run in FP8: E4M3 for activations and weights, E5M2 for gradients.

A tensor is multiplied by one scale, a power of two, and rounded to FP8; the product is divided by the two scales. A
step uses the scale that the largest magnitudes of the steps before it allow ("delayed scaling"), so quantising needs no
pass of its own to find a maximum and the host waits for nothing:

    scale = 2^floor(log2(largest FP8 number / largest magnitude of the last HISTORY steps))

What exceeds the range becomes the largest FP8 number; NaN stays NaN. The first step, which has no history, scales each
tensor by its own maximum. Activations around the products stay bfloat16, weight gradients come out in float32.

Formats: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433. Implementations of the two parts:
``plain`` takes the product of the dequantised numbers in float32; the others call `torch._scaled_mm`, which exists for
CUDA (compute capability 8.9 and higher) and, slower than bfloat16, for the CPU, where it serves tests.

Legend: T tokens, D columns of the input, F columns of the output, n linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlbert.ops import registry
from mlbert.ops.linear import joined

HISTORY = 16  # steps
INPUT, WEIGHT, GRADIENT = range(3)
TYPES = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)
LARGEST = tuple(torch.finfo(dtype).max for dtype in TYPES)
SCALE_BOUND = 2.0**100  # keeps scale and 1 / scale normal float32 numbers
INNER_MULTIPLE = 16  # cublasLt's FP8 products need inner and output dimensions in multiples of it


@dataclass(frozen=True)
class Products:
    """Which of a linear layer's three matrix products run in FP8; the others run in the activations' type."""

    forward: bool = True
    input_gradient: bool = True
    weight_gradient: bool = True


class Quantised(NamedTuple):
    """A matrix [T, F] in FP8: `rows` as it lies, `columns` [F, T] transposed."""

    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class Slot:
    """One linear layer's part of a `Scaling`: views, one number for each of INPUT, WEIGHT and GRADIENT.

    Attributes:
        scale, inverse: float32 [3], factors and their reciprocals.
        amax: float32 [3], raised to the largest magnitudes seen.
        calibrated: False: scales are not known yet, each tensor takes its own.
        products: what runs in FP8.
    """

    scale: Tensor
    inverse: Tensor
    amax: Tensor
    calibrated: bool
    products: Products


class Scaling(nn.Module):
    """Scales of all FP8 linear layers of a model, and the magnitudes that they follow from; moves with the model.

    Args:
        num_linears: n.
        products: what runs in FP8.

    Attributes:
        amax: float32 [n, 3], largest magnitudes of the present step.
        history: float32 [n, 3, HISTORY], of the steps before it, the last one first.
        scale, inverse: float32 [n, 3].
        calibrated: whether a step has set the scales.
    """

    amax: Tensor
    history: Tensor
    scale: Tensor
    inverse: Tensor
    largest: Tensor

    def __init__(self, num_linears: int, products: Products) -> None:
        super().__init__()
        self.products = products
        self.calibrated = False
        for name, value in (
            ("amax", torch.zeros(num_linears, 3)),
            ("history", torch.zeros(num_linears, 3, HISTORY)),
            ("scale", torch.ones(num_linears, 3)),
            ("inverse", torch.ones(num_linears, 3)),
            ("largest", torch.tensor(LARGEST)),
        ):
            self.register_buffer(name, value, persistent=False)

    def slot(self, index: int) -> Slot:
        """The part of linear layer `index`. Where no gradient is wanted, what passes leaves no trace."""
        amax = self.amax[index] if torch.is_grad_enabled() else torch.zeros_like(self.amax[index])
        return Slot(self.scale[index], self.inverse[index], amax, self.calibrated, self.products)

    @torch.no_grad()
    def update(self, over_ranks: Callable[[Tensor], Any]) -> None:
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
        self.calibrated = True

    def forget_step(self) -> None:
        """Drops the magnitudes of the present step."""
        self.amax.zero_()

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint needs: the live tensors. Valid between `update` and the next step."""
        return {"history": self.history, "scale": self.scale}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state` gave, by copy; an empty one (a run in another precision) leaves all as it is."""
        if not state:
            return
        self.history.copy_(state["history"])
        self.scale.copy_(state["scale"])
        self.inverse.copy_(self.scale.reciprocal())
        self.calibrated = True


def scale_for(amax: Tensor, largest: Tensor | float) -> Tensor:
    """The largest power of two that keeps `amax` (positive) within `largest`; exact on every device."""
    ratio = (largest / amax).clamp(1.0 / SCALE_BOUND, SCALE_BOUND)
    exponent = torch.frexp(ratio).exponent
    return torch.ldexp(torch.ones_like(ratio), exponent - 1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, slot: Slot) -> Tensor:
    """x W^T + b: x [T, D] in the activations' type, weight [F, D] and bias [F] float32 -> [T, F]."""
    return _Linear.apply(x, slot, 1, weight, *(() if bias is None else (bias,)))


def linear_qkv(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], slot: Slot) -> Tensor:
    """`mlbert.ops.linear_qkv` in FP8: three weights [D, D] and biases [D], which share one scale."""
    return _Linear.apply(x, slot, len(weights), *weights, *biases)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, exact: bool, slot: Slot) -> Tensor:
    """`mlbert.ops.linear_gelu` in FP8."""
    return F.gelu(linear(x, weight, bias, slot), approximate="none" if exact else "tanh")


def quantise(x: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype) -> Quantised:
    """x * scale in FP8, by rows and transposed.

    Args:
        x: [T, F] float32 or bfloat16, contiguous.
        scale: float32 scalar.
        amax: float32 scalar, raised to the largest |x|.
        dtype: float8_e4m3fn or float8_e5m2.
    """
    return registry.implementation("fp8_quantise", x)(x, scale, amax, dtype)


def product(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """a b^T of FP8 matrices a [M, K] and b [N, K], times the reciprocals of their scales, [M, N] in `dtype`.

    Args:
        fast: lets the tensor cores of Hopper add with fewer bits.
    """
    return registry.implementation("fp8_product", a)(a, b, inverse_a, inverse_b, dtype, fast)


@registry.register("fp8_quantise", "plain")
@registry.register("fp8_quantise", "native")
def _quantise(x: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype) -> Quantised:
    if x.numel():
        amax.copy_(torch.maximum(amax, x.abs().amax()))
    largest = torch.finfo(dtype).max
    rows = (x.float() * scale).clamp(-largest, largest).to(dtype)
    return Quantised(rows, rows.t().contiguous())


@registry.register("fp8_quantise", "triton")
def _triton_quantise(x: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype) -> Quantised:
    from mlbert.ops.triton.cast import cast_transpose

    return Quantised(*cast_transpose(x, scale, amax, dtype))


@registry.register("fp8_product", "plain")
def _plain_product(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    return ((a.float() * inverse_a) @ (b.float() * inverse_b).t()).to(dtype)


@registry.register("fp8_product", "native")
@registry.register("fp8_product", "triton")
def _scaled_product(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    return torch._scaled_mm(a, b.t(), inverse_a, inverse_b, out_dtype=dtype, use_fast_accum=fast)


def _in_fp8(x: Tensor, slot: Slot, kind: int) -> tuple[Quantised, Tensor]:
    """A tensor quantised with its slot's scale, and the reciprocal of that."""
    scale, inverse = slot.scale[kind], slot.inverse[kind]
    if not slot.calibrated and x.numel():
        amax = x.detach().abs().amax().float()
        scale = torch.where((amax > 0) & amax.isfinite(), scale_for(amax, LARGEST[kind]), scale)
        inverse = scale.reciprocal()
    return quantise(x.contiguous(), scale, slot.amax[kind], TYPES[kind]), inverse


def _padded(columns: Tensor) -> Tensor:
    """Adds zeros to the inner dimension of a transposed matrix [F, T] where the hardware asks for it."""
    return F.pad(columns, (0, -columns.shape[1] % INNER_MULTIPLE))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: Slot, parts: int, *tensors: Tensor) -> Tensor:
        weights, biases = tensors[:parts], tensors[parts:]
        weight, products = joined(weights), slot.products
        assert not any(size % INNER_MULTIPLE for size in weight.shape), f"FP8 needs sizes in 16s, not {weight.shape}"
        ctx.slot, ctx.parts, ctx.types = slot, parts, [tensor.dtype for tensor in tensors]
        saved = {"x": x, "weight": weight}
        if products.forward or products.weight_gradient:
            small_x, saved["inverse_x"] = _in_fp8(x, slot, INPUT)
            if products.weight_gradient:
                saved["x"] = small_x.columns
        if products.forward or products.input_gradient:
            small_weight, saved["inverse_weight"] = _in_fp8(weight, slot, WEIGHT)
            if products.input_gradient:
                saved["weight"] = small_weight.columns
        if products.forward:
            inverses = saved["inverse_x"], saved["inverse_weight"]
            out = product(small_x.rows, small_weight.rows, *inverses, x.dtype, fast=True)
        else:
            out = F.linear(x, weight.to(x.dtype))
        # Kept aside from autograd's own list: the scales change in place, after this step's backward.
        ctx.inverses = saved.pop("inverse_x", None), saved.pop("inverse_weight", None)
        ctx.save_for_backward(saved["x"], saved["weight"])
        return out + joined(biases).to(x.dtype) if biases else out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        slot, products = ctx.slot, ctx.slot.products
        d_x = d_weight = None
        if products.input_gradient or products.weight_gradient:
            small, inverse = _in_fp8(d_out, slot, GRADIENT)
        if products.input_gradient and ctx.needs_input_grad[0]:
            d_x = product(small.rows, weight, inverse, ctx.inverses[1], d_out.dtype)
        elif ctx.needs_input_grad[0]:
            d_x = d_out @ weight.to(d_out.dtype)
        if products.weight_gradient:
            d_weight = product(_padded(small.columns), _padded(x), inverse, ctx.inverses[0], torch.float32)
        else:
            d_weight = d_out.t() @ x
        gradients = list(d_weight.chunk(ctx.parts))
        if len(ctx.types) > ctx.parts:
            gradients += d_out.sum(0, dtype=torch.float32).chunk(ctx.parts)
        return d_x, None, None, *(g.to(dtype) for g, dtype in zip(gradients, ctx.types, strict=True))
