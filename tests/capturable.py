"""A small shape, attention and LAMB that make no decisions on the host,
so that steps can be recorded on a CPU.
"""

from typing import Any

import torch
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.distributed.sharding import ShardLayout
from mlbert.ops import api as ops
from mlbert.ops import forms as registry
from mlbert.ops.dropout import Key, attention_keep_mask, dropout_scale, dropout_threshold
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from mlbert.optim.optimizer import norm_64

SHAPE = BertConfig(120, 32, 2, 2, 64, max_position_embeddings=32)
SETTINGS = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0}


@registry.register("attention", "static")
def static_attention(
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
) -> Tensor:
    """Compute plain attention with shapes independent of `cu_seqlens`: all token pairs, masked."""
    del order
    assert alibi_slopes is None
    assert window is None
    assert rotations is None
    num_tokens, _, num_heads, head_size = qkv.shape
    place = torch.arange(num_tokens)
    sequence = torch.searchsorted(cu_seqlens.long(), place, right=True) - 1
    used = place < cu_seqlens[-1]
    together = (sequence[:, None] == sequence) & used[:, None] & used
    q, k, v = qkv.float().permute(1, 2, 0, 3)
    scores = torch.where(together, q @ k.transpose(1, 2) * head_size**-0.5, -1e9)
    probabilities = torch.where(together, torch.softmax(scores, dim=-1), 0.0)
    if threshold := dropout_threshold(dropout_p):
        keep = attention_keep_mask(key, rows, num_heads, max_seqlen, dropout_p)
        column = (place - cu_seqlens[sequence]).clamp(0, max_seqlen - 1)
        probabilities = torch.where(
            keep[:, :, column], probabilities * dropout_scale(threshold), 0.0
        )
    return (probabilities @ v).transpose(0, 1).to(qkv.dtype)


class TensorLamb(Lamb):
    """LAMB with all decisions on tensors, as in the Triton kernels."""

    def __init__(self, flat: FlatParameters, **settings: Any) -> None:
        layout = ShardLayout.whole(flat.numel)
        settings = SETTINGS | settings | {"implementation": "plain"}
        super().__init__(flat, layout, **settings)
        self.can_capture = True
        self.lr = torch.zeros(())
        self.updates = torch.zeros((), dtype=torch.int64)

    @property
    def num_updates(self) -> int:
        return int(self.updates)

    def set_learning_rate(self, lr: float) -> None:
        self.lr.fill_(lr)

    @torch.no_grad()
    def launch(self) -> None:
        self.grad_norm.copy_(norm_64(self.flat.grad))
        finite = self.grad_norm.isfinite()
        self.updates += finite
        scale = self.max_grad_norm / self.grad_norm.clamp(min=self.max_grad_norm)
        grad = torch.where(finite, self.flat.grad * scale.float(), 0.0)
        corrections = [
            1.0 / (1.0 - torch.full((), beta, dtype=torch.float64) ** self.updates)
            for beta in self.betas
        ]
        m = self.exp_avg * self.betas[0] + grad * (1.0 - self.betas[0])
        v = self.exp_avg_sq * self.betas[1] + grad * grad * (1.0 - self.betas[1])
        update = m * corrections[0].float() / ((v * corrections[1].float()).sqrt() + self.eps)
        for piece in self._pieces:
            if piece.decay:
                part = slice(piece.start, piece.stop)
                update[part].add_(self.flat.data[part], alpha=self.weight_decay)
        scales = self._scales(self.flat.data, grad, update)
        for piece in self._pieces:
            update[piece.start : piece.stop].mul_(scales[piece.owner])
        weights = self.flat.data - self.lr * update
        for buffer, new in ((self.exp_avg, m), (self.exp_avg_sq, v), (self.flat.data, weights)):
            buffer.copy_(torch.where(finite, new, buffer))


def select_capturable() -> None:
    """Select plain ops and static attention until the next `ops.select`."""
    ops.select("plain")
    registry.select_each({"attention": "static"}, "cpu")
