"""Rotary position embeddings: rotate queries and keys by angles proportional to their position.

Channels i and i + H/2 of a head are a pair. At position p it is rotated by p theta^(-2 i / H), so
that a score only depends on the distance of two tokens (Su et al., arXiv 2104.09864; pairs as in
Hugging Face's models).

Legend: T tokens, N heads, H head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
