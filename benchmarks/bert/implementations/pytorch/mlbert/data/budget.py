"""Fills a batch up to fixed sizes, so that every step has the same shapes: what a CUDA graph needs.

What is added takes no part in loss, gradient and accuracy: tokens behind the last sequence, sequences of no token
(`cu_seqlens` repeats its last value) and masked positions whose label is ignored.

Legend as in `mlbert.data.batch`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional as F

from mlbert.data.batch import Batch

IGNORED_LABEL = -100  # as in PyTorch's cross_entropy


@dataclass(frozen=True)
class Budget:
    """The sizes of a filled batch.

    Attributes:
        tokens: T; a multiple of 16 suits FP8, one of 128 the tiles of a GPU's matrix products.
        sequences: S.
        masked: M.
        max_seqlen: longest sequence that may occur.
    """

    tokens: int
    sequences: int
    masked: int
    max_seqlen: int

    def holds(self, batch: Batch) -> bool:
        """Whether the batch is within all four sizes."""
        sizes = (batch.num_tokens, batch.num_samples, batch.num_masked, batch.max_seqlen)
        limits = (self.tokens, self.sequences, self.masked, self.max_seqlen)
        return all(size <= limit for size, limit in zip(sizes, limits, strict=True))

    def fill(self, batch: Batch) -> Batch:
        """The batch in exactly these sizes; it must be held. The given one is left as it is.

        The loss still divides by the numbers of masked tokens and sequences of the batch that was given.
        """
        assert self.holds(batch), "the batch is larger than the budget"
        total = batch.num_tokens
        # Ignored labels look at a real token: position 0 exists in every batch.
        return replace(
            batch,
            input_ids=_filled(batch.input_ids, self.tokens, 0),
            segment_ids=_filled(batch.segment_ids, self.tokens, 0),
            position_ids=_filled(batch.position_ids, self.tokens, 0),
            dropout_rows=_filled(batch.dropout_rows, self.tokens, 0),
            cu_seqlens=_filled(batch.cu_seqlens, self.sequences + 1, total),
            max_seqlen=self.max_seqlen,
            masked_positions=_filled(batch.masked_positions, self.masked, 0),
            masked_labels=_filled(batch.masked_labels, self.masked, IGNORED_LABEL),
            next_sentence_labels=_filled(batch.next_sentence_labels, self.sequences, IGNORED_LABEL),
        )


def _filled(values: Tensor, length: int, value: int) -> Tensor:
    return F.pad(values, (0, length - values.numel()), value=value) if length > values.numel() else values.clone()
