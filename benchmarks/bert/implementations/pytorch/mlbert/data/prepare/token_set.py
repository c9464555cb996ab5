"""Prepare text at size: documents of many files to sets of token ids, ready for training.

    OUT/train/, val/                      MDS sets; a sample is a piece of one document with its
                                          special tokens, at most ``length`` tokens, in the columns
                                          of ModernBERT's research repository
    OUT/train/SOURCE/                     instead of train/, if sources have proportions
    OUT/tokenizer.json or vocab.txt, …    the tokenizer
    OUT/text.json                         written last: counts, baselines, example sentences

Two passes of independent tasks (`mlbert.data.prepare.step_tasks`) in constant memory. The first
reads and tokenizes (`mlbert.data.prepare.token_chunks`), the second writes a shard for each chunk,
without documents that repeat earlier ones, held-out documents, and documents that nearly repeat
these. Nothing is cut off: a long document becomes several samples.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlbert.data.formats.mds import MdsWriter, write_index
from mlbert.data.formats.mds_files import INDEX
from mlbert.data.formats.ragged import offsets_of
from mlbert.data.formats.token_shards import (
    vocabulary_sha256,
    whole_text_columns,
    whole_text_row,
)
from mlbert.data.formats.tokenizer import Tokenizer, write_tokenizer
from mlbert.data.prepare.baselines import Neighbors
from mlbert.data.prepare.corpus_files import CorpusSource, documents
from mlbert.data.prepare.corpus_sequences import (
    DocumentFrame,
    choose_sentences,
    nearly_repeated,
    run_hashes,
)
from mlbert.data.prepare.custom_corpus import (
    MOST_PAIRS,
    Facts,
    held_out_size,
    mask_samples,
    new_held_out,
    read_facts,
    write_facts,
)
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.finished_output import WORK_FOLDER
from mlbert.data.prepare.held_out import HeldOut
from mlbert.data.prepare.kept_documents import first_of_each
from mlbert.data.prepare.readable_sources import piece_size
from mlbert.data.prepare.step_tasks import INPUTS, StepTasks
from mlbert.data.prepare.text_measures import script_words
from mlbert.data.prepare.token_chunks import (
    ChunkStore,
    Group,
    GroupReader,
    TextCounts,
    encoding,
)
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain, write_atomically, writing
from mlbert.host.progress import Progress

TRAIN = "train"
VAL = "val"
GROUP_BYTES = 1 << 30  # of files that one task reads
LEAST_HELD_OUT = 2000  # tokens
_SHARD_BYTES = 1 << 30  # more than a chunk has: a shard for each
_MOST_WRITERS = 16  # processes of the second pass, a twentieth of the work; each takes a chunk
_COMPARED = 1 << 18  # tokens compared with the held-out text at a time
BASELINE_TOKENS = 8_000_000  # of the first documents, in which the baselines are counted
_UNSAFE = re.compile(r"[^\w.-]+")  # in the name of a folder
_TRIED_RUNS = 100_000  # of held-out tokens, in a plan
# Files in the work folder.
_CHOICE = "choice.json"
_KEPT = "kept"  # a byte for each document
_KNOWN = "known"  # sorted hashes of runs of held-out tokens, uint64


@dataclass(frozen=True)
class TokenRequest:
    """What to prepare.

    Attributes:
        sources: files with text, by the name of their source.
        tokenizer: of the ids.
        length: most tokens of a sample, with special ones.
        eval_rate: probability of masking a held-out token, as in the evaluations of training.
        proportions: of the tokens that each source gives to training, by name; empty to take all.
        held_out: text to hold out; without any, a part of ``sources``.
        names_languages: count the languages of the documents.
    """

    sources: Mapping[str, Sequence[CorpusSource]]
    tokenizer: Tokenizer
    length: int
    eval_rate: float
    proportions: Mapping[str, float] = field(default_factory=dict)
    held_out: Sequence[CorpusSource] = ()
    names_languages: bool = False

    @property
    def files(self) -> list[CorpusSource]:
        """Files of all sources."""
        return [file for files in self.sources.values() for file in files]

    @property
    def num_bytes(self) -> int:
        """Bytes of all sources on disk."""
        return sum(file.num_bytes for file in self.files)

    @property
    def set_folders(self) -> dict[str, str]:
        """The folder, below the output, of the training set with each source."""
        if not self.proportions:
            return dict.fromkeys(self.sources, TRAIN)
        return {
            name: f"{TRAIN}/{number}-{_UNSAFE.sub('_', Path(name).name)}"
            for number, name in enumerate(self.sources)
        }

    def groups(self) -> list[Group]:
        """Return the groups that the first pass reads."""
        found: list[Group] = []
        for name, files in self.sources.items():
            some: list[CorpusSource] = []
            for file in files:
                some.append(file)
                if sum(one.num_bytes for one in some) >= GROUP_BYTES:
                    found.append(Group(len(found), name, tuple(some)))
                    some = []
            if some:
                found.append(Group(len(found), name, tuple(some)))
        return found

    def plan(self) -> dict[str, Any]:
        """Return a JSON-able description; equal ones give equal sets."""
        return {
            "form": "tokens",
            "tokenizer": self.tokenizer.identity,
            "length": self.length,
            "eval_rate": self.eval_rate,
            "proportions": dict(self.proportions),
            "held out": [file.identity for file in self.held_out],
            "reading": [[file.column, file.encoding] for file in self.files],
            "sources": [[name, len(files)] for name, files in self.sources.items()],
            INPUTS: [file.identity[:3] for file in self.files],
            **({"languages": True} if self.names_languages else {}),
        }


@dataclass
class SourceSummary:
    """What became of the text of one source.

    Attributes:
        counts: of the text that was read.
        kept: documents to train on.
        pieces: samples that they became.
        tokens: of the samples, without special ones.
        cut: documents longer than a sample.
        near: tokens of documents that nearly repeat held-out text.
    """

    counts: TextCounts = field(default_factory=TextCounts)
    kept: int = 0
    pieces: int = 0
    tokens: int = 0
    cut: int = 0
    near: int = 0

    @property
    def dropped_share(self) -> float:
        """Documents among all that are not trained on."""
        return 1 - self.kept / max(1, self.counts.documents)

    @property
    def cut_share(self) -> float:
        """Documents among those to train on that became several samples."""
        return self.cut / max(1, self.kept)


@dataclass(frozen=True)
class PreparedTokens:
    """A finished set: what `mlbert pretrain` reads of it, and each source by name."""

    facts: Facts
    sources: dict[str, SourceSummary]


def prepare_tokens(
    request: TokenRequest, out: Path, executor: Executor = Executor()
) -> PreparedTokens | None:
    """Prepare text, unless it is finished: then return None.

    Raises UserError: the folder holds something else, text cannot be read, or there is too little.
    """
    plan: dict[str, Any] = json.loads(json.dumps(request.plan()))
    done = read_facts(out)
    if done is not None and done.made_from == plan:
        executor.progress(f"{out} is finished with these options: nothing to do")
        return None
    _check_place(out)
    # The first pass divides a group among the processes itself.
    reading = StepTasks(out, plan, replace(executor, workers=1, progress=Progress()))
    chunks = ChunkStore(reading.folder, request.tokenizer.dtype)
    groups = request.groups()
    counts = _read_groups(request, groups, chunks, reading, executor)
    places = _places(request, groups, counts, chunks)
    choice = _Choice.of(request, places, chunks)
    tasks = StepTasks(out, plan, replace(executor, workers=num_writers(executor)))
    writer = _ShardWriter(chunks, request.tokenizer, request.length, choice)
    written = tasks.run(
        "writing", writer.write, places, [one.tokens for one in places], unit="tokens", keep=True
    )
    summaries = _summaries(request, places, written, chunks)
    held_out = _held_out_samples(request, choice)
    if not any(summary.pieces for summary in summaries.values()):
        raise _too_little("repeats itself: no text is left to train on")
    _complete_sets(request, out, tasks.folder, places, written)
    _write_val(request, out, held_out)
    write_tokenizer(request.tokenizer, out)
    facts = _facts(request, places, chunks, choice, summaries, held_out, plan)
    write_facts(facts, out)
    tasks.finish()
    return PreparedTokens(facts, summaries)


def num_writers(executor: Executor) -> int:
    """Return the number of processes of the second pass."""
    return max(1, min(executor.workers, _MOST_WRITERS))


def _check_place(out: Path) -> None:
    """Raise UserError if the folder holds something that is not an unfinished preparation."""
    known = {WORK_FOLDER, TRAIN, VAL}
    if out.is_dir() and not (out / WORK_FOLDER).is_dir() and any(out.iterdir()):
        remedy = "Choose another --out, or remove it"
        raise UserError("file.in-the-way", out, "contains something else", remedy)
    if out.is_dir() and {path.name for path in out.iterdir() if path.is_dir()} - known:
        remedy = "Choose another --out"
        raise UserError("file.in-the-way", out, "contains other folders", remedy)


def _read_groups(
    request: TokenRequest,
    groups: Sequence[Group],
    chunks: ChunkStore,
    reading: StepTasks,
    executor: Executor,
) -> list[int]:
    """Run the first pass; return the number of chunks of each group."""
    with (
        executor.progress.task("tokenizing", request.num_bytes, "bytes") as advance,
        encoding(executor, request.tokenizer, request.names_languages) as encode,
    ):
        reader = GroupReader(chunks, encode, piece_size(request.files), advance)
        sizes = [group.num_bytes for group in groups]
        return reading.run("reading", reader.read, groups, sizes, is_last=False, keep=True)


@dataclass(frozen=True)
class _Place:
    """A chunk, its shard, and where its documents are among all."""

    name: str
    source: str
    folder: str  # of its set, below the output
    shard: int  # number in its set
    first: int  # document
    documents: int
    tokens: int


def _places(
    request: TokenRequest, groups: Sequence[Group], counts: Sequence[int], chunks: ChunkStore
) -> list[_Place]:
    found: list[_Place] = []
    folders = request.set_folders
    shards: dict[str, int] = {}
    first = 0
    for group, count in zip(groups, counts, strict=True):
        folder = folders[group.source]
        for number in range(count):
            name = chunks.name(group.number, number)
            documents_of_chunk = chunks.documents(name)
            shard = shards.setdefault(folder, 0)
            shards[folder] += 1
            tokens = int(documents_of_chunk["tokens"].sum())
            num_documents = len(documents_of_chunk)
            place = _Place(name, group.source, folder, shard, first, num_documents, tokens)
            found.append(place)
            first += num_documents
    return found


@dataclass(frozen=True)
class _Choice:
    """Which documents are held out, and which are kept. Picklable.

    Attributes:
        folder: the work folder, with the files that the second pass maps.
        digests: of the held-out documents.
        texts: of the held-out documents.
    """

    folder: Path
    digests: list[int]
    texts: list[str]

    @classmethod
    def of(cls, request: TokenRequest, places: Sequence[_Place], chunks: ChunkStore) -> _Choice:
        """Return the choice, which the first process that needs it stores."""
        path = chunks.folder / _CHOICE
        if not path.exists():
            made = _choose(request, places, chunks)
            write_atomically(path, json.dumps({"digests": made.digests, "texts": made.texts}))
        found = json.loads(read_plain(path))
        return cls(chunks.folder, found["digests"], found["texts"])


def _choose(request: TokenRequest, places: Sequence[_Place], chunks: ChunkStore) -> _Choice:
    def digests() -> Iterator[np.ndarray]:
        for place in places:
            yield chunks.documents(place.name)["digest"]

    is_first = first_of_each(digests, sum(place.documents for place in places))
    held_out = _held_out(request, places, chunks)
    samples = _pieces_of(request, held_out.texts)
    if sum(map(len, samples)) < LEAST_HELD_OUT:
        reason = "has too few documents to hold some out for evaluation"
        raise _too_little(reason, "Give more text, or text to evaluate on: --eval")
    known = np.unique(np.concatenate([run_hashes(one) for one in samples]))
    write_atomically(chunks.folder / _KNOWN, known.tobytes())
    write_atomically(chunks.folder / _KEPT, is_first.tobytes())
    own = [] if request.held_out else held_out.digests
    return _Choice(chunks.folder, own, held_out.texts)


def _held_out(request: TokenRequest, places: Sequence[_Place], chunks: ChunkStore) -> HeldOut:
    held_out = new_held_out()
    if request.held_out:
        for source in request.held_out:
            for number, text in enumerate(documents(source, piece_size([source]), is_cut=True)):
                held_out.offer(number, text)
        return held_out
    characters = 0
    for place in places:
        characters += chunks.counts(place.name).characters
        for digest, text in chunks.held_out(place.name):
            held_out.offer(digest, text)
    held_out.shrink(held_out_size(characters))
    return held_out


def _too_little(reason: str, remedy: str = "Give more text") -> UserError:
    return UserError("data.too-small", "the text", reason, remedy)


def _held_out_samples(request: TokenRequest, choice: _Choice) -> list[np.ndarray]:
    return _pieces_of(request, choice.texts)


def _pieces_of(request: TokenRequest, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the samples of documents, each uint16 or uint32 [T] with its special tokens."""
    ids, offsets = request.tokenizer.encode_all(texts)
    framed = DocumentFrame(request.tokenizer, request.length)
    found: list[np.ndarray] = []
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        found += framed.pieces(ids[start:end])
    return found


@dataclass(frozen=True)
class _ShardWriter:
    """The second pass: picklable."""

    chunks: ChunkStore
    tokenizer: Tokenizer
    length: int
    choice: _Choice

    def write(self, place: _Place) -> dict[str, Any]:
        """Write the shard of a chunk; return its entries of the index, and counts."""
        documents_of_chunk = self.chunks.documents(place.name)
        ids = self.chunks.tokens(place.name)
        edges = offsets_of(documents_of_chunk["tokens"])
        kept = np.fromfile(self.choice.folder / _KEPT, bool, place.documents, offset=place.first)
        held_out = np.asarray(self.choice.digests, np.uint64)
        is_kept = kept & ~np.isin(documents_of_chunk["digest"], held_out)
        is_near = self._near(ids, edges) & is_kept
        is_kept &= ~is_near
        frame = DocumentFrame(self.tokenizer, self.length)
        writer = MdsWriter(
            self.choice.folder / place.folder,
            whole_text_columns(self.tokenizer.dtype),
            size_limit=_SHARD_BYTES,
            first=place.shard,
            vocabulary_sha256=vocabulary_sha256(self.tokenizer),
        )
        pieces = 0
        for number in np.flatnonzero(is_kept).tolist():
            for piece in frame.pieces(ids[edges[number] : edges[number + 1]]):
                writer.write(whole_text_row(piece))
                pieces += 1
        lengths = np.diff(edges)
        return {
            "entries": writer.flush(),
            "kept": int(np.count_nonzero(is_kept)),
            "pieces": pieces,
            "tokens": int(lengths[is_kept].sum()),
            "cut": int(np.count_nonzero(lengths[is_kept] > frame.most_inside)),
            "near": int(lengths[is_near].sum()),
        }

    def _near(self, ids: np.ndarray, edges: np.ndarray) -> np.ndarray:
        """Return bool [documents], whether most of a document is in runs of held-out text."""
        known = np.fromfile(self.choice.folder / _KNOWN, np.uint64)
        count = len(edges) - 1
        found = np.zeros(count, bool)
        first = 0
        while first < count:
            most = int(np.searchsorted(edges, edges[first] + _COMPARED, side="right")) - 1
            end = max(first + 1, most)
            some = ids[edges[first] : edges[end]]
            starts = edges[first : end + 1] - edges[first]
            repeated = nearly_repeated(some, starts, known)
            has_tokens = np.diff(starts) > 0
            found[first:end][has_tokens] = repeated[starts[:-1][has_tokens]]
            first = end
        return found


def _summaries(
    request: TokenRequest,
    places: Sequence[_Place],
    written: Sequence[Mapping[str, Any]],
    chunks: ChunkStore,
) -> dict[str, SourceSummary]:
    found = {name: SourceSummary() for name in request.sources}
    for place, result in zip(places, written, strict=True):
        summary = found[place.source]
        summary.counts.add(chunks.counts(place.name))
        summary.kept += result["kept"]
        summary.pieces += result["pieces"]
        summary.tokens += result["tokens"]
        summary.cut += result["cut"]
        summary.near += result["near"]
    return found


def _complete_sets(
    request: TokenRequest,
    out: Path,
    work: Path,
    places: Sequence[_Place],
    written: Sequence[Mapping[str, Any]],
) -> None:
    """Move the training sets to the output, each with its index."""
    for folder in dict.fromkeys(place.folder for place in places):
        target = out / folder
        if (target / INDEX).exists():
            continue
        entries = [
            entry
            for place, result in zip(places, written, strict=True)
            for entry in result["entries"]
            if place.folder == folder
        ]
        if not entries:
            reason = f"{folder.removeprefix(f'{TRAIN}/')} has no text to train on"
            raise _too_little(reason, "Leave the source out")
        write_index(work / folder, entries, vocabulary_sha256(request.tokenizer))
        with writing(target, "Remove it"):
            for leftover in (work / folder).glob("*.tmp"):  # of killed tasks
                leftover.unlink()
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(work / folder, target)


def _write_val(request: TokenRequest, out: Path, samples: Sequence[np.ndarray]) -> None:
    shutil.rmtree(out / VAL, ignore_errors=True)
    tokenizer = request.tokenizer
    with MdsWriter(
        out / VAL,
        whole_text_columns(tokenizer.dtype),
        vocabulary_sha256=vocabulary_sha256(tokenizer),
    ) as writer:
        for sample in samples:
            writer.write(whole_text_row(sample))


def _facts(
    request: TokenRequest,
    places: Sequence[_Place],
    chunks: ChunkStore,
    choice: _Choice,
    summaries: Mapping[str, SourceSummary],
    samples: Sequence[np.ndarray],
    plan: dict[str, Any],
) -> Facts:
    tokenizer = request.tokenizer
    total = TextCounts()
    for summary in summaries.values():
        total.add(summary.counts)
    kept = sum(summary.kept for summary in summaries.values())
    near = sum(summary.near for summary in summaries.values())
    held_out_ids = np.concatenate(samples)
    num_held_out = len(held_out_ids) - 2 * len(samples)
    unknown = 0
    if tokenizer.unknown_id is not None:
        unknown = int(np.count_nonzero(held_out_ids == tokenizer.unknown_id))
    neighbors = _neighbors(request, places, chunks)
    return Facts(
        made_from=plan,
        characters=total.characters,
        documents=total.documents,
        train_sequences=sum(summary.pieces for summary in summaries.values()),
        train_tokens=sum(summary.tokens for summary in summaries.values()),
        held_out_sequences=len(samples),
        held_out_tokens=num_held_out,
        near_repeats=near,
        unknown_share=total.unknown_share,
        held_out_unknown=unknown / max(1, num_held_out),
        inventory=[
            f"text: {total.characters:,} characters in {total.documents:,} documents, "
            f"{kept:,} of them to train on; letters: {script_words(total.scripts)}",
            f"tokenizer: {tokenizer.kind}, as in {tokenizer.name}",
        ],
        scripts=script_words(total.scripts),
        baselines=neighbors.accuracies(mask_samples(samples, tokenizer, request.eval_rate)),
        sentences=choose_sentences(choice.texts, tokenizer),
        proportions={
            request.set_folders[name].removeprefix(f"{TRAIN}/"): share
            for name, share in request.proportions.items()
        },
    )


def _neighbors(request: TokenRequest, places: Sequence[_Place], chunks: ChunkStore) -> Neighbors:
    """Count pairs of tokens in the first documents."""
    tokenizer = request.tokenizer
    neighbors = Neighbors(tokenizer.vocab_size, MOST_PAIRS, never_guessed=tokenizer.special_ids)
    left = BASELINE_TOKENS
    for place in places:
        ids = chunks.tokens(place.name)[:left]
        if not len(ids):
            break
        ends = np.cumsum(chunks.documents(place.name)["tokens"], dtype=np.int64) - 1
        is_followed = np.ones(len(ids), bool)
        is_followed[ends[(ends >= 0) & (ends < len(ids))]] = False
        is_followed[-1] = False
        neighbors.add(ids, is_followed)
        left -= len(ids)
    return neighbors


def try_shard(request: TokenRequest, chunks: ChunkStore, name: str) -> int:
    """Write the shard of one chunk as the second pass does, for a plan; return its samples."""
    stored = chunks.documents(name)
    write_atomically(chunks.folder / _KNOWN, np.arange(_TRIED_RUNS, dtype=np.uint64).tobytes())
    write_atomically(chunks.folder / _KEPT, np.ones(len(stored), bool).tobytes())
    place = _Place(name, "", TRAIN, 0, 0, len(stored), int(stored["tokens"].sum()))
    choice = _Choice(chunks.folder, [], [])
    result = _ShardWriter(chunks, request.tokenizer, request.length, choice).write(place)
    return int(result["pieces"])
