"""Every op in plain PyTorch: specification, fallback, and implementation for any device.

Arithmetic is float32 for inputs up to 32 bits and float64 for float64 inputs; results have the
activations' dtype. Matrix products of the linear ops run in the activations' dtype, like PyTorch's.
Weights may have another dtype; their gradients have the weights' dtype.

Legend: S sequences, T tokens, M masked tokens, N heads, H head size, D hidden, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mlbert.ops.dropout import Key, attention_keep_mask, dropout_scale, dropout_threshold, keep_mask


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


def attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float,
    key: Key,
    rows: Tensor | None,
    alibi_slopes: Tensor | None = None,
    *,
    widen: Callable[[Tensor], Tensor] = _wide,
) -> Tensor:
    """Return dropout(softmax(Q K^T / sqrt(H) + bias)) V within each sequence.

    See `mlbert.ops.attention`.

    ``widen`` converts qkv to the dtype of the products and probabilities.
    """
    del max_seqlen
    num_heads, head_size = qkv.shape[2:]
    threshold = dropout_threshold(dropout_p)
    bounds = cu_seqlens.tolist()
    outputs = [qkv[:0, 0]]
    for start, stop in itertools.pairwise(bounds):
        if start == stop:
            continue
        q, k, v = widen(qkv[start:stop]).permute(1, 2, 0, 3)
        scores = q @ k.transpose(1, 2) * head_size**-0.5
        if alibi_slopes is not None:
            place = torch.arange(stop - start, device=qkv.device)
            scores = scores - (alibi_slopes[:, None, None] * (place[:, None] - place).abs()).to(
                scores.dtype
            )
        probabilities = torch.softmax(_wide(scores), dim=-1).to(v.dtype)
        if threshold:
            assert rows is not None, "dropout needs rows"
            keep = attention_keep_mask(key, rows[start:stop], num_heads, stop - start, dropout_p)
            probabilities = torch.where(keep, probabilities * dropout_scale(threshold), 0.0)
        outputs.append((probabilities @ v).transpose(0, 1).to(qkv.dtype))
    outputs.append(qkv.new_zeros(qkv.shape[0] - bounds[-1], num_heads, head_size))
    return torch.cat(outputs)


def linear_qkv(
    x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, bq: Tensor, bk: Tensor, bv: Tensor
) -> Tensor:
    """Return x [T, D] times the three weights, [T, 3 D]."""
    return F.linear(x, torch.cat((wq, wk, wv)).to(x.dtype), torch.cat((bq, bk, bv)).to(x.dtype))


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


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
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
    return F.layer_norm(_wide(total), total.shape[-1:], _wide(weight), _wide(bias), eps).to(x.dtype)


def layer_norm_dropout(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout_p: float,
    key: Key,
    rows: Tensor | None,
) -> Tensor:
    """Return dropout(LayerNorm(x)) over the last dimension."""
    normal = F.layer_norm(_wide(x), x.shape[-1:], _wide(weight), _wide(bias), eps)
    return apply_dropout(normal, dropout_p, key, rows).to(x.dtype)


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
