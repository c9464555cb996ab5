"""Convert padded batches of other programs to our batches."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mlbert.data.batches import Batch


def unpadded(path: Path, smallest_label: int = 0, labels: Tensor | None = None) -> Batch:
    """Return the tokens under the attention mask of an ``.npz`` file,
    masked where the label is at least this one.

    ``labels``: labels of a task, float32 [S].
    """
    padded = {name: torch.from_numpy(value).long() for name, value in np.load(path).items()}
    used = padded["attention_mask"].bool()
    lengths = used.sum(1)
    asked = padded["labels"][used] >= smallest_label
    segments = padded.get("token_type_ids", torch.zeros_like(padded["input_ids"]))
    return Batch(
        input_ids=padded["input_ids"][used],
        segment_ids=segments[used],
        position_ids=torch.cat([torch.arange(n) for n in lengths.tolist()]),
        cu_seqlens=torch.tensor([0, *lengths.cumsum(0).tolist()], dtype=torch.int32),
        max_seqlen=int(lengths.max()),
        masked_positions=asked.nonzero()[:, 0],
        masked_labels=padded["labels"][used][asked],
        next_sentence_labels=padded.get(
            "next_sentence_label", torch.zeros(len(lengths), dtype=torch.int64)
        ),
        dropout_rows=torch.arange(int(lengths.sum()), dtype=torch.int32),
        labels=labels,
    )
