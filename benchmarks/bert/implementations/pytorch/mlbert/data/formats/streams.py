"""Several MDS sets read as one: the "streams" of MosaicML Streaming,
with its weights and its resampling.

The weights say how many samples of each set an epoch has:

==========  ======================================================================
proportion  the set's part of the epoch, relative to the other sets' proportions
repeat      how often each of the set's samples occurs; may be a fraction
choose      number of samples
(none)      every sample once
==========  ======================================================================

Either all sets have a proportion, then an epoch is as long as all sets together, or none has. A set
of which an epoch needs more samples than it has repeats all of them before it repeats some; which
ones is drawn anew for each epoch.

Formulas: the documentation of MosaicML Streaming ("Mixing data sources") and its API reference,
version 0.13. The draws are those of ``numpy.random.default_rng``, in the same order.

Legend: F shards, N samples of an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from mlbert.data.formats.ragged import offsets_of
from mlbert.host.errors import UserError
from mlbert.host.json_files import parse_object
from mlbert.host.schema import Document, parse_model

WEIGHTS = ("proportion", "repeat", "choose")
_REMEDY = (
    "Give each stream a local folder, and proportion, repeat or choose: "
    "all of them proportion, or none"
)
_Weight = Annotated[float, Field(gt=0, le=1e9)]


class Stream(Document, extra="forbid"):
    """One of the sets, and its weight."""

    local: str  # folder on this machine
    # Path or URL that `local` is a copy of; None: `local` is the set itself.
    remote: str | None = None
    proportion: _Weight | None = None
    repeat: _Weight | None = None
    choose: Annotated[int, Field(ge=1, le=1 << 40)] | None = None

    @property
    def folder(self) -> Path:
        """`local` as a path."""
        return Path(self.local)

    @property
    def name(self) -> str:
        """The set's address, for messages."""
        return self.remote or self.local

    @property
    def weight(self) -> dict[str, float]:
        """The weight by its name; empty if there is none."""
        return self.model_dump(include={*WEIGHTS}, exclude_none=True)


class _Streams(Document):
    streams: Annotated[list[Stream], Field(min_length=1)]


def streams_of(
    subject: str, text: str | None, local: Path, remote: str | None = None
) -> Sequence[Stream]:
    """Return the streams of a JSON object {"streams": [...]}; without it, the set ``local``, a copy
    of ``remote``. Raises UserError, about ``subject``, if the streams are not valid.
    """
    if text is None:
        return [Stream(local=str(local), remote=remote)]
    streams = parse_model(
        _Streams, parse_object(subject, text.encode(), _REMEDY), subject, _REMEDY
    ).streams
    weights = [stream.weight for stream in streams]
    if max(map(len, weights)) > 1 or len({"proportion" in weight for weight in weights}) > 1:
        raise UserError(
            "config.conflict", subject, "has streams with weights that cannot be combined", _REMEDY
        )
    return streams


def samples_of_epoch(streams: Sequence[Stream], num_samples: Sequence[int], seed: int) -> list[int]:
    """Return the samples that each set gives to an epoch, from the number that it has."""
    if streams[0].proportion is None:
        sets = zip(streams, num_samples, strict=True)
        return [stream.choose or int((stream.repeat or 1) * number) for stream, number in sets]
    total = sum(num_samples)
    proportions = np.array([stream.proportion for stream in streams])
    samples = (total * (proportions / proportions.sum())).astype(np.int64)
    rounded_up = np.random.default_rng(seed).choice(
        len(streams), total - int(samples.sum()), replace=False
    )
    samples[rounded_up] += 1
    return samples.tolist()


@dataclass(frozen=True)
class Mixture:
    """Draws the samples of each epoch."""

    shard_sizes: Sequence[np.ndarray]  # for each set int64 [F], samples of its shards, 1 or more
    samples: Sequence[int]  # for each set, those that it gives to an epoch
    seed: int = 0  # of the draws
    is_shuffled: bool = True  # if the epoch is not, every one takes as many samples of each shard

    @property
    def num_samples(self) -> int:
        """Samples of an epoch (N)."""
        return sum(self.samples)

    @property
    def is_whole(self) -> bool:
        """Whether an epoch has every sample once."""
        return list(self.samples) == [int(sizes.sum()) for sizes in self.shard_sizes]

    def __call__(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what is shuffled like shards (int64, samples of each), and the samples themselves:
        int64 [N], counted over all sets.
        """
        generator = np.random.default_rng(self.seed + epoch)
        sizes = []
        samples = [np.empty(0, np.int64)]
        first = 0
        for shard_sizes, wanted in zip(self.shard_sizes, self.samples, strict=True):
            of_shards = self._of_shards(shard_sizes, wanted, epoch)
            for size, of_shard in zip(shard_sizes.tolist(), of_shards.tolist(), strict=True):
                repeats, rest = divmod(of_shard, size)
                sizes += [size] * repeats
                samples += [np.arange(first, first + size)] * repeats
                if rest:
                    sizes.append(rest)
                    samples.append(first + np.sort(generator.choice(size, rest, replace=False)))
                first += size
        return np.array(sizes, np.int64), np.concatenate(samples)

    def _of_shards(self, shard_sizes: np.ndarray, wanted: int, epoch: int) -> np.ndarray:
        """Return int64 [F], the samples that each shard of a set gives to an epoch."""
        total = int(shard_sizes.sum())
        repeats, rest = divmod(wanted, total)
        if not rest:
            return shard_sizes * repeats
        generator = np.random.default_rng(self.seed + epoch * self.is_shuffled)
        drawn = (
            np.searchsorted(
                offsets_of(shard_sizes), generator.permutation(total)[:rest], side="right"
            )
            - 1
        )
        return shard_sizes * repeats + np.bincount(drawn, minlength=len(shard_sizes))
