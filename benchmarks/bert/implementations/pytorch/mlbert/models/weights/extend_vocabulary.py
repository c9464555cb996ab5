"""Give a model rows for added words: each starts as the mean of the word's pieces.

Embedding, an untied decoder's weights and the decoder's bias are treated alike, so at first the
logit of a word is the mean of its pieces' logits. New rows of unused entries are zero, with the
lowest bias, so that they are not predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mlbert.models.weights.checkpoint_names import TIED, VOCABULARY

NAMES = (*VOCABULARY, *TIED)


def extend_vocabulary(
    state: Mapping[str, Tensor], pieces: Mapping[int, Sequence[int]], size: int
) -> dict[str, Tensor]:
    """Return parameters with a larger vocabulary.

    Args:
        state: our parameters by name, vocabulary unpadded: [V, H] or [V].
        pieces: row of a word -> rows of its pieces; a row may be an old one, which is replaced.
        size: new number of rows, at least V.
    """
    extended = dict(state)
    for name in NAMES:
        if name in state:
            extended[name] = _extended(state[name], pieces, size)
    return extended


def _extended(old: Tensor, pieces: Mapping[int, Sequence[int]], size: int) -> Tensor:
    new = torch.zeros((size, *old.shape[1:]), dtype=old.dtype)
    if old.ndim == 1:
        new.fill_(old.min())
    new[: len(old)] = old
    for row, parts in pieces.items():
        new[row] = old[list(parts)].mean(0)
    return new
