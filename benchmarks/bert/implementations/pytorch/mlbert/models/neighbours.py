"""A start from which masked language modelling learns at once: heads look at neighbours, words are as likely as common.

A new model spends its first updates on how often words are, and then stays long at that level until some head has found
the words beside a masked one. Rotary positions allow to begin there. A query bias a and a key bias a turned back by
d positions give a score of tokens i and j, whatever they are, of

    sum over angles t of  a_t^2 cos((j - i - d) t) / sqrt(H)

which is highest at j = i + d. Training changes it freely. The weights a_t^2 fall with the angle, so that the highest
angle makes the maximum narrow and the others keep it from coming again some words on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from mlbert.config.bert_config import BertConfig

DISTANCES = (-1, 1, -2, 2, -3, 3)  # of the first layer's heads, where there are so many; the others start as usual
_HEIGHT, _FALL = 8.0, 1.2  # of the scores; the exponent by which weights fall with the angle
_USUAL = 32, 10_000.0  # head size and base of the angles for which the height was chosen


def neighbour_biases(config: BertConfig) -> tuple[Tensor, Tensor]:
    """Biases of the first layer's query and key, float32 [D] each."""
    size, half = config.head_size, config.head_size // 2
    angles = config.rope_theta ** -(torch.arange(half) / half)
    density = (size / _USUAL[0]) * torch.log(torch.tensor(_USUAL[1])) / torch.log(torch.tensor(config.rope_theta))
    weights = (_HEIGHT / density * angles**_FALL * size**0.5).sqrt()
    query, key = torch.zeros(2, config.num_attention_heads, size)
    for head, distance in enumerate(DISTANCES[: config.num_attention_heads]):
        query[head, :half] = weights
        key[head, :half] = weights * (distance * angles).cos()
        key[head, half:] = -weights * (distance * angles).sin()
    return query.flatten(), key.flatten()


@torch.no_grad()
def begin_with_frequencies(model: nn.Module, counts: Sequence[float] | np.ndarray) -> None:
    """Gives the decoder's bias the values with which every word is as likely as it is frequent, up to a constant.

    Args:
        model: with a masked-LM head.
        counts: how often each entry of the vocabulary was seen; each is taken for one more.
    """
    seen = torch.as_tensor(counts, dtype=torch.float64) + 1.0
    bias = dict(model.named_parameters())
    decoder = bias["cls.predictions.bias"] if "cls.predictions.bias" in bias else bias["cls.predictions.decoder.bias"]
    decoder[: len(seen)] = (seen.log() - seen.log().mean()).float()
