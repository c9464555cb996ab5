"""Plan the time, disk and memory of `mlbert.data.prepare.token_set`: both passes are tried on a
sample, which is extrapolated by the bytes on disk.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlbert.data.formats.manifest import reading
from mlbert.data.formats.tokenizer import write_tokenizer
from mlbert.data.prepare.corpus_files import PLAIN_SUFFIXES, UTF8, CorpusSource
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.readable_sources import piece_size, read_texts, together
from mlbert.data.prepare.token_chunks import (
    CHUNK_CHARACTERS,
    MOST_ENCODERS,
    TOGETHER,
    ChunkStore,
    Encoded,
    TextCounts,
    encoding,
)
from mlbert.data.prepare.token_set import (
    BASELINE_TOKENS,
    TokenRequest,
    num_writers,
    try_shard,
)
from mlbert.host.errors import UserError
from mlbert.host.process_memory import descendants_of, memory_of

PIECES_A_WORKER = 8  # of `TOGETHER` bytes in the sample
MOST_FILES = 64  # of the sample
SLICES = 8  # of a large file
LEAST_SLICE = 1 << 16  # bytes
_SLICED = (*PLAIN_SUFFIXES, ".jsonl")  # files whose lines can be read from anywhere
_ROW_BYTES = 44  # of a sample in a shard, besides its ids: offsets, sizes, id, len
# Of a token of a chunk in `Neighbors`: its id, its pair, and two copies of the pairs to sort them,
# each int64.
_COUNTED_BYTES = 32
_SHARED_BYTES = 25_000_000  # of the writers, and of the processes that start them
_WRITER_BYTES = 8_000_000  # of a writer alone, without a chunk
_LAST_SECONDS = 6.0  # for the held-out text, the baselines and the tokenizer
_MAXRSS_UNIT = 1024  # bytes


@dataclass(frozen=True)
class SetPlan:
    """What a preparation takes.

    Attributes:
        tried_bytes: on disk, of the sample.
        rate: bytes on disk per second, of all processes.
        workers: processes.
        bytes_per_token: on disk.
        tokens: of all text, with repeats.
        seconds: of the preparation.
        disk, peak_disk: bytes of the output, and together with the work folder.
        memory: bytes of all processes, with a page that several share once.
        is_compressed: some files are.
    """

    tried_bytes: int
    rate: float
    workers: int
    bytes_per_token: float
    tokens: float
    seconds: float
    disk: float
    peak_disk: float
    memory: float
    is_compressed: bool


def plan_tokens(request: TokenRequest, executor: Executor) -> SetPlan:
    """Try a sample of the text, and plan for all of it.

    Raises UserError if the sample cannot be read, or has no text.
    """
    workers = max(1, min(executor.workers, MOST_ENCODERS))
    at_start = _peak_memory()
    with tempfile.TemporaryDirectory(prefix="mlbert-plan-") as scratch:
        folder = Path(scratch)
        sources = _sample(request.files, PIECES_A_WORKER * workers * TOGETHER, folder)
        tried = sum(source.num_bytes for source in sources)
        trial = _try_reading(request, sources, executor)
        memory = _peak_memory()
        chunks = ChunkStore(folder, request.tokenizer.dtype)
        chunks.write(chunks.name(0, 0), trial.chunk, [])
        started = time.monotonic()
        pieces = try_shard(request, chunks, chunks.name(0, 0))
        writing_seconds = time.monotonic() - started
        for_writing = _peak_memory() - memory
    # A chunk of the preparation is larger than that of the sample, unless there is no more text.
    larger = min(
        CHUNK_CHARACTERS / max(1, sum(one.counts.characters for one in trial.chunk)),
        request.num_bytes / tried * len(trial.counts) / len(trial.chunk),
    )
    tokens_of_chunk = sum(one.counts.tokens for one in trial.chunk)
    tried_tokens = sum(one.tokens for one in trial.counts)
    tokens = request.num_bytes * tried_tokens / tried
    rate = tried / trial.seconds
    width = request.tokenizer.dtype.itemsize
    stored = width * tokens
    framing = (_ROW_BYTES + 2 * width) * tokens * pieces / max(1, tokens_of_chunk)
    output = stored + framing + _tokenizer_bytes(request)
    seconds = trial.start_seconds + request.num_bytes / rate + _LAST_SECONDS
    writers = num_writers(executor)
    seconds += writing_seconds / max(1, tokens_of_chunk) * tokens / writers
    for_reading = larger * (memory - at_start)
    used = min(writers, round(tokens / max(1.0, larger * tokens_of_chunk)))
    of_writer = _WRITER_BYTES + larger * for_writing
    of_writers = _SHARED_BYTES + used * of_writer if used > 1 else 0.0
    # After the processes have ended.
    for_baselines = _COUNTED_BYTES * min(larger * tokens_of_chunk, BASELINE_TOKENS)
    return SetPlan(
        tried_bytes=tried,
        rate=rate,
        workers=workers,
        bytes_per_token=tried / max(1, tried_tokens),
        tokens=tokens,
        seconds=seconds,
        disk=output,
        peak_disk=output + stored,
        memory=at_start + for_reading + max(trial.memory, of_writers, for_baselines),
        is_compressed=any(source.is_compressed for source in request.files),
    )


@dataclass(frozen=True)
class _Trial:
    chunk: list[Encoded]  # the first one, or all of the sample
    counts: list[TextCounts]  # of the documents that a process gets at a time
    start_seconds: float  # until the first result
    seconds: float  # for all text, if the processes had been there
    memory: int  # bytes, most of the other processes


def _try_reading(
    request: TokenRequest, sources: Sequence[CorpusSource], executor: Executor
) -> _Trial:
    """Tokenize the sample as the first pass does."""
    workers = max(1, min(executor.workers, MOST_ENCODERS))
    chunk: list[Encoded] = []
    counts: list[TextCounts] = []
    times: list[float] = []
    memory = 0
    waiting: list[tuple[list[str], Encoded]] = []  # of a chunk, as in the first pass
    characters = 0  # of them
    started = time.monotonic()
    with encoding(executor, request.tokenizer, request.names_languages) as encode:
        read = read_texts(sources, piece_size(request.files), False)
        texts = together((text for _, text in read), TOGETHER)
        for some, encoded in encode(texts):
            counts.append(encoded.counts)
            times.append(time.monotonic())
            if workers > 1:
                memory = max(memory, memory_of(descendants_of(os.getpid())).pss)
            waiting.append((some, encoded))
            characters += encoded.counts.characters
            if characters >= CHUNK_CHARACTERS:
                chunk = chunk or [one for _, one in waiting]
                waiting = []
                characters = 0
    chunk = chunk or [one for _, one in waiting]
    if not chunk:
        raise UserError("data.empty", "the text", "has no document", "Give text")
    # The first results of each process also waited for its start.
    skipped = min(workers, len(counts) - 1)
    if skipped == 0:
        return _Trial(chunk, counts, 0.0, max(1e-3, times[-1] - started), memory)
    begin = times[skipped - 1]
    later = sum(one.num_bytes for one in counts[skipped:])
    total = sum(one.num_bytes for one in counts)
    seconds = max(1e-3, (times[-1] - begin) * total / max(1, later))
    return _Trial(chunk, counts, times[0] - started, seconds, memory)


def _tokenizer_bytes(request: TokenRequest) -> int:
    """Return the bytes of the tokenizer's files, which are copied to the output."""
    with tempfile.TemporaryDirectory(prefix="mlbert-plan-") as folder:
        write_tokenizer(request.tokenizer, Path(folder))
        return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def _peak_memory() -> int:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT


def _sample(files: Sequence[CorpusSource], size: int, folder: Path) -> list[CorpusSource]:
    """Return files with about ``size`` bytes of text: parts of some of them, copied to a folder,
    and compressed ones as they are.
    """
    if sum(file.num_bytes for file in files) <= size:
        return [*files]
    step = -(-len(files) // MOST_FILES)
    chosen = files[::step]
    of_chosen = sum(file.num_bytes for file in chosen)
    smallest = min(
        (file for file in files if file.is_compressed),
        key=lambda file: file.num_bytes,
        default=None,
    )
    found = [] if smallest is None else [smallest]
    for number, file in enumerate(chosen):
        wanted = max(LEAST_SLICE, size * file.num_bytes // of_chosen)
        if not file.is_compressed:
            place = folder / f"{number}{file.suffix}"
            found.append(_copied(file, wanted, place))
    return found


def _copied(file: CorpusSource, wanted: int, place: Path) -> CorpusSource:
    """Copy about ``wanted`` bytes of full lines of a file."""
    can_slice = file.suffix in _SLICED and file.encoding == UTF8
    slices = max(1, min(SLICES, wanted // LEAST_SLICE)) if can_slice else 1
    if file.num_bytes <= wanted:
        slices = 1
    with reading(file.path), file.path.open("rb") as given, place.open("wb") as copy:
        for number in range(slices):
            given.seek(number * file.num_bytes // slices)
            if number:
                given.readline()  # the rest of a line
            copy.write(given.read(wanted // slices))
            if given.tell() < file.num_bytes:
                copy.write(given.readline())
    return replace(file, path=place, num_bytes=place.stat().st_size)
