"""The one batch format: a flat stream of the tokens of S sequences, back to back, without padding.

Legend: S sequences, T tokens, M masked tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank.

    Attributes:
        input_ids: int64 [T], token ids after masking.
        segment_ids: int64 [T], 0 for sentence A, 1 for sentence B.
        position_ids: int64 [T], position within the sequence, from 0.
        cu_seqlens: int32 [S+1], sequence s holds tokens cu_seqlens[s] to cu_seqlens[s+1].
        max_seqlen: longest sequence, tokens (a host number: no device synchronisation).
        masked_positions: int64 [M], index into T, ascending.
        masked_labels: int64 [M], the original token ids.
        next_sentence_labels: int64 [S], 1 when sentence B is a random one.
        dropout_rows: int32 [T], names each token within the optimizer step, the same however the step's batch is
            split over ranks and accumulation steps; dropout masks are keyed by it.
    """

    input_ids: Tensor
    segment_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    masked_positions: Tensor
    masked_labels: Tensor
    next_sentence_labels: Tensor
    dropout_rows: Tensor

    @property
    def num_samples(self) -> int:
        """Sequences in the batch (S)."""
        return self.next_sentence_labels.numel()

    @property
    def num_tokens(self) -> int:
        """Real tokens in the batch (T)."""
        return self.input_ids.numel()

    @property
    def num_masked(self) -> int:
        """Masked tokens in the batch (M)."""
        return self.masked_labels.numel()

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked host memory; needs a CUDA device."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **changed)
