"""Every op in plain PyTorch: specification, fallback, and implementation for any device.

Arithmetic is float32 for inputs up to 32 bits and float64 for float64 inputs; results have the
activations' dtype. Matrix products of the linear ops run in the activations' dtype, like PyTorch's.
Weights may have another dtype; their gradients have the weights' dtype.

Legend: S sequences, T tokens, L tokens of one sequence, M masked tokens, N heads, H head size,
D hidden, V vocabulary; B blocks of Q queries and K keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mlbert.ops.dropout import (
    Key,
    attention_keep_mask,
    attention_keep_mask_at,
    dropout_scale,
    dropout_threshold,
    keep_mask,
)

_LOCAL_QUERIES = 32  # at least, in a block of local attention


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def apply_dropout(x: Tensor, probability: float, key: Key, rows: Tensor | None) -> Tensor:
    """Return x [T, D], scaled, where the mask of `key` and `rows` keeps it, else 0;
    see `mlbert.ops.dropout`.
    """
    threshold = dropout_threshold(probability)
    if threshold == 0:
        return x
    assert rows is not None, "dropout needs rows"
    return torch.where(
        keep_mask(key, rows, x.shape[-1], probability), x * dropout_scale(threshold), 0.0
    )


def add_dropout(
    residual: Tensor, x: Tensor, dropout_p: float, key: Key, rows: Tensor | None
) -> Tensor:
    """Return residual + dropout(x)."""
    return residual + apply_dropout(x, dropout_p, key, rows)


def attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float,
    key: Key,
    rows: Tensor | None,
    alibi_slopes: Tensor | None = None,
    window: int | None = None,
    rotations: Tensor | None = None,
    order: Tensor | None = None,
    *,
    widen: Callable[[Tensor], Tensor] = _wide,
) -> Tensor:
    """Return dropout(softmax(Q K^T / sqrt(H) + bias)) V within each sequence.

    See `mlbert.ops.attention`.

    ``widen`` converts qkv to the dtype of the products and probabilities.
    """
    del max_seqlen, order
    num_heads, head_size = qkv.shape[2:]
    threshold = dropout_threshold(dropout_p)
    if rotations is not None:
        qkv = rotary(qkv, rotations)
    bounds = cu_seqlens.tolist()
    outputs = [qkv[:0, 0]]
    for start, stop in itertools.pairwise(bounds):
        if start == stop:
            continue
        q, k, v = widen(qkv[start:stop]).permute(1, 2, 0, 3)
        places = _Places.of(stop - start, window, qkv.device)
        q = places.of_queries(q)
        k = places.of_keys(k)
        v = places.of_keys(v)
        scores = q @ k.transpose(2, 3) * head_size**-0.5
        if alibi_slopes is not None:
            bias = alibi_slopes[:, None, None, None] * places.distances()
            scores = scores - bias.to(scores.dtype)
        if places.window is not None:
            scores = scores.masked_fill(~places.visible(), -torch.inf)
        probabilities = torch.softmax(_wide(scores), dim=-1).to(v.dtype)
        if threshold:
            assert rows is not None, "dropout needs rows"
            keep = places.keep_mask(key, rows[start:stop], num_heads, dropout_p)
            probabilities = torch.where(keep, probabilities * dropout_scale(threshold), 0.0)
        context = (probabilities @ v).flatten(1, 2)[:, : stop - start]
        outputs.append(context.transpose(0, 1).to(qkv.dtype))
    outputs.append(qkv.new_zeros(qkv.shape[0] - bounds[-1], num_heads, head_size))
    return torch.cat(outputs)


class _Places(NamedTuple):
    """Blocks of the queries of one sequence, each with the keys that it may see.

    Attributes:
        queries: positions, int64 [B, Q]; the last one is repeated to fill the last block.
        keys: positions, int64 [B, K]; with a window, some are outside of the sequence.
        length: L.
        window: None if there is one block, of all queries and all keys.
    """

    queries: Tensor
    keys: Tensor
    length: int
    window: int | None

    @classmethod
    def of(cls, length: int, window: int | None, device: torch.device) -> _Places:
        """Return a sequence's blocks for the ``window`` of `mlbert.ops.attention.attention`."""
        if window is None or window >= length - 1:
            everything = torch.arange(length, device=device)[None]
            return cls(everything, everything, length, None)
        size = max(window, _LOCAL_QUERIES)
        first = torch.arange(0, length, size, device=device)[:, None]
        queries = first + torch.arange(size, device=device)
        keys = first + torch.arange(-window, size + window, device=device)
        return cls(queries.clamp(max=length - 1), keys, length, window)

    def of_queries(self, x: Tensor) -> Tensor:
        """Return the blocks of x [N, L, H]: [N, B, Q, H]."""
        return x[:, None] if self.window is None else x[:, self.queries]

    def of_keys(self, x: Tensor) -> Tensor:
        """Return each block's keys, [N, B, K, H], of x [N, L, H]; any value for those outside."""
        return x[:, None] if self.window is None else x[:, self.keys.clamp(0, self.length - 1)]

    def distances(self) -> Tensor:
        """Return |query - key|, int64 [B, Q, K]."""
        return (self.queries[:, :, None] - self.keys[:, None, :]).abs()

    def visible(self) -> Tensor:
        """Return which keys each query sees, bool [B, Q, K]."""
        assert self.window is not None
        is_inside = (self.keys >= 0) & (self.keys < self.length)
        return (self.distances() <= self.window) & is_inside[:, None, :]

    def keep_mask(self, key: Key, rows: Tensor, num_heads: int, probability: float) -> Tensor:
        """Return which probabilities are kept, bool [N, B, Q, K].

        ``rows``: the mask rows int32 [L] of the queries.
        """
        if self.window is None:
            return attention_keep_mask(key, rows, num_heads, self.length, probability)[:, None]
        num_blocks, num_queries = self.queries.shape
        columns = self.keys[:, None, :].expand(-1, num_queries, -1)
        keep = attention_keep_mask_at(
            key, rows[self.queries.flatten()], num_heads, columns.flatten(0, 1), probability
        )
        return keep.unflatten(1, (num_blocks, num_queries))


def rotary(qkv: Tensor, rotations: Tensor) -> Tensor:
    """Rotate queries and keys [T, 3, N, H]; values are unchanged. See `mlbert.ops.rotary`."""
    qk = qkv[:, :2]
    v = qkv[:, 2:]
    cos, sin = rotations[:, None, None].chunk(2, dim=-1)
    first, second = _wide(qk).chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(qkv.dtype), v], dim=1)


def linear_qkv(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, *biases: Tensor) -> Tensor:
    """Return x [T, D] times the three weights, [T, 3 D], plus the three biases, if any."""
    bias = torch.cat(biases).to(x.dtype) if biases else None
    return F.linear(x, torch.cat((wq, wk, wv)).to(x.dtype), bias)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, exact: bool) -> Tensor:
    """Return gelu(x W^T + b), in the tanh form unless `exact`."""
    pre = F.linear(x, weight.to(x.dtype), bias.to(x.dtype))
    return F.gelu(_wide(pre), approximate="none" if exact else "tanh").to(x.dtype)


def feed_forward(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, exact: bool) -> Tensor:
    """Return gelu(x W1^T + b1) W2^T, in the tanh form unless `exact`; W2's bias is not added."""
    return F.linear(linear_gelu(x, w1, b1, exact), w2.to(x.dtype))


def gated_gelu(pre: Tensor, exact: bool) -> Tensor:
    """Return gelu(a) * b, [T, F], for pre [T, 2 F] = (a, b); in the tanh form unless `exact`."""
    gate, value = _wide(pre).chunk(2, dim=-1)
    return (F.gelu(gate, approximate="none" if exact else "tanh") * value).to(pre.dtype)


def gated_feed_forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    exact: bool,
    dropout_p: float = 0.0,
    key: Key = 0,
    rows: Tensor | None = None,
) -> Tensor:
    """Return dropout(gelu(a) * b) W2^T with (a, b) = x W1^T."""
    inner = gated_gelu(F.linear(x, w1.to(x.dtype)), exact)
    return F.linear(apply_dropout(inner, dropout_p, key, rows), w2.to(x.dtype))


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    key: Key,
    rows: Tensor | None,
    x_bias: Tensor | None = None,
    *,
    widen: Callable[[Tensor], Tensor] = _wide,
) -> Tensor:
    """Return LayerNorm(residual + dropout(x + x_bias)) over the last dimension; ``widen`` converts
    x and residual to the dtype of the sums.
    """
    shifted = widen(x) if x_bias is None else widen(x) + x_bias.to(widen(x).dtype)
    total = widen(residual) + apply_dropout(shifted, dropout_p, key, rows)
    return _layer_norm(total, weight, bias, eps).to(x.dtype)


def layer_norm_dropout(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    key: Key,
    rows: Tensor | None,
) -> Tensor:
    """Return dropout(LayerNorm(x)) over the last dimension."""
    normal = _layer_norm(x, weight, bias, eps)
    return apply_dropout(normal, dropout_p, key, rows).to(x.dtype)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide_bias = None if bias is None else _wide(bias)
    return F.layer_norm(_wide(x), x.shape[-1:], _wide(weight), wide_bias, eps)


def embedding_sum(
    input_ids: Tensor,
    segment_ids: Tensor,
    position_ids: Tensor,
    word: Tensor,
    position: Tensor | None,
    segment: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return word[input_ids] + position[position_ids] + segment[segment_ids], [T, D] in `dtype`
    (default: word's).
    """
    total = _wide(F.embedding(input_ids, word))
    if position is not None:
        total = total + _wide(F.embedding(position_ids, position))
    return (total + _wide(F.embedding(segment_ids, segment))).to(dtype or word.dtype)


def masked_cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the sum of -log softmax(logits[:, :vocab_size])[label],
    and how many rows have their maximum there.
    """
    scores = logits[:, :vocab_size]
    loss_sum = F.cross_entropy(_wide(scores), labels, reduction="sum")
    if labels.numel() == 0:
        return loss_sum, labels.new_zeros(())
    return loss_sum, (scores.argmax(dim=-1) == labels).sum()
