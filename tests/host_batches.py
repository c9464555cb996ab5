"""Dummy batches, reference implementations of batches, and their comparison."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlbert.data.batches import IGNORED_LABEL, Batch, HostBatch, StaticShape
from mlbert.data.formats.order import contiguous
from mlbert.data.formats.ragged import Ragged
from mlbert.data.loading.packed import PackedSource
from mlbert.data.loading.synthetic import SyntheticSource


def made_up_batches(
    packs: int, seed: int, vocab_size: int, max_tokens: int, step: int = 0, **options: Any
) -> list[HostBatch]:
    """Return the micro-batches of one step of random tokens,
    with at most three sequences per pack.
    """
    values = {
        "packs_per_step": packs,
        "seed": seed,
        "vocab_size": vocab_size,
        "max_tokens": max_tokens,
        **options,
    }
    return SyntheticSource(max_sequences_per_pack=3, **values).batches_of(step)


def open_packed(folder: Path, packs_per_step: int = 12, **options: Any) -> PackedSource:
    """Open a training source of at most three sequences per pack, unless options say otherwise."""
    values = {"max_sequences_per_pack": 3, "seed": 3, "partition": contiguous, **options}
    source = PackedSource(folder, packs_per_step=packs_per_step, **values)
    source.open()
    return source


def plain_batch(
    rows: Ragged, sequences_per_unit: list[int], units: list[int], max_tokens: int
) -> Batch:
    """Build the batch that `HostBatch.of` must give on a device, token by token."""
    columns: dict[str, list[int]] = {field.name: [] for field in dataclasses.fields(Batch)}
    bounds = [0]
    number = 0
    for unit, count in zip(units, sequences_per_unit, strict=True):
        row = unit * max_tokens
        for _ in range(count):
            first, end = rows.offsets[number : number + 2].tolist()
            for position, token in enumerate(rows.tokens[first:end].tolist()):
                columns["input_ids"].append(token)
                columns["segment_ids"].append(int(position >= rows.first_lengths[number]))
                columns["position_ids"].append(position)
                columns["dropout_rows"].append(row)
                row += 1
            for m in range(*rows.masked_offsets[number : number + 2].tolist()):
                columns["masked_positions"].append(first + int(rows.masked_positions[m]))
                columns["masked_labels"].append(int(rows.masked_labels[m]))
            columns["next_sentence_labels"].append(int(rows.next_sentence[number]))
            bounds.append(end)
            number += 1
    assert number == len(rows)
    narrow = {"dropout_rows": torch.int32}
    fields: dict[str, Any] = {
        name: torch.tensor(values, dtype=narrow.get(name, torch.int64))
        for name, values in columns.items()
    }
    lengths = [end - first for first, end in itertools.pairwise(bounds)]
    fields["max_seqlen"] = max(lengths, default=0)
    fields["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
    fields["labels"] = None
    if rows.labels is not None:
        fields["labels"] = torch.tensor(rows.labels.tolist(), dtype=torch.float32)
    return Batch(**fields)


def plain_filled(batch: Batch, static_shape: StaticShape) -> Batch:
    """Pad the batch to exactly the static shape, by concatenation."""
    sizes = {"cu_seqlens": static_shape.sequences + 1}
    sizes |= dict.fromkeys(("next_sentence_labels", "labels"), static_shape.sequences)
    sizes |= dict.fromkeys(("masked_positions", "masked_labels"), static_shape.masked)
    fillers = {
        "cu_seqlens": batch.num_tokens,
        "masked_labels": IGNORED_LABEL,
        "next_sentence_labels": IGNORED_LABEL,
    }
    filled: dict[str, Any] = {"max_seqlen": static_shape.max_seqlen}
    for field in dataclasses.fields(Batch):
        tensor = getattr(batch, field.name)
        if isinstance(tensor, torch.Tensor):
            missing = sizes.get(field.name, static_shape.tokens) - tensor.numel()
            filled[field.name] = torch.cat(
                [tensor, tensor.new_full((missing,), fillers.get(field.name, 0))]
            )
    return Batch(**filled)


def filled(batch: HostBatch, static_shape: StaticShape) -> Batch:
    """Pad the batch to the static shape, as training does."""
    target = static_shape.allocate("cpu")
    static_shape.write(batch, target)
    return target


def same(found: Batch, expected: Batch) -> str:
    """Return the first field that differs in value or type, or "" if all are equal."""
    for field in dataclasses.fields(Batch):
        one = getattr(found, field.name)
        other = getattr(expected, field.name)
        tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        if not (
            one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
            if tensors
            else one == other
        ):
            return field.name
    return ""


def assert_same(found: Batch, expected: Batch) -> None:
    assert same(found, expected) == ""


def numbers(batch: HostBatch) -> list[int]:
    """Return the numbers of the sequences (see random_set)."""
    parts = batch.arrays()
    return parts["ids"][parts["cu_seqlens"][:-1] + 1].tolist()


def rows_of(host_batch: HostBatch) -> dict[int, tuple[int, ...]]:
    """Return all there is to know of each token: dropout row -> (token, segment, position, label or
    -1, length and next-sentence label of its sequence).
    """
    batch = host_batch.to("cpu")
    labels = torch.full_like(batch.input_ids, -1)
    labels[batch.masked_positions] = batch.masked_labels
    lengths = torch.diff(batch.cu_seqlens)
    of_sequence = (
        values.repeat_interleave(lengths) for values in (lengths, batch.next_sentence_labels)
    )
    columns = (batch.input_ids, batch.segment_ids, batch.position_ids, labels, *of_sequence)
    return dict(
        zip(
            batch.dropout_rows.tolist(),
            zip(*(c.tolist() for c in columns), strict=True),
            strict=True,
        )
    )


def tokens_of(batch: HostBatch) -> list[bytes]:
    parts = batch.arrays()
    return [piece.tobytes() for piece in np.split(parts["ids"], parts["cu_seqlens"][1:-1])]
