"""Batches that kernels stumble over."""

import itertools

import torch

from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import Batch


def awkward_lengths(longest: int) -> dict[str, list[int]]:
    """Return lengths of sequences by name: one token, block edges, many tiny sequences,
    empty ones, a tail.
    """
    return {
        "one sequence": [longest],
        "length 1": [1],
        "around the longest": [longest - 1, longest, longest + 1],
        "512 sequences of 1 token": [1] * 512,
        "empty sequences": [0, 7, 0, 65, 0],
        "empty tail": [longest // 3, 9],
    }


def awkward_batches(config: BertConfig, device: torch.device) -> dict[str, Batch]:
    """Return a batch of each of the `awkward_lengths`."""
    lengths = awkward_lengths(config.max_position_embeddings)
    found = {}
    for name, values in lengths.items():
        tail = 13 if name == "empty tail" else 0
        found[name] = _bare_batch(config, values, tail).to(device)
    return found


def _bare_batch(config: BertConfig, lengths: list[int], tail: int) -> Batch:
    """Return random ids for these lengths and `tail` tokens that belong to no sequence;
    every seventh token masked.
    """
    used = sum(lengths)
    total = used + tail
    generator = torch.Generator().manual_seed(used)
    positions = torch.cat([torch.arange(n) for n in [*lengths, tail]]).clamp(
        max=config.max_position_embeddings - 1
    )
    masked = torch.arange(min(3, used), used, 7)
    numbers = torch.randint(config.vocab_size, (total + len(masked),), generator=generator)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return Batch(
        input_ids=numbers[:total],
        segment_ids=(positions > 4).long(),
        position_ids=positions,
        cu_seqlens=bounds,
        max_seqlen=max(lengths),
        masked_positions=masked,
        masked_labels=numbers[total:],
        next_sentence_labels=torch.zeros(len(lengths), dtype=torch.int64),
        dropout_rows=torch.arange(total, dtype=torch.int32) + 1000,
    )
