"""Rotary position embeddings: rotate queries and keys by angles proportional to their position.

Channels i and i + H/2 of a head are a pair. At position p it is rotated by p theta^(-2 i / H), so
that a score only depends on the distance of two tokens (Su et al., arXiv 2104.09864; pairs as in
Hugging Face's models).

Legend: T tokens, N heads, H head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops import reference
from mlbert.ops.native_library import is_bf16, library, pointer


def rotations(
    position_ids: Tensor, head_size: int, theta: float, as_product: bool = False
) -> Tensor:
    """Return float32 [T, H]: the cosines, then the sines, of each token's H/2 angles.

    Args:
        position_ids: int64 [T].
        head_size: H, even.
        theta: base of the angles.
        as_product: multiply positions by theta^(-2 i / H), rounded, as Hugging Face's models do.
            Otherwise divide them by theta^(2 i / H). At 8,192 tokens the results differ by up to
            5e-4.
    """
    exponents = (
        torch.arange(0, head_size, 2, device=position_ids.device, dtype=torch.float32) / head_size
    )
    if as_product:
        angles = position_ids[:, None] * (1.0 / theta**exponents)
    else:
        angles = position_ids[:, None] / theta**exponents
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def rotary(qkv: Tensor, rotations: Tensor) -> Tensor:
    """Rotate queries and keys; values are unchanged.

    Args:
        qkv: [T, 3, N, H] float32 or bfloat16 (float64 runs plain).
        rotations: float32 [T, H].

    Returns:
        [T, 3, N, H].
    """
    return registry.implementation("rotary", qkv)(qkv, rotations)


registry.register("rotary", "plain")(reference.rotary)


@registry.register("rotary", "native")
def _native(qkv: Tensor, rotations: Tensor) -> Tensor:
    return _Rotary.apply(qkv.contiguous(), rotations.contiguous())


class _Rotary(torch.autograd.Function):
    """Rotate; backward rotates the gradient in the opposite direction."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, rotations: Tensor) -> Tensor:
        ctx.save_for_backward(rotations)
        return _rotate(qkv, rotations, 1)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        (rotations,) = ctx.saved_tensors
        return _rotate(d_out.contiguous(), rotations, -1), None


def _rotate(qkv: Tensor, rotations: Tensor, direction: int) -> Tensor:
    num_tokens, three, num_heads, head_size = qkv.shape
    assert three == 3, f"qkv {tuple(qkv.shape)} is not [T, 3, N, H]"
    assert rotations.shape == (num_tokens, head_size), f"rotations {tuple(rotations.shape)}"
    out = torch.empty_like(qkv)
    library().rotary(
        pointer(qkv),
        pointer(rotations, torch.float32),
        num_tokens,
        num_heads,
        head_size,
        direction,
        is_bf16(qkv),
        torch.get_num_threads(),
        pointer(out),
    )
    return out
