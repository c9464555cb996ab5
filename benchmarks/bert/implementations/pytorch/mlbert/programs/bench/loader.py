"""Time the loader of token ids, ours against others, in one run and in turns.

All sides read the same documents, mask 30 % of the tokens, and hand over batches on the device.

mlbert              the training loader: cuts long documents, packs, masks, builds the compact batch
                    and expands it on the device
mosaicml-streaming  `StreamingDataset` and its `StreamingDataLoader`; documents are cut off at the
                    maximum length, as the research repository of ModernBERT does
pytorch             `torch.utils.data.DataLoader`; the documents, already cut into pieces, are in
                    memory

The last two use transformers' `DataCollatorForLanguageModeling`, which pads. Only tokens of text
count. Every process of a side runs on the same cores.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlbert.data.formats.mds import MdsWriter
from mlbert.data.formats.ragged import ids_dtype
from mlbert.data.formats.streams import streams_of
from mlbert.data.formats.token_shards import (
    INPUT_IDS,
    TokenShards,
    describe_text,
    open_texts,
)
from mlbert.data.formats.tokenizer import Tokenizer, load_tokenizer
from mlbert.data.loading.masked_text import SPLIT, TextSet, TextSource
from mlbert.data.loading.source import PREFETCHED_STEPS
from mlbert.data.loading.text_lanes import Pieces
from mlbert.host.errors import UserError
from mlbert.host.progress import Progress

ROWS = 96  # of a batch
RATE = 0.3  # of the tokens are masked
MADE_TOKENS = 8_000_000  # of the set that is made
MEAN_LENGTH = 700  # tokens of a made document, about; the lengths are log-normal
LEAST_LENGTH = 16  # tokens
MOST_LENGTH = 8192  # tokens
FIRST_WORD = 1000  # lower ids are special, unused or letters
TOKENIZER = "bert-base-uncased"
SEQUENCES_PER_ROW = 128  # at most, on average over a batch
LOADED_PIECES = 100_000  # pieces that the side "pytorch" has in memory, at most
INSTALL_STREAMING = "pip install mosaicml-streaming"
INSTALL_TRANSFORMERS = "pip install transformers"


@dataclass(frozen=True)
class LoaderSide:
    """One side of the comparison.

    Attributes:
        batches: yields the tokens of text and the slots of one batch after the other, each on the
            device.
        ahead: batches that may have been made before a turn begins; they are not timed.
        close: ends its threads and processes.
    """

    name: str
    batches: Iterator[tuple[int, int]]
    ahead: int
    close: Callable[[], None]


@dataclass(frozen=True)
class Task:
    """What every side does.

    Attributes:
        folder: MDS set with token ids.
        tokenizer: of the set.
        length: maximum tokens of a sequence.
        workers: processes that load for a peer besides its main one; threads of ours.
        device: where the batches go.
        seed: of order and masks.
    """

    folder: Path
    tokenizer: Tokenizer
    length: int
    workers: int
    device: torch.device
    seed: int


@dataclass(frozen=True)
class Turn:
    """One measured turn of a side."""

    tokens: int
    slots: int
    seconds: float
    cpu_seconds: float  # of this process, without worker processes


def run(
    data: Path | None,
    tokenizer: str | None,
    length: int,
    rounds: int,
    seconds: float,
    cores: int,
    device: torch.device,
    seed: int,
    progress: Progress,
) -> dict[str, Any]:
    """Run the benchmark and return a JSON-able record; rates in tokens of text per second.

    Args:
        data: MDS set with token ids; None makes one of random ids.
        tokenizer: of ``data``.
        length: maximum tokens of a sequence.
        rounds: measured turns of each side.
        seconds: of a turn.
        cores: CPU cores that this process and its children use.
        device: where the batches go.
        seed: of made data, order and masks.
        progress: receives a line for each round.

    Raises UserError if the set cannot be read.
    """
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:cores])
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(cores)
    load = os.getloadavg()[0]
    try:
        with tempfile.TemporaryDirectory(prefix="mlbert-loader-") as scratch:
            loaded = load_tokenizer(tokenizer or TOKENIZER)
            folder = data or write_documents(Path(scratch) / "set", loaded.vocab_size, seed)
            _check_size(folder, loaded)
            workers = cores if cores > 1 else 0
            task = Task(folder, loaded, length, workers, device, seed)
            sides, skipped = _sides(task)
            turns = _alternate(sides, rounds, seconds, progress)
    finally:
        torch.set_num_threads(torch_threads)
        os.sched_setaffinity(0, allowed)
    record: dict[str, Any] = {
        "data": "random ids" if data is None else str(data),
        "length": length,
        "rows": ROWS,
        "masking_rate": RATE,
        "cores": cores,
        "device": str(device),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "rounds": rounds,
        "turn_seconds": seconds,
        "load_average": {"before": load, "after": os.getloadavg()[0]},
        "sides": {name: _summary(of_side) for name, of_side in turns.items()},
        "skipped": skipped,
    }
    record["ratios"] = _ratios(record["sides"])
    return record


def _check_size(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise UserError if a set has fewer texts than a batch."""
    count = describe_text(streams_of("", None, folder), tokenizer).num_texts
    if count < ROWS:
        reason = f"has {count} texts, and a batch takes {ROWS}"
        raise UserError("data.too-small", folder, reason, "Give a larger set, or no --data")


def write_documents(
    folder: Path, vocab_size: int, seed: int, num_tokens: int = MADE_TOKENS
) -> Path:
    """Write an MDS set of random ids in documents of log-normal lengths.

    The ids are 16 bits wide if the vocabulary allows it, as in ModernBERT's research repository.
    """
    draw = np.random.default_rng(seed)
    columns = {INPUT_IDS: f"ndarray:{ids_dtype(vocab_size).name}", "len": "int"}
    written = 0
    with MdsWriter(folder, columns) as writer:
        while written < num_tokens:
            wanted = draw.lognormal(np.log(MEAN_LENGTH), 1.0)
            length = int(np.clip(wanted, LEAST_LENGTH, MOST_LENGTH))
            ids = draw.integers(FIRST_WORD, vocab_size, length)
            writer.write({INPUT_IDS: ids, "len": length})
            written += length
    return folder


def _sides(task: Task) -> tuple[list[LoaderSide], dict[str, str]]:
    """Return the sides that can run, ours first, and why the others cannot, by name."""
    sides = [_our_side(task)]
    skipped = {}
    peers = {
        "mosaicml-streaming": (_streaming_side, INSTALL_STREAMING),
        "pytorch": (_pytorch_side, INSTALL_TRANSFORMERS),
    }
    for name, (make, install) in peers.items():
        try:
            sides.append(make(task))
        except (ImportError, RuntimeError) as error:  # or a library of it does not fit torch's
            first_line = str(error).partition("\n")[0]
            skipped[name] = f"{first_line}; install it with: {install}"
    return sides, skipped


def _our_side(task: Task) -> LoaderSide:
    texts = TextSet(streams_of("", None, task.folder), task.tokenizer, task.length, SPLIT)
    source = TextSource(
        texts,
        sequences_per_step=ROWS,
        packed=SEQUENCES_PER_ROW,
        shuffle="py1s",
        shuffle_seed=task.seed,
        canonical_nodes=1,
        rate=lambda step: RATE,
        seed=task.seed,
        threads=max(task.workers, 1),
    )
    source.open()

    def batches() -> Iterator[tuple[int, int]]:
        while True:
            for batch in source.next_step():
                batch.to(task.device)
                _wait_for(task.device)
                yield batch.num_tokens, ROWS * task.length

    return LoaderSide("mlbert", batches(), PREFETCHED_STEPS + task.workers + 1, source.close)


def _streaming_side(task: Task) -> LoaderSide:
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(
        local=str(task.folder),
        shuffle=True,
        shuffle_seed=task.seed,
        num_canonical_nodes=1,
        batch_size=ROWS,
    )
    collate = _collator(task)

    def cut(samples: list[dict[str, Any]]) -> Any:
        return collate([sample[INPUT_IDS][: task.length].astype(np.int64) for sample in samples])

    loader = StreamingDataLoader(
        dataset, batch_size=ROWS, num_workers=task.workers, collate_fn=cut, drop_last=True
    )
    return _peer("mosaicml-streaming", loader, task)


def _pytorch_side(task: Task) -> LoaderSide:
    pieces = _pieces_in_memory(task)
    loader: torch.utils.data.DataLoader = torch.utils.data.DataLoader(
        pieces,  # type: ignore[arg-type]
        batch_size=ROWS,
        shuffle=True,
        num_workers=task.workers,
        collate_fn=_collator(task),
        drop_last=True,
    )
    return _peer("pytorch", loader, task)


def _pieces_in_memory(task: Task) -> list[np.ndarray]:
    """Return the first pieces of the documents, int64 [tokens] each."""
    readers = open_texts(streams_of("", None, task.folder), task.tokenizer)
    pieces = Pieces(TokenShards(readers, task.tokenizer), task.tokenizer, task.length)
    counts = pieces.all_counts()
    texts = np.repeat(np.arange(len(counts)), counts)[:LOADED_PIECES]
    numbers = np.concatenate([np.arange(count) for count in counts.tolist()])[:LOADED_PIECES]
    tokens, offsets = pieces.rows(texts, numbers)
    return np.split(tokens.astype(np.int64), offsets[1:-1])


def _collator(task: Task) -> Callable[[list[np.ndarray]], Any]:
    """Return transformers' collator for masked language modeling as a function of the ids."""
    import transformers
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.models import WordLevel

    tokenizer = task.tokenizer
    names = {number: entry for entry, number in tokenizer.vocabulary.items()}
    # The collator only asks for special ids and the size of the vocabulary.
    vocabulary = WordLevel(dict(tokenizer.vocabulary), unk_token=tokenizer.mask_token)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=FastTokenizer(vocabulary),
        pad_token=names[tokenizer.pad_id],
        cls_token=names[tokenizer.cls_id],
        sep_token=names[tokenizer.sep_id],
        mask_token=tokenizer.mask_token,
    )
    collate = transformers.DataCollatorForLanguageModeling(fast, mlm_probability=RATE)
    is_special = np.zeros(tokenizer.vocab_size, np.int64)
    is_special[list(tokenizer.special_ids)] = 1

    def of_ids(texts: list[np.ndarray]) -> Any:
        # Without a mask of the special tokens, the collator looks each token up in Python.
        samples = [
            {
                "input_ids": torch.from_numpy(ids),
                "special_tokens_mask": torch.from_numpy(is_special[ids]),
            }
            for ids in texts
        ]
        return collate(samples)

    return of_ids


def _peer(name: str, loader: Any, task: Task) -> LoaderSide:
    """Return a side that goes through a data loader again and again."""

    def batches() -> Iterator[tuple[int, int]]:
        while True:
            for batch in loader:
                moved = {key: value.to(task.device) for key, value in batch.items()}
                _wait_for(task.device)
                yield int(batch["attention_mask"].sum()), moved["input_ids"].numel()

    return LoaderSide(name, batches(), 2 * task.workers, lambda: None)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _alternate(
    sides: list[LoaderSide], rounds: int, seconds: float, progress: Progress
) -> dict[str, list[Turn]]:
    """Measure the sides in turns, after one turn each that does not count."""
    turns: dict[str, list[Turn]] = {side.name: [] for side in sides}
    try:
        for number in range(rounds + 1):
            for side in sides:
                turn = _turn(side, seconds)
                if number:
                    turns[side.name].append(turn)
            if number:
                rates = [f"{name} {_rate(of_side[-1]):,.0f}" for name, of_side in turns.items()]
                progress(f"round {number} of {rounds}, tokens/s: {', '.join(rates)}")
    finally:
        for side in sides:
            side.close()
    return turns


def _turn(side: LoaderSide, seconds: float) -> Turn:
    for _ in range(side.ahead):
        next(side.batches)
    tokens = 0
    slots = 0
    began = time.perf_counter()
    cpu = time.process_time()
    elapsed = 0.0
    while elapsed < seconds:
        of_batch, slots_of_batch = next(side.batches)
        tokens += of_batch
        slots += slots_of_batch
        elapsed = time.perf_counter() - began
    return Turn(tokens, slots, elapsed, time.process_time() - cpu)


def _rate(turn: Turn) -> float:
    return turn.tokens / turn.seconds


def _summary(turns: list[Turn]) -> dict[str, Any]:
    rates = [_rate(turn) for turn in turns]
    return {
        "tokens_per_second": rates,
        "median_tokens_per_second": statistics.median(rates),
        "tokens_per_cpu_second": [turn.tokens / turn.cpu_seconds for turn in turns],
        "share_of_slots": sum(turn.tokens for turn in turns) / sum(turn.slots for turn in turns),
    }


def _ratios(sides: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return by name how many times as fast ours is: median, least and most over the rounds."""
    ratios = {}
    ours = sides["mlbert"]["tokens_per_second"]
    for name, side in sides.items():
        if name == "mlbert":
            continue
        of_rounds = [a / b for a, b in zip(ours, side["tokens_per_second"], strict=True)]
        ratios[name] = {
            "ratio": statistics.median(of_rounds),
            "least": min(of_rounds),
            "most": max(of_rounds),
        }
    return ratios
