"""The one batch format: a flat stream of the tokens of S sequences, back to back, without padding.

Legend: S sequences, T tokens, M masked tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

IGNORED_LABEL = -100  # of what fills a batch up; as in PyTorch's cross_entropy


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank."""

    input_ids: Tensor  # int64 [T], token ids after masking
    segment_ids: Tensor  # int64 [T], 0 for sentence A, 1 for sentence B
    position_ids: Tensor  # int64 [T], position within the sequence, from 0
    cu_seqlens: Tensor  # int32 [S+1], sequence s holds tokens cu_seqlens[s] to cu_seqlens[s+1]
    max_seqlen: int  # longest sequence, tokens (a host number: no device synchronisation)
    masked_positions: Tensor  # int64 [M], index into T, ascending
    masked_labels: Tensor  # int64 [M], the original token ids
    next_sentence_labels: Tensor  # int64 [S], 1 when sentence B is a random one
    # int32 [T], names each token within the optimizer step, the same however the step's batch is split over ranks and
    # accumulation steps; dropout masks are keyed by it.
    dropout_rows: Tensor
    labels: Tensor | None = None  # float32 [S], a task's labels, classes or scores; None where there are none

    @property
    def num_samples(self) -> int:
        """Sequences in the batch (S)."""
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        """Real tokens in the batch (T)."""
        return self.input_ids.numel()

    @property
    def num_masked(self) -> int:
        """Masked tokens in the batch (M)."""
        return self.masked_labels.numel()

    @classmethod
    def empty(
        cls, tokens: int, sequences: int, masked: int, max_seqlen: int, has_labels: bool, device: torch.device | str
    ) -> Batch:
        """A batch of these sizes (T, S, M) in memory of its own, to be written."""

        def empty(length: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(length, dtype=dtype, device=device)

        return cls(
            input_ids=empty(tokens),
            segment_ids=empty(tokens),
            position_ids=empty(tokens),
            cu_seqlens=empty(sequences + 1, torch.int32),
            max_seqlen=max_seqlen,
            masked_positions=empty(masked),
            masked_labels=empty(masked),
            next_sentence_labels=empty(sequences),
            dropout_rows=empty(tokens, torch.int32),
            labels=empty(sequences, torch.float32) if has_labels else None,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by their names."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        moved: dict[str, Any] = {name: part.to(device, non_blocking=True) for name, part in self.tensors().items()}
        return replace(self, **moved)
