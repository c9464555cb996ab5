"""Linear layers with matrix products in FP8: E4M3 for activations and weights, E5M2 for gradients.

A tensor is multiplied by one scale, a power of two, and rounded to FP8; the product is divided by
the two scales. Values out of range become the largest FP8 number; NaN stays NaN. Activations around
the products stay bfloat16, weight gradients are float32. Scales are in one table with a row per
linear layer (`mlbert.ops.fp8_scaling.FP8Scaling`).

Hopper's products read both operands along their inner dimension, so every operand is stored by rows
and transposed. One pass writes both (`cast`), fused with an element-wise op if there is one:

    input of Q K V and of the feed-forward   the LayerNorm before it, which also writes the bfloat16
                                             result for the residual sum; a separate pass in the
                                             first layer
    input of the attention output            a separate pass
    input of the second feed-forward layer   bias and GELU, or the product before them (OPS=fused;
                                             OPS=slopes also keeps GELU's derivative in a byte in
                                             place of the product)
    gradient of Q K V                        a separate pass, which sums the bias gradient, or
                                             attention's backward (OPS=qkv)
    gradient of both outputs                 LayerNorm's backward,
                                             which sums their biases' gradients
    gradient of the first feed-forward layer GELU's derivative, which sums the bias gradient,
                                             or the product before it
    weights                                  a separate pass, once per step and once per evaluation

An encoder layer is three autograd functions: `linear` for Q K V and, after attention,
`attention_output` and `feed_forward`, each with the LayerNorm that follows. A hidden state is
returned twice, for the residual sum and for the product, so LayerNorm's backward can add both
gradients. If only some products run in FP8, layers only use `linear`.

Formats: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433. Implementations:
``plain`` quantizes in PyTorch, at the same points, and multiplies the dequantized numbers in
float32; ``triton`` quantizes in kernels. Products of ``cublaslt`` call cublasLt directly, so that
algorithms can be timed (`mlbert.ops.cublaslt_tuning`). The others except ``plain`` call
`torch._scaled_mm`, which uses the first algorithm of cublasLt's heuristic. It supports CUDA
(compute capability 8.9 and higher) and, slower than bfloat16 and for tests only, CPUs.

Legend: T tokens, D columns of the input, F columns of the output.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mlbert.ops import cublaslt
from mlbert.ops import forms as registry
from mlbert.ops.cublaslt_library import Epilogue
from mlbert.ops.forms import NOT_USED, Implementation
from mlbert.ops.fp8_casts import (
    NormGradients,
    NormSaved,
    plain_gelu,
    plain_gelu_and_slope,
    plain_gelu_backward,
    plain_times_slope,
)
from mlbert.ops.fp8_scaling import (
    GRADIENT,
    INNER_MULTIPLE,
    INPUT,
    TYPES,
    WEIGHT,
    FP8Scaling,
    Quantized,
)
from mlbert.ops.qkv_attention import AttentionArguments, AttentionForm
from mlbert.ops.weights import (
    GradientBuffer,
    gradient_buffer,
    in_type,
    joined,
    kept_sum,
    part_gradients,
)

Scales = tuple[Tensor, Tensor]  # reciprocals of two factors' scales, float32 scalars


def product(
    a: Tensor,
    b: Tensor,
    inverses: Scales,
    dtype: torch.dtype,
    fast: bool = False,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return a b^T of FP8 matrices a [M, K] and b [N, K], times both ``inverses``, plus bias:
    [M, N] in `dtype`.

    Args:
        fast: accumulate with fewer bits on Hopper.
        bias: [N] in `dtype`, which must be bfloat16 then.
        out: output tensor; by default a new one.
    """
    if not a.numel():
        return _result_room(a, b, dtype, out).zero_()
    implementation = registry.implementation("fp8_product", a)
    result: Tensor = implementation(a, b, inverses, dtype, fast, bias, out)
    return result


def _result_room(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Return the tensor for a product's result, [M, N]."""
    if out is not None:
        return out
    return torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device)


def _plain_product(
    a: Tensor,
    b: Tensor,
    inverses: Scales,
    dtype: torch.dtype,
    fast: bool,
    bias: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    del fast
    result = (a.float() * inverses[0]) @ (b.float() * inverses[1]).t()
    if bias is not None:
        result = result + bias
    result = result.to(dtype)
    return result if out is None else out.copy_(result)


def _scaled_product(
    a: Tensor,
    b: Tensor,
    inverses: Scales,
    dtype: torch.dtype,
    fast: bool,
    bias: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    # PyTorch has no float32 product with a bias.
    is_fused = bias is not None and dtype != torch.float32
    options: dict[str, Any] = {"out_dtype": dtype, "use_fast_accum": fast}
    if is_fused:
        options["bias"] = bias
    if out is not None:
        options["out"] = out
    inverse_a, inverse_b = inverses
    result = torch._scaled_mm(a, b.t(), inverse_a, inverse_b, **options)
    return result if bias is None or is_fused else result + bias


def _library_product(
    a: Tensor,
    b: Tensor,
    inverses: Scales,
    dtype: torch.dtype,
    fast: bool,
    bias: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    if bias is None or dtype != torch.float32:
        result = _result_room(a, b, dtype, out)
        inverse_a, inverse_b = inverses
        is_done = cublaslt.library().product(
            result,
            a,
            b,
            right_transposed=True,
            epilogue=Epilogue.NONE if bias is None else Epilogue.BIAS,
            bias=bias,
            inverse_left=inverse_a,
            inverse_right=inverse_b,
            fast=fast,
        )
        if is_done:
            return result
    return _scaled_product(a, b, inverses, dtype, fast, bias, out)


registry.register("fp8_product", "cublaslt")(_library_product)
registry.register("fp8_product", "plain")(_plain_product)
for _name in ("native", "triton"):
    registry.register("fp8_product", _name)(_scaled_product)


def _product_gelu(
    multiply: Implementation,
    gelu: Implementation,
    a: Tensor,
    b: Tensor,
    inverses: Scales,
    *bias_and_cast: Any,
    **cast: Any,
) -> tuple[Tensor, Quantized]:
    """Return pre = a b^T of FP8 a [T, D] and b [F, D] in bfloat16 [T, F],
    and gelu(pre + bias) in FP8.

    Args:
        multiply, gelu: implementations of ``fp8_product`` and ``fp8_gelu``.
        bias_and_cast, cast: arguments of ``fp8_gelu`` after the first.
    """
    pre = multiply(a, b, inverses, torch.bfloat16, True, None, None)
    return pre, gelu(pre, *bias_and_cast, **cast)


def _product_gelu_backward(
    multiply: Implementation,
    gelu: Implementation,
    a: Tensor,
    b: Tensor,
    inverses: Scales,
    fast: bool,
    pre: Tensor,
    *rest: Any,
    **cast: Any,
) -> tuple[Quantized, Tensor]:
    """Return (a b^T) gelu'(pre + bias) in FP8, and its sum over tokens, float32 [F]; as
    `_product_gelu`, with an implementation of ``fp8_gelu_backward``.
    """
    d_inner = multiply(a, b, inverses, pre.dtype, fast, None, None)
    return gelu(d_inner, pre, *rest, **cast)


def _selected(op: str) -> Implementation:
    return lambda x, *arguments, **options: registry.implementation(op, x)(x, *arguments, **options)


def _register_products_with_gelu(
    name: str, multiply: Implementation, gelu: Implementation, slope: Implementation
) -> None:
    """Register a product and a GELU kernel, or its derivative, as one op."""
    forward = functools.partial(_product_gelu, multiply, gelu)
    backward = functools.partial(_product_gelu_backward, multiply, slope)
    registry.register("fp8_product_gelu", name)(forward)
    registry.register("fp8_product_gelu_backward", name)(backward)


_register_products_with_gelu("plain", _plain_product, plain_gelu, plain_gelu_backward)
for _name in ("native", "triton", "cublaslt"):
    _register_products_with_gelu(
        _name, product, _selected("fp8_gelu"), _selected("fp8_gelu_backward")
    )


@registry.register("fp8_product_slope", "plain")
@registry.register("fp8_product_slope", "native")
def plain_product_slope(
    a: Tensor,
    b: Tensor,
    inverses: Scales,
    bias: Tensor,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Quantized]:
    """Return GELU's derivative at a b^T + bias in a byte, uint8 [T, F], and gelu(a b^T + bias) in
    FP8, in the tanh form: as `_product_gelu`, which keeps a b^T in 16 bits.
    """
    pre = _plain_product(a, b, inverses, torch.float32, True, None, None)
    return plain_gelu_and_slope(pre, bias, False, scale, amax, dtype)


@registry.register("fp8_product_slope_backward", "plain")
@registry.register("fp8_product_slope_backward", "native")
def plain_product_slope_backward(
    a: Tensor,
    b: Tensor,
    inverses: Scales,
    slopes: Tensor,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    buffer: GradientBuffer | None = None,
) -> tuple[Quantized, Tensor]:
    """Return (a b^T) times the derivative in FP8, and its sum over tokens, float32 [F], with fast
    accumulation: as `_product_gelu_backward`.
    """
    d_inner = _plain_product(a, b, inverses, torch.float32, True, None, None)
    return plain_times_slope(d_inner, slopes, scale, amax, dtype, buffer)


def keeps_slopes(x: Tensor, exact: bool, fast: bool) -> bool:
    """Return whether the feed-forward keeps GELU's derivative in a byte in place of its argument:
    both directions have a form that does. There are none for the erf form of GELU, and none
    without fast accumulation.
    """
    chosen = registry.selected(x.device)
    ops = ("fp8_product_slope", "fp8_product_slope_backward")
    return not exact and fast and all(chosen[op] not in NOT_USED for op in ops)


# A LayerNorm's output for its two readers, and its FP8 copies for the second,
# or None if not requested.
Hidden = tuple[Tensor, Tensor, Quantized | None]


def linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    table: FP8Scaling,
    row: int,
    small: Quantized | None = None,
) -> Tensor:
    """Return x W^T + b: x [T, D] in the activations' dtype -> [T, F].

    Args:
        weights, biases: float32 parts of W [F, D], which share one scale, and of b [F];
            without biases, b is 0.
        table, row: the scales, and this layer's row.
        small: x in FP8 with this layer's scale, if already quantized.
    """
    table.note_pass()
    return _FP8Linear.apply(x, small, table, row, len(weights), *weights, *biases)


def attention_output(
    context: Tensor,
    residual: Tensor,
    weight: Tensor,
    norm: Sequence[Any],
    table: FP8Scaling,
    row: int,
    reader: int | None,
) -> Hidden:
    """Return LayerNorm(residual + dropout(context W^T + b)), all products in FP8.

    Args:
        context, residual: [T, D] bfloat16.
        weight: [D, D].
        norm: arguments of `mlbert.ops.api.dropout_add_layer_norm` from ``weight`` on;
            the last one is b.
        reader: row of the FP8 linear layer that reads the result, or None.
    """
    table.note_pass()
    outputs = _AttentionOutput.apply(context, residual, weight, table, row, reader, *norm)
    return _hidden(outputs, reader)


def feed_forward(
    x: Tensor,
    residual: Tensor,
    small: Quantized,
    weights: Sequence[Tensor],
    exact: bool,
    norm: Sequence[Any],
    table: FP8Scaling,
    row: int,
    reader: int | None,
) -> Hidden:
    """Return LayerNorm(residual + dropout(gelu(x W1^T + b1) W2^T + b2)), all products in FP8.

    Args:
        x, residual: the same values, [T, D] bfloat16.
        small: x in FP8.
        weights: W1 [F, D], b1 [F], W2 [D, F].
        exact: the erf form of GELU; otherwise the benchmark's tanh form.
        norm: as in `attention_output`; the last one is b2.
        row: of W1; W2 has the next row.
        reader: as in `attention_output`.
    """
    table.note_pass()
    outputs = _FP8FeedForward.apply(x, residual, small, *weights, exact, table, row, reader, *norm)
    return _hidden(outputs, reader)


def cast(
    op: str,
    table: FP8Scaling,
    row: int,
    kind: int,
    *arguments: Any,
    buffer: GradientBuffer | None = None,
    **options: Any,
) -> Any:
    """Run a quantising op with the table's scale for a tensor of this kind.

    Until the scales are calibrated, run it twice, first only to find the maximum.

    Args:
        buffer: memory for the gradients of vectors, if the op computes any.
    """
    form = registry.implementation(op, arguments[0])
    scale = table.scale[row, kind]
    if not table.is_calibrated:
        seen = torch.zeros_like(scale)
        form(*arguments, scale=scale, amax=seen, **options)
        table.calibrate(row, kind, seen)
    if buffer is not None:
        options["buffer"] = buffer
    return form(*arguments, scale=scale, amax=table.counter(row, kind), **options)


def quantize_weight(parts: Sequence[Tensor], table: FP8Scaling, row: int) -> Quantized:
    """Return the FP8 copies of a weight [F, D], given in parts that share a scale;
    quantize if it has changed.
    """
    for part in parts:
        assert not any(n % INNER_MULTIPLE for n in part.shape), (
            f"FP8 needs multiples of 16, not {tuple(part.shape)}"
        )
    copies = table.weight_copies(row, parts[0].device)
    if copies is None or not table.are_fresh(row):
        weight = joined([part.detach() for part in parts]).contiguous()
        copies = cast("fp8_quantize", table, row, WEIGHT, weight, dtype=TYPES[WEIGHT], out=copies)
        table.keep_copies(row, copies)
    return copies


def quantize(x: Tensor, table: FP8Scaling, row: int, kind: int) -> Quantized:
    """Quantise a tensor [T, F] in a separate pass."""
    copies: Quantized = cast("fp8_quantize", table, row, kind, x.contiguous(), dtype=TYPES[kind])
    return copies


def _forward_product(
    x: Quantized,
    weight: Quantized,
    table: FP8Scaling,
    row: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """Return x W^T, [T, F]."""
    scales = table.inverse[row, INPUT], table.inverse[row, WEIGHT]
    return product(x.rows, weight.rows, scales, dtype, fast=True, bias=bias)


def _input_gradient(
    d_out: Quantized, weight_columns: Tensor, table: FP8Scaling, row: int, dtype: torch.dtype
) -> Tensor:
    """Return d_out W, [T, D]."""
    scales = table.inverse[row, GRADIENT], table.inverse[row, WEIGHT]
    return product(d_out.rows, weight_columns, scales, dtype, fast=table.products.fast)


def _weight_gradients(
    d_out: Quantized, x_columns: Tensor, table: FP8Scaling, row: int, parts: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return d_out^T x, one tensor per part of the weight [F, D]; None if written in place."""
    buffer = gradient_buffer(parts)
    scales = (table.inverse[row, GRADIENT], table.inverse[row, INPUT])
    out = None if buffer is None or buffer.adds else buffer.out
    d_weight = product(
        d_out.columns, x_columns, scales, torch.float32, fast=table.products.fast, out=out
    )
    if buffer is not None and buffer.adds:
        buffer.out.add_(d_weight)
    return part_gradients(parts, d_weight, buffer)


class _FP8Linear(torch.autograd.Function):
    """A linear layer with each product in FP8 or in the activations' dtype,
    as in ``table.products``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        small: Quantized | None,
        table: FP8Scaling,
        row: int,
        parts: int,
        *tensors: Tensor,
    ) -> Tensor:
        weights = tensors[:parts]
        biases = tensors[parts:]
        products = table.products_of(row)
        bias = joined(biases).to(x.dtype) if biases else None
        ctx.place = (table, row)
        ctx.weights = weights
        ctx.biases = biases
        if small is None and (products.forward or products.weight_gradient):
            small = quantize(x, table, row, INPUT)
        copies = None
        if products.forward or products.input_gradient:
            copies = quantize_weight(weights, table, row)
        if products.forward:
            assert small is not None
            assert copies is not None
            out = _forward_product(small, copies, table, row, x.dtype, bias)
        else:
            out = F.linear(x, in_type(weights, x.dtype), bias)
        # Operands of backward: the transposed FP8 copies for products in FP8, else the originals.
        kept_x = x
        if products.weight_gradient and small is not None:
            kept_x = small.columns
        if products.input_gradient and copies is not None:
            kept_weight = copies.columns
        else:
            kept_weight = in_type(weights, x.dtype)
        ctx.save_for_backward(kept_x, kept_weight)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        table, row = ctx.place
        products = table.products_of(row)
        d_out = d_out.contiguous()
        small: Any = None
        d_x = None
        d_bias = None
        buffer = gradient_buffer(ctx.biases) if ctx.biases else None
        if not (products.input_gradient or products.weight_gradient):
            if ctx.biases:
                d_bias = kept_sum(d_out.sum(0, dtype=torch.float32), buffer)
        elif ctx.biases:
            small, d_bias = cast(
                "fp8_quantize_sum",
                table,
                row,
                GRADIENT,
                d_out,
                dtype=TYPES[GRADIENT],
                buffer=buffer,
            )
        else:
            small = quantize(d_out, table, row, GRADIENT)
        if ctx.needs_input_grad[0] and products.input_gradient:
            d_x = _input_gradient(small, weight, table, row, d_out.dtype)
        elif ctx.needs_input_grad[0]:
            d_x = d_out @ weight
        if products.weight_gradient:
            d_weights = _weight_gradients(small, x, table, row, ctx.weights)
        else:
            d_weights = (d_out.t() @ x).to(ctx.weights[0].dtype).chunk(len(ctx.weights))
        d_biases: Sequence[Tensor | None] = []
        if d_bias is not None:
            d_biases = part_gradients(ctx.biases, d_bias, buffer)
        return d_x, None, None, None, None, *d_weights, *d_biases


def attention(
    form: AttentionForm,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    num_heads: int,
    arguments: AttentionArguments,
    table: FP8Scaling,
    row: int,
    small: Quantized | None,
) -> Tensor:
    """Return attention of the projections of x [T, D], [T, N, H]: see `mlbert.ops.qkv_attention`,
    and `linear` for the other arguments.
    """
    table.note_pass()
    return _FP8QkvAttention.apply(
        x, small, table, row, form, num_heads, arguments, *weights, *biases
    )


class _FP8QkvAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        small: Quantized | None,
        table: FP8Scaling,
        row: int,
        form: AttentionForm,
        num_heads: int,
        arguments: AttentionArguments,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.place = (table, row)
        ctx.form = form
        ctx.weights = tensors[:3]
        ctx.biases = tensors[3:]
        small = quantize(x, table, row, INPUT) if small is None else small
        weight = quantize_weight(ctx.weights, table, row)
        bias = in_type(ctx.biases, x.dtype)
        qkv = _forward_product(small, weight, table, row, x.dtype, bias)
        head_size = qkv.shape[1] // (3 * num_heads)
        out, ctx.saved = form.forward(qkv.view(-1, 3, num_heads, head_size), arguments)
        ctx.save_for_backward(small.columns, weight.columns, out)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out = ctx.saved_tensors
        table, row = ctx.place
        buffer = gradient_buffer(ctx.biases)
        backward = functools.partial(ctx.form.backward, ctx.saved, out, d_out)
        scale = table.scale[row, GRADIENT]
        if not table.is_calibrated:
            seen = torch.zeros_like(scale)
            backward(None, scale=scale, amax=seen)
            table.calibrate(row, GRADIENT, seen)
        small, total = backward(buffer, scale=scale, amax=table.counter(row, GRADIENT))
        ctx.saved = None
        d_biases = part_gradients(ctx.biases, total, buffer)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = _input_gradient(small, weight, table, row, d_out.dtype)
        d_weights = _weight_gradients(small, x, table, row, ctx.weights)
        return d_x, None, None, None, None, None, None, *d_weights, *d_biases


class _AttentionOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, context: Tensor, residual: Tensor, weight: Tensor, *settings: Any
    ) -> tuple[Tensor, ...]:
        table, row, reader, *norm = settings
        x = quantize(context, table, row, INPUT)
        w = quantize_weight((weight,), table, row)
        projected = _forward_product(x, w, table, row, context.dtype)
        out, small, saved = _norm(ctx, projected, residual, table, row, reader, norm)
        ctx.place = (table, row)
        ctx.weight = weight
        ctx.save_for_backward(x.columns, w.columns, *saved)
        return out, out.detach(), *small

    @staticmethod
    def backward(
        ctx: Any, d_out: Tensor | None, d_twin: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        x, w, *saved = ctx.saved_tensors
        table, row = ctx.place
        norm, d_norm = _norm_backward(ctx, d_out, d_twin, saved, table, row)
        d_context = _input_gradient(norm.x, w, table, row, norm.residual.dtype)
        (d_weight,) = _weight_gradients(norm.x, x, table, row, (ctx.weight,))
        return d_context, norm.residual, d_weight, None, None, None, *d_norm


class _FP8FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, small: Quantized, *settings: Any
    ) -> tuple[Tensor, ...]:
        w1, b1, w2, exact, table, row, reader, *norm = settings
        first = quantize_weight((w1,), table, row)
        second = quantize_weight((w2,), table, row + 1)
        ctx.keeps_slopes = keeps_slopes(x, exact, table.products.fast)
        scales = (table.inverse[row, INPUT], table.inverse[row, WEIGHT])
        if ctx.keeps_slopes:
            pre, inner = cast(
                "fp8_product_slope",
                table,
                row + 1,
                INPUT,
                small.rows,
                first.rows,
                scales,
                b1,
                dtype=TYPES[INPUT],
            )
        else:
            pre, inner = cast(
                "fp8_product_gelu",
                table,
                row + 1,
                INPUT,
                small.rows,
                first.rows,
                scales,
                b1,
                exact,
                dtype=TYPES[INPUT],
            )
        projected = _forward_product(inner, second, table, row + 1, x.dtype)
        out, copies, saved = _norm(ctx, projected, residual, table, row + 1, reader, norm)
        ctx.place = (table, row)
        ctx.weights = (w1, w2)
        ctx.exact = exact
        ctx.bias = b1
        ctx.save_for_backward(
            small.columns, inner.columns, pre, b1, first.columns, second.columns, *saved
        )
        return out, out.detach(), *copies

    @staticmethod
    def backward(
        ctx: Any, d_out: Tensor | None, d_twin: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        x, inner, pre, b1, first, second, *saved = ctx.saved_tensors
        table, row = ctx.place
        w1, w2 = ctx.weights
        norm, d_norm = _norm_backward(ctx, d_out, d_twin, saved, table, row + 1)
        (d_w2,) = _weight_gradients(norm.x, inner, table, row + 1, (w2,))
        buffer = gradient_buffer((ctx.bias,))
        scales = (table.inverse[row + 1, GRADIENT], table.inverse[row + 1, WEIGHT])
        if ctx.keeps_slopes:
            d_pre, d_b1 = cast(
                "fp8_product_slope_backward",
                table,
                row,
                GRADIENT,
                norm.x.rows,
                second,
                scales,
                pre,
                dtype=TYPES[GRADIENT],
                buffer=buffer,
            )
        else:
            d_pre, d_b1 = cast(
                "fp8_product_gelu_backward",
                table,
                row,
                GRADIENT,
                norm.x.rows,
                second,
                scales,
                table.products.fast,
                pre,
                b1,
                ctx.exact,
                dtype=TYPES[GRADIENT],
                buffer=buffer,
            )
        (d_bias,) = part_gradients((ctx.bias,), d_b1, buffer)
        d_x = _input_gradient(d_pre, first, table, row, norm.residual.dtype)
        (d_w1,) = _weight_gradients(d_pre, x, table, row, (w1,))
        return (
            d_x,
            norm.residual,
            None,
            d_w1,
            d_bias,
            d_w2,
            None,
            None,
            None,
            None,
            *d_norm,
        )


def _norm(
    ctx: Any,
    x: Tensor,
    residual: Tensor,
    table: FP8Scaling,
    row: int,
    reader: int | None,
    norm: Sequence[Any],
) -> tuple[Tensor, Quantized, list[Tensor | None]]:
    """Return LayerNorm(residual + dropout(x + b)), its FP8 copies,
    and the tensors that backward needs.
    """
    op = "fp8_dropout_add_layer_norm_forward"
    if reader is None:
        # Only the last layer, which has few rows, makes unused copies.
        form = registry.implementation(op, x)
        scale = table.scale[row, INPUT]
        out, small, saved = form(x, residual, *norm, scale=scale, amax=table.unread[INPUT])
    else:
        out, small, saved = cast(op, table, reader, INPUT, x, residual, *norm)
    gain, shift, _, dropout_p, key, rows, x_bias = norm
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*small)
    ctx.dropout = (dropout_p, key)
    ctx.vectors = (x_bias, gain, shift)  # in the order of their sums
    return out, small, [*saved, gain, rows]


def _norm_backward(
    ctx: Any,
    d_out: Tensor | None,
    d_twin: Tensor | None,
    saved: Sequence[Any],
    table: FP8Scaling,
    row: int,
) -> tuple[NormGradients, tuple[Tensor | None, ...]]:
    """Return the norm's gradients, with that of x quantized for the linear layer in `row`, and the
    gradients of the arguments ``norm`` of `attention_output`.
    """
    *passed, gain, rows = saved
    if d_out is None:
        d_out = d_twin
        d_twin = None
    assert d_out is not None, "at least one reader must have a gradient"
    dropout_p, key = ctx.dropout
    buffer = gradient_buffer(ctx.vectors)
    gradients: NormGradients = cast(
        "fp8_dropout_add_layer_norm_backward",
        table,
        row,
        GRADIENT,
        d_out.contiguous(),
        None if d_twin is None else d_twin.contiguous(),
        NormSaved(*passed),
        gain,
        dropout_p,
        key,
        rows,
        buffer=buffer,
    )
    d_bias, d_gain, d_shift = part_gradients(ctx.vectors, gradients.sums, buffer)
    return gradients, (d_gain, d_shift, None, None, None, None, d_bias)


def _hidden(outputs: tuple[Tensor, ...], reader: int | None) -> Hidden:
    out, twin, *copies = outputs
    return out, twin, None if reader is None else Quantized(*copies)
