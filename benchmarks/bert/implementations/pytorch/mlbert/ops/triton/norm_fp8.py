"""LayerNorm fused with dropout, residual sum and quantisation, forward and backward.

Forward writes its result in bfloat16 for the residual sum and in e4m3 for the next linear layer. Backward writes the
residual's gradient in bfloat16 and that of x in e5m2 for the preceding linear layer. FP8 copies are written by rows and
transposed. The arithmetic is that of `norm`, with sums over a row in another order.

A warp processes a row, in chunks of 256 columns, so sums over a row are shuffles and no warp waits for another. Then
the program reads its rows' bytes again, from the cache, and stores them transposed (`cast`). Layouts that would need
an exchange between warps are avoided: vectors are loaded for each row, and a row's scalars by each of its threads.

Legend: T tokens, U tokens rounded up to a multiple of 16, D hidden, P programs, R rows at a time.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlbert.ops import forms as registry
from mlbert.ops.dropout import dropout_threshold
from mlbert.ops.fp8_casts import NormGradients, NormSaved
from mlbert.ops.fp8_scaling import padded_tokens
from mlbert.ops.triton.cast import fp8_arguments, fp8_bytes, quantised_buffers, raise_amax, store_columns
from mlbert.ops.triton.device import sum_partials, walking_programs
from mlbert.ops.triton.mask import INTERPRETED, keep, key_argument, load_key, row_hash
from mlbert.ops.triton.norm import check_arguments

WARPS, LANES = 4, 32
CHUNK = 8 * LANES  # columns: 8 for each thread, 16 bytes of bfloat16
TILE = 32  # rows of a program: 32 bytes of a transposed row
_ROWS, _LANES, _CHUNK, _TILE = tl.constexpr(WARPS), tl.constexpr(LANES), tl.constexpr(CHUNK), tl.constexpr(TILE)


@registry.register("fp8_dropout_add_layer_norm_forward", "triton")
def norm_forward(x, residual, weight, bias, eps, dropout_p, key, rows, x_bias, scale, amax):
    """See `mlbert.ops.fp8_casts`."""
    tokens, hidden = x.shape
    threshold = dropout_threshold(dropout_p)
    check_arguments(x, residual, (weight, bias, x_bias), rows, threshold)
    x, residual = x.contiguous(), residual.contiguous()
    total, out, copies = torch.empty_like(x), torch.empty_like(x), quantised_buffers(x, torch.float8_e4m3fn)
    mean, inverse = (torch.empty(tokens, dtype=torch.float32, device=x.device) for _ in range(2))
    if tokens:
        fp8_norm_forward_kernel[(triton.cdiv(tokens, TILE),)](
            *(x, residual, x_bias, weight, bias, rows, key_argument(key), total, mean, inverse, out),
            *(*fp8_arguments(copies), scale, amax, tokens, padded_tokens(tokens), hidden, eps, threshold),
            *_sizes(hidden),
            num_warps=WARPS,
        )
    return out, copies, NormSaved(total, mean, inverse)


@registry.register("fp8_dropout_add_layer_norm_backward", "triton")
def norm_backward(d_out, d_twin, saved, weight, dropout_p, key, rows, scale, amax) -> NormGradients:
    """See `mlbert.ops.fp8_casts`."""
    tokens, hidden = saved.total.shape
    d_out, d_twin = d_out.contiguous(), None if d_twin is None else d_twin.contiguous()
    d_residual, copies = torch.empty_like(saved.total), quantised_buffers(saved.total, torch.float8_e5m2)
    # Two programs fit on a multiprocessor: more would wait for them.
    programs = min(triton.cdiv(tokens, TILE), walking_programs(d_out.device) // 2)
    partial = torch.empty(programs, 3, hidden, dtype=torch.float32, device=d_out.device)
    if tokens:
        fp8_norm_backward_kernel[(programs,)](
            *(d_out, d_twin, *saved, weight, rows, key_argument(key), d_residual, *fp8_arguments(copies)),
            *(scale, amax, partial, tokens, padded_tokens(tokens), hidden, dropout_threshold(dropout_p)),
            *_sizes(hidden),
            num_warps=WARPS,
        )
    d_weight, d_bias, d_x_bias = sum_partials(partial).unbind(0)
    return NormGradients(d_residual, copies, d_x_bias, d_weight, d_bias)


def _sizes(hidden: int) -> tuple[int, int]:
    """Return the chunks of a row, and its columns rounded up to a power of two."""
    return triton.cdiv(hidden, CHUNK), max(64, triton.next_power_of_2(hidden))


@triton.jit
def _place(first, chunk: tl.constexpr, tokens, hidden):
    """Return columns [CHUNK], the offsets int64 [R, CHUNK] of rows from `first` on, and which exist."""
    token, column = first + tl.arange(0, _ROWS), tl.arange(0, _CHUNK) + chunk * _CHUNK
    place = token[:, None].to(tl.int64) * hidden + column[None, :]  # T D may exceed 2^31
    return column, place, (token < tokens)[:, None] & (column < hidden)[None, :]


@triton.jit
def _load(pointer, place, inside):
    return tl.load(pointer + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _load_vector(vector, column, hidden):
    """Load a vector's columns for each row, float32 [R, CHUNK]."""
    column = tl.broadcast_to(column[None, :], [_ROWS, _CHUNK])
    return tl.load(vector + column, mask=column < hidden, other=0.0).to(tl.float32)


@triton.jit
def _load_scalar(pointer, first, tokens):
    """Load a number of each row, [R]; each thread of the row's warp loads it."""
    token = first + tl.arange(0, _ROWS * _LANES) // _LANES
    return tl.max(tl.reshape(tl.load(pointer + token, mask=token < tokens, other=0), [_ROWS, _LANES]), 1)


@triton.jit
def _store_scalar(pointer, first, value, tokens):
    """Store a number of each row, [R], from the first thread of its warp."""
    thread = tl.arange(0, _ROWS * _LANES)
    token = first + thread // _LANES
    value = tl.reshape(tl.broadcast_to(value[:, None], [_ROWS, _LANES]), [_ROWS * _LANES])
    tl.store(pointer + token, value, mask=(token < tokens) & (thread % _LANES == 0))


@triton.jit
def _hashes(rows, key, first, tokens, threshold: tl.constexpr):
    """Return the rows' hashes for `_dropped`, [R]."""
    return row_hash(load_key(key), _load_scalar(rows, first, tokens)) if threshold else first


@triton.jit
def _dropped(value, hashes, chunk: tl.constexpr, threshold: tl.constexpr):
    """Apply dropout to a chunk of rows [R, CHUNK]."""
    if threshold:
        value *= 256.0 / (256 - threshold)
        value = tl.where(keep(hashes, chunk * _CHUNK, _CHUNK, threshold), value, 0.0)
    return value


@triton.jit
def _inverse_deviation(values, mean, hidden, eps, CHUNKS: tl.constexpr):
    """Return 1 / deviation of the rows, [R], given in chunks [R, CHUNK]."""
    squares = tl.zeros([_ROWS, _CHUNK], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        is_column = (tl.arange(0, _CHUNK) + chunk * _CHUNK < hidden)[None, :]
        centred = tl.where(is_column, values[chunk].to(tl.float32) - mean[:, None], 0.0)
        squares += centred * centred
    return 1.0 / tl.sqrt(tl.sum(squares, 1) / hidden + eps)


@triton.jit
def _opaque(x):
    """Return int32 x, computed here: what is derived from it does not occupy registers during the loop around."""
    if INTERPRETED:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _transpose_tile(out_rows, out_columns, first, tokens, padded, hidden, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """Read the bytes of the tile's rows, which this program has written, and store them transposed, in pieces."""
    tl.debug_barrier()
    padded = _opaque(padded // 16) * 16
    group = first // 4 + tl.arange(0, _TILE // 4)
    for piece in tl.static_range(PIECES):
        column = tl.arange(0, BLOCK // PIECES) + piece * (BLOCK // PIECES)
        small = tl.tuple(())
        for number in tl.static_range(4):
            token = 4 * group + number
            inside = (token < tokens)[:, None] & (column < hidden)[None, :]
            place = token[:, None].to(tl.int64) * hidden + column[None, :]
            small += (tl.load(out_rows + place, mask=inside, other=0),)
        store_columns(small, group, column, padded, hidden, out_columns)


@triton.jit
def forward_rows(
    x, residual, x_bias, weight, bias, rows, key, total, means, inverses, out, out_rows, scale, first, tokens, hidden,
    eps, threshold: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Process R rows and store all but the transposed copy. Return their largest magnitudes [R]."""
    hashes = _hashes(rows, key, first, tokens, threshold)
    values, stored = tl.tuple(()), tl.tuple(())
    sums = tl.zeros([_ROWS, _CHUNK], tl.float32)
    stored_sums, largest = sums, sums
    for chunk in tl.static_range(CHUNKS):
        column, place, inside = _place(first, chunk, tokens, hidden)
        value = _load(x, place, inside)
        if x_bias is not None:
            value += _load_vector(x_bias, column, hidden)
        value = _dropped(value, hashes, chunk, threshold) + _load(residual, place, inside)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        values += (value,)
        stored += (rounded,)
        sums, stored_sums = sums + value, stored_sums + rounded.to(tl.float32)
    # Backward normalises the stored, rounded sum, so it needs that sum's statistics.
    mean, stored_mean = tl.sum(sums, 1) / hidden, tl.sum(stored_sums, 1) / hidden
    _store_scalar(means, first, stored_mean, tokens)
    _store_scalar(inverses, first, _inverse_deviation(stored, stored_mean, hidden, eps, CHUNKS), tokens)
    inverse = _inverse_deviation(values, mean, hidden, eps, CHUNKS)[:, None]
    for chunk in tl.static_range(CHUNKS):
        column, place, inside = _place(first, chunk, tokens, hidden)
        gain, shift = _load_vector(weight, column, hidden), _load_vector(bias, column, hidden)
        result = ((values[chunk] - mean[:, None]) * inverse * gain + shift).to(out.dtype.element_ty)
        tl.store(out + place, result, mask=inside)
        # Quantise the value rounded to the activations' dtype, to match the reference.
        value = tl.where(inside, result.to(tl.float32), 0.0)
        tl.store(out_rows + place, fp8_bytes(value * scale, False), mask=inside)
        largest = tl.maximum(largest, tl.abs(value))
    return tl.max(largest, 1)


@triton.jit(do_not_specialize=["key", "tokens"], do_not_specialize_on_alignment=["quantisation_scale", "amax"])
def fp8_norm_forward_kernel(
    x, residual, x_bias, weight, bias, rows, key, total, means, inverses, out, out_rows, out_columns,
    quantisation_scale, amax, tokens, padded, hidden: tl.constexpr, eps, threshold: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute TILE rows of LayerNorm(residual + dropout(x + x_bias)). Grid: T / TILE.

    x, residual, total, out: [T, D]; x_bias (may be None), weight, bias: [D]; rows: int32 [T]; means, inverses: float32
    [T]; out_rows uint8 [T, D], out_columns int32 [D, U / 4]; quantisation_scale, amax: float32 scalars.
    """
    start = tl.program_id(0) * _TILE
    scale, largest = tl.load(quantisation_scale), tl.zeros([_ROWS], tl.float32)
    for first in range(start, start + _TILE, _ROWS):
        magnitude = forward_rows(
            x, residual, x_bias, weight, bias, rows, key, total, means, inverses, out, out_rows, scale, first, tokens,
            hidden, eps, threshold, CHUNKS,
        )  # fmt: skip
        largest = tl.maximum(largest, magnitude)
    raise_amax(amax, largest[:, None])
    _transpose_tile(out_rows, out_columns, start, tokens, padded, hidden, BLOCK, 1)


@triton.jit
def _load_gradient(d_out, d_twin, total, weight, mean, inverse, skip: tl.constexpr, inside, policy: tl.constexpr):
    """Return d_out + d_twin (which may be None), the normalised rows, and the first times the weight, float32 [R,
    CHUNK], 0 outside; the pointers are to the first chunk."""
    d = tl.load(d_out + skip, mask=inside, other=0.0, eviction_policy=policy).to(tl.float32)
    if d_twin is not None:
        d += tl.load(d_twin + skip, mask=inside, other=0.0, eviction_policy=policy).to(tl.float32)
    value = tl.load(total + skip, mask=inside, other=0.0, eviction_policy=policy).to(tl.float32)
    gain = tl.load(weight + skip, mask=inside, other=0.0).to(tl.float32)
    return d, tl.where(inside, (value - mean) * inverse, 0.0), d * gain


@triton.jit
def backward_rows(
    d_out, d_twin, total, means, inverses, weight, rows, key, d_residual, out_rows, scale, first, tokens, hidden, sums,
    threshold: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Process R rows and store all but the transposed copy. Return the updated sums, three of each chunk, and the rows'
    largest magnitudes [R]."""
    hashes = _hashes(rows, key, first, tokens, threshold)
    mean, inverse = _load_scalar(means, first, tokens)[:, None], _load_scalar(inverses, first, tokens)[:, None]
    # Pointers to the first chunk: constants lead to the others, without registers.
    token, column = (first + tl.arange(0, _ROWS))[:, None], tl.arange(0, _CHUNK)[None, :]
    place = token.to(tl.int64) * hidden + column
    d_out, total, d_residual, out_rows = d_out + place, total + place, d_residual + place, out_rows + place
    weight += tl.broadcast_to(column, [_ROWS, _CHUNK])
    if d_twin is not None:
        d_twin += place
    gradients = tl.zeros([_ROWS, _CHUNK], tl.float32)
    products, largest = gradients, tl.zeros([_ROWS], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        skip = chunk * _CHUNK
        inside = (token < tokens) & (column < hidden - skip)
        _, normal, gradient = _load_gradient(d_out, d_twin, total, weight, mean, inverse, skip, inside, "evict_last")
        gradients, products = gradients + gradient, products + gradient * normal
    mean_gradient, mean_product = tl.sum(gradients, 1)[:, None] / hidden, tl.sum(products, 1)[:, None] / hidden
    updated = tl.tuple(())
    for chunk in tl.static_range(CHUNKS):
        skip = chunk * _CHUNK
        inside = (token < tokens) & (column < hidden - skip)
        # From the cache: registers hold the sums.
        d, normal, gradient = _load_gradient(d_out, d_twin, total, weight, mean, inverse, skip, inside, "evict_first")
        result = (gradient - mean_gradient - normal * mean_product) * inverse
        tl.store(d_residual + skip, result.to(d_residual.dtype.element_ty), mask=inside)
        # Recompute the mask: the forward pass did not store it. Columns past D are not 0 here.
        result = tl.where(inside, _dropped(result, hashes, chunk, threshold), 0.0)
        tl.store(out_rows + skip, fp8_bytes(result * scale, True), mask=inside)
        largest = tl.maximum(largest, tl.max(tl.abs(result), 1))
        updated += (sums[3 * chunk] + d * normal, sums[3 * chunk + 1] + d, sums[3 * chunk + 2] + result)
    return updated, largest


@triton.jit(do_not_specialize=["key", "tokens"], do_not_specialize_on_alignment=["quantisation_scale", "amax"])
def fp8_norm_backward_kernel(
    d_out, d_twin, total, means, inverses, weight, rows, key, d_residual, out_rows, out_columns, quantisation_scale,
    amax, partial, tokens, padded, hidden: tl.constexpr, threshold: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute gradients of every P-th tile, and this program's sums over its tokens. Grid: P.

    d_out, d_twin (may be None), total, d_residual: [T, D]; out_rows uint8 [T, D] and out_columns int32 [D, U / 4]: the
    gradient of x; partial: float32 [P, 3, D], sums for weight, bias and x_bias; others as in the forward kernel.
    """
    scale, largest = tl.load(quantisation_scale), tl.zeros([_ROWS], tl.float32)
    sums = tl.tuple(())
    for _ in tl.static_range(3 * CHUNKS):
        sums += (tl.zeros([_ROWS, _CHUNK], tl.float32),)
    # Every program sums its tiles in order, so the results are the same in every run.
    for start in range(tl.program_id(0) * _TILE, tokens, tl.num_programs(0) * _TILE):
        for first in range(start, start + _TILE, _ROWS):
            sums, magnitude = backward_rows(
                d_out, d_twin, total, means, inverses, weight, rows, key, d_residual, out_rows, scale, first, tokens,
                hidden, sums, threshold, CHUNKS,
            )  # fmt: skip
            largest = tl.maximum(largest, magnitude)
        # In four pieces, because the sums need the other registers.
        _transpose_tile(out_rows, out_columns, start, tokens, padded, hidden, BLOCK, 4)
    raise_amax(amax, largest[:, None])
    for chunk in tl.static_range(CHUNKS):
        column = tl.arange(0, _CHUNK) + chunk * _CHUNK
        base = partial + tl.program_id(0) * 3 * hidden + column
        for number in tl.static_range(3):
            tl.store(base + number * hidden, tl.sum(sums[3 * chunk + number], 0), mask=column < hidden)
