"""Plan the time, disk and memory of `mlbert.data.prepare.token_set`: both passes are tried on a
sample, which is extrapolated by the bytes on disk.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mlbert.data.formats.manifest import reading
from mlbert.data.formats.tokenizer import write_tokenizer
from mlbert.data.prepare.corpus_files import PLAIN_SUFFIXES, UTF8, CorpusSource
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.readable_sources import piece_size, read_texts, together
from mlbert.data.prepare.token_chunks import (
    CHUNK_CHARACTERS,
    TOGETHER,
    ChunkStore,
    Encoded,
    encode_documents,
)
from mlbert.data.prepare.token_set import BASELINE_TOKENS, TokenRequest, try_shard
from mlbert.host.errors import UserError

PIECES_A_WORKER = 8  # of `TOGETHER` bytes in the sample
MOST_FILES = 64  # of the sample
SLICES = 8  # of a large file
LEAST_SLICE = 1 << 16  # bytes
_SLICED = (*PLAIN_SUFFIXES, ".jsonl")  # files whose lines can be read from anywhere
_ROW_BYTES = 44  # of a sample in a shard, besides its ids: offsets, sizes, id, len
# Of a token of a chunk in `Neighbors`: its id, its pair, and two copies of the pairs to sort them,
# each int64.
_COUNTED_BYTES = 32
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
        memory: bytes of all processes.
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
    workers = max(1, executor.workers)
    at_start = _peak_memory(resource.RUSAGE_SELF)
    with tempfile.TemporaryDirectory(prefix="mlbert-plan-") as scratch:
        folder = Path(scratch)
        sources = _sample(request.files, PIECES_A_WORKER * workers * TOGETHER, folder)
        tried = sum(source.num_bytes for source in sources)
        trial = _try_reading(request, sources, executor)
        memory = _peak_memory(resource.RUSAGE_SELF)
        of_worker = _peak_memory(resource.RUSAGE_CHILDREN) if workers > 1 else 0
        chunks = ChunkStore(folder, request.tokenizer.dtype)
        part = _one_chunk(trial.parts)
        chunks.write(chunks.name(0, 0), part, [])
        started = time.monotonic()
        pieces = try_shard(request, chunks, chunks.name(0, 0))
        writing_seconds = time.monotonic() - started
        for_writing = _peak_memory(resource.RUSAGE_SELF) - memory
    # A chunk of the preparation is larger than that of the sample, unless there is no more text.
    larger = min(
        CHUNK_CHARACTERS / max(1, sum(one.counts.characters for one in part)),
        request.num_bytes / tried * len(trial.parts) / len(part),
    )
    tokens_of_part = sum(one.counts.tokens for one in part)
    tried_tokens = sum(one.counts.tokens for one in trial.parts)
    tokens = request.num_bytes * tried_tokens / tried
    rate = tried / trial.seconds
    width = request.tokenizer.dtype.itemsize
    stored = width * tokens
    framing = (_ROW_BYTES + 2 * width) * tokens * pieces / max(1, tokens_of_part)
    output = stored + framing + _tokenizer_bytes(request)
    seconds = trial.start_seconds + request.num_bytes / rate + _LAST_SECONDS
    seconds += writing_seconds / max(1, tokens_of_part) * tokens / workers
    used = min(workers, max(1, request.num_bytes // TOGETHER))
    for_reading = larger * (memory - at_start)
    of_processes = used * (of_worker + larger * for_writing) if workers > 1 else 0.0
    # After the processes have ended.
    for_baselines = _COUNTED_BYTES * min(larger * tokens_of_part, BASELINE_TOKENS)
    return SetPlan(
        tried_bytes=tried,
        rate=rate,
        workers=workers,
        bytes_per_token=tried / max(1, tried_tokens),
        tokens=tokens,
        seconds=seconds,
        disk=output,
        peak_disk=output + stored,
        memory=at_start + for_reading + max(of_processes, for_baselines),
        is_compressed=any(source.is_compressed for source in request.files),
    )


@dataclass(frozen=True)
class _Trial:
    parts: list[Encoded]
    start_seconds: float  # until the first result
    seconds: float  # for all text, if the processes had been there


def _try_reading(
    request: TokenRequest, sources: Sequence[CorpusSource], executor: Executor
) -> _Trial:
    """Tokenize the sample as the first pass does."""
    workers = max(1, executor.workers)
    parts: list[Encoded] = []
    times: list[float] = []
    waiting = []  # as the texts of a chunk, which count for the memory
    started = time.monotonic()
    encode_one = partial(encode_documents, request.tokenizer, request.names_languages)
    with executor.pool(encode_one, "the text") as encode:
        read = read_texts(sources, piece_size(request.files), False)
        texts = together((text for _, text in read), TOGETHER)
        for some, encoded in encode(texts):
            waiting.append(some)
            parts.append(encoded)
            times.append(time.monotonic())
    if not parts:
        raise UserError("data.empty", "the text", "has no document", "Give text")
    # The first results of each process also waited for its start.
    skipped = min(workers, len(parts) - 1)
    if skipped == 0:
        return _Trial(parts, 0.0, max(1e-3, times[-1] - started))
    begin = times[skipped - 1]
    later = sum(one.counts.num_bytes for one in parts[skipped:])
    total = sum(one.counts.num_bytes for one in parts)
    seconds = max(1e-3, (times[-1] - begin) * total / max(1, later))
    return _Trial(parts, times[0] - started, seconds)


def _one_chunk(parts: Sequence[Encoded]) -> list[Encoded]:
    found = []
    characters = 0
    for part in parts:
        found.append(part)
        characters += part.counts.characters
        if characters >= CHUNK_CHARACTERS:
            break
    return found


def _tokenizer_bytes(request: TokenRequest) -> int:
    """Return the bytes of the tokenizer's files, which are copied to the output."""
    with tempfile.TemporaryDirectory(prefix="mlbert-plan-") as folder:
        write_tokenizer(request.tokenizer, Path(folder))
        return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def _peak_memory(who: int) -> int:
    """Return the peak memory of this process, or of the largest of those that it waited for."""
    return resource.getrusage(who).ru_maxrss * _MAXRSS_UNIT


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
