"""Open a data set as an iterable of batches, also for `torch.utils.data.DataLoader`.

    data = mlbert.open_dataset("my-model", batch_size=32)
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=2)

Batch n depends on the data, the settings and n alone. So each worker of a loader makes every
n-th batch, the loader returns them in order, and a position is a number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from mlbert.data.batches import Batch, HostBatch
from mlbert.data.formats.checksums import FileChecks
from mlbert.data.formats.mds import MdsReader
from mlbert.data.formats.open import describe
from mlbert.data.formats.order import contiguous
from mlbert.data.formats.streams import Stream
from mlbert.data.formats.token_shards import column_of
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.formats.tokenizer_files import find_vocabulary
from mlbert.data.loading.masked_text import SPLIT, TRUNCATE, TextEvalSet, TextSet, TextSource
from mlbert.data.loading.packed import PackedSource
from mlbert.data.loading.pretraining import EvalSet
from mlbert.data.loading.source import StepSource
from mlbert.data.prepare.custom_corpus import read_facts
from mlbert.host.errors import UserError, public_names
from mlbert.models.weights.huggingface import padded_inputs
from mlbert.programs.pretrain_rules import EVAL_MASK_RATE, MASK_RATE

MAX_LENGTH = 512  # tokens, of texts that are not cut yet
_INDEX = "index.json"  # of an MDS set
_TEXT = "text"  # the folder in that of a run of `mlbert pretrain` with its sets
# What messages call settings here.
_ARGUMENTS = {"BATCHSIZE": "batch_size", "TOKENIZER": "tokenizer", "EVAL_BATCH_SIZE": "batch_size"}
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class _TextArguments:
    """Arguments of `open_dataset` that only sets of texts have; None: not given."""

    tokenizer: str | Path | None
    max_length: int | None
    split_texts: bool | None
    masking_rate: float | None


@dataclass(frozen=True)
class _TextOptions:
    """How texts become sequences, and their masks."""

    tokenizer: Path
    max_length: int
    long_texts: str
    masking_rate: float
    always_mask: bool


@dataclass(frozen=True)
class _DataOptions:
    """Where batches come from; ``text`` is None for a set of stored sequences."""

    folder: Path
    batch_size: int
    sequences_per_pack: int
    seed: int
    rank: int
    world_size: int
    text: _TextOptions | None


@dataclass(frozen=True)
class OpenedBatches:
    """An opened set: the batch with a number (None after the last one), and what closes it."""

    batch_at: Callable[[int], Batch | None]
    close: Callable[[], object]


class BatchDataset(IterableDataset[Any]):
    """The batches of a data set; `mlbert.open_dataset` makes it.

    A set for training never ends, unless ``steps`` was given: an epoch follows another. One for
    evaluation has each sequence once.

    Give it to a `DataLoader` with ``batch_size=None``. The batches and their order are the same for
    any number of workers.
    """

    def __init__(
        self,
        open_batches: Callable[[int, int], OpenedBatches],
        identity: dict[str, Any],
        steps: int | None,
        form: Callable[[Batch], Any],
    ) -> None:
        super().__init__()
        self._open_batches = open_batches
        self._identity = identity
        self._steps = steps
        self._form = form
        self._first_step = 0

    @property
    def first_step(self) -> int:
        """The number of the batch with which an iteration begins; 0 before `load_state_dict`."""
        return self._first_step

    def __iter__(self) -> Iterator[Any]:
        """Iterate from `first_step`. Opens the files; raises UserError if one is damaged."""
        worker = get_worker_info()
        part = 0 if worker is None else worker.id
        parts = 1 if worker is None else worker.num_workers
        opened = self._open_batches(part, parts)
        step = self._first_step + part
        try:
            while self._steps is None or step < self._steps:
                batch = opened.batch_at(step)
                if batch is None:
                    return
                yield self._form(batch)
                step += parts
        finally:
            opened.close()

    def __len__(self) -> int:
        """Return the number of batches from `first_step` to ``steps``.

        Raises TypeError if the set does not end, or its end is known only when it is read.
        """
        if self._steps is None:
            raise TypeError("the number of batches is unknown: give steps to open_dataset")
        return max(self._steps - self._first_step, 0)

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the position after ``step`` batches, counted from the start of the training.

        A loader's workers read ahead, so only your loop knows how many batches it has used.
        """
        return {"step": step, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration at a position of `state_dict`.

        Raises UserError if it was saved with other data, another seed, or another batch size or
        number of ranks. A position in texts that are split is found by counting their sequences
        from the start.
        """
        for name, value in self._identity.items():
            if state.get(name) != value:
                reason = f"the position was saved with {name} {state.get(name)}, not {value}"
                remedy = "Open the data with the arguments with which it was saved"
                raise UserError("run.other-settings", "the data set's state", reason, remedy)
        self._first_step = int(state["step"])


def open_dataset(
    folder: str | Path,
    batch_size: int,
    *,
    evaluation: bool = False,
    padded: bool = False,
    steps: int | None = None,
    seed: int = 1,
    sequences_per_pack: int = 1,
    tokenizer: str | Path | None = None,
    max_length: int | None = None,
    split_texts: bool | None = None,
    masking_rate: float | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> BatchDataset:
    """Open a data set as an iterable of batches for masked-language modeling.

    Args:
        folder: a set of masked sequences in any format that `mlbert train` reads, an MDS set of
            texts or tokens, or the folder of `mlbert pretrain`, of which the training or the
            held-out text is opened.
        batch_size: sequences of a batch, on this rank; with packing, rows.
        evaluation: each sequence once, in the order of the set, with the same masks each time.
        padded: yield dictionaries for a model of transformers, int64 ``[sequences, longest]``:
            ``input_ids``, ``attention_mask`` and ``labels`` (-100 where nothing was masked), and
            ``token_type_ids`` and ``next_sentence_label`` of sets that have them. Otherwise yield
            `mlbert.data.batches.Batch`, without padding.
        steps: number of batches after which an iteration ends.
        seed: of the order and the masks.
        sequences_per_pack: pack up to so many sequences into a row of the longest sequence's
            length; of texts, on average over a batch.
        tokenizer: of a set of texts or tokens: its file or folder (default: the one next to
            the set).
        max_length: longest sequence of texts, in tokens (default: as `mlbert pretrain` cut them,
            else 512).
        split_texts: cut longer texts into several sequences, or take the start of each (default:
            cut, unless `mlbert pretrain` did).
        masking_rate: share of tokens to predict (default: 0.3, in evaluation 0.15). Sets of
            masked sequences have their own.
        rank, world_size: this process and their number (default: those of
            `torch.distributed`, if it is initialized).

    Returns:
        An `IterableDataset` with ``state_dict(step)`` and ``load_state_dict(state)``.

    Raises:
        UserError: there is no set, no tokenizer for it, too little data for a batch, or an
            argument that the set does not read.
    """
    if batch_size < 1:
        raise UserError(
            "config.range", f"batch_size {batch_size}", "is below 1", "Give a number of sequences"
        )
    with public_names(_ARGUMENTS):
        return _opened(
            Path(folder),
            batch_size,
            evaluation=evaluation,
            padded=padded,
            steps=steps,
            seed=seed,
            sequences_per_pack=sequences_per_pack,
            text_arguments=_TextArguments(tokenizer, max_length, split_texts, masking_rate),
            place=_place() if rank is None or world_size is None else (rank, world_size),
        )


def _opened(
    folder: Path,
    batch_size: int,
    *,
    evaluation: bool,
    padded: bool,
    steps: int | None,
    seed: int,
    sequences_per_pack: int,
    text_arguments: _TextArguments,
    place: tuple[int, int],
) -> BatchDataset:
    facts = read_facts(folder / _TEXT)
    if facts is not None:
        text_arguments = replace(
            text_arguments,
            max_length=text_arguments.max_length or int(facts.made_from["length"]),
            split_texts=bool(text_arguments.split_texts),
        )
        folder = folder / _TEXT / ("val" if evaluation else "train")
    text: _TextOptions | None = None
    if _is_text(folder):
        rate = EVAL_MASK_RATE if evaluation else MASK_RATE
        if text_arguments.masking_rate is not None:
            rate = text_arguments.masking_rate
        text = _TextOptions(
            tokenizer=_tokenizer_of(folder, text_arguments.tokenizer),
            max_length=text_arguments.max_length or MAX_LENGTH,
            long_texts=TRUNCATE if text_arguments.split_texts is False else SPLIT,
            masking_rate=rate,
            always_mask=evaluation and facts is not None,
        )
    else:
        for name, value in asdict(text_arguments).items():
            if value is not None:
                reason = f"is a set of masked sequences, which do not use {name}"
                raise UserError("config.conflict", folder, reason, f"Leave {name} out")
    rank, world_size = place
    options = _DataOptions(folder, batch_size, sequences_per_pack, seed, rank, world_size, text)
    form = functools.partial(_padded, has_segments=text is None) if padded else _unchanged
    if evaluation:
        identity = {"data": _evaluation_set(options).info.identity, "batch_size": batch_size}
        return BatchDataset(functools.partial(_open_evaluation, options), identity, steps, form)
    identity = dict(_source(options, 0, 1).identity)
    if text is not None:
        identity["masking_rate"] = text.masking_rate
    return BatchDataset(functools.partial(_open_training, options), identity, steps, form)


def _place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _is_text(folder: Path) -> bool:
    """Return whether a folder holds texts or tokens, of which masks are drawn when it is read."""
    if not (folder / _INDEX).is_file():
        return False
    return column_of(MdsReader(folder)) is not None


def _tokenizer_of(folder: Path, given: str | Path | None) -> Path:
    if given is not None:
        return Path(given)
    for place in (folder, folder.parent):
        if (found := find_vocabulary(place)).is_file():
            return found
    remedy = "Give the folder of the model that will read it, or its vocab.txt or tokenizer.json"
    raise UserError("config.missing", "tokenizer", f"is not given, nor is one at {folder}", remedy)


def _texts(options: _DataOptions, text: _TextOptions) -> TextSet:
    streams = [Stream(local=str(options.folder))]
    tokenizer = load_tokenizer(text.tokenizer)
    return TextSet(streams, tokenizer, text.max_length, text.long_texts)


def _source(options: _DataOptions, part: int, parts: int) -> StepSource:
    """Return the training steps; of ``parts`` processes with the same ones, this is ``part``."""
    text = options.text
    if text is None:
        return PackedSource(
            options.folder,
            packs_per_step=options.batch_size,
            max_sequences_per_pack=options.sequences_per_pack,
            seed=options.seed,
            rank=options.rank,
            world_size=options.world_size,
            partition=contiguous,
            checks=FileChecks(part, parts),
        )
    masking_rate = text.masking_rate
    return TextSource(
        _texts(options, text),
        sequences_per_step=options.batch_size,
        packed=options.sequences_per_pack,
        shuffle="py1s",
        shuffle_seed=options.seed,
        canonical_nodes=1,
        rate=lambda step: masking_rate,
        seed=options.seed,
        rank=options.rank,
        world_size=options.world_size,
    )


def _open_training(options: _DataOptions, part: int, parts: int) -> OpenedBatches:
    source = _source(options, part, parts)
    source.locks_pages = False  # a loader's worker must not use CUDA, and the loader pins memory
    source.open()

    def batch_at(step: int) -> Batch:
        (batch,) = source.batches_of(step)
        return batch.to(_CPU)

    return OpenedBatches(batch_at, source.close)


def _evaluation_set(options: _DataOptions) -> EvalSet | TextEvalSet:
    text = options.text
    if text is not None:
        return TextEvalSet(
            _texts(options, text),
            None,
            options.batch_size,
            rate=text.masking_rate,
            seed=0,
            always_mask=text.always_mask,
            rank=options.rank,
            world_size=options.world_size,
        )
    num_sequences = describe(options.folder).num_sequences
    if num_sequences is None:
        reason = "does not record how many sequences it has"
        remedy = "Import it with `mlbert prepare import`"
        raise UserError("data.unsupported", options.folder, reason, remedy)
    return EvalSet(
        options.folder,
        num_sequences,
        options.batch_size,
        max_sequences_per_pack=options.sequences_per_pack,
        rank=options.rank,
        world_size=options.world_size,
    )


def _open_evaluation(options: _DataOptions, part: int, parts: int) -> OpenedBatches:
    samples = _evaluation_set(options)
    samples.open()
    batches: list[HostBatch] = list(samples)

    def batch_at(step: int) -> Batch | None:
        return batches[step].to(_CPU) if step < len(batches) else None

    return OpenedBatches(batch_at, batches.clear)


def _unchanged(batch: Batch) -> Batch:
    return batch


def _padded(batch: Batch, has_segments: bool) -> dict[str, Tensor]:
    inputs = padded_inputs(batch)
    if not has_segments:
        del inputs["token_type_ids"]
        del inputs["next_sentence_label"]
    return inputs
