"""Convert texts to MDS sets in MosaicML Streaming's format, one per split: of texts, of tokens in
equal samples, or of whole texts as token ids.

The text is from the Hugging Face hub (C4, the Pile), from the user's files, or from this Python
installation. A split is written under a temporary name and renamed when complete.

Files are converted by tasks (`mlbert.data.prepare.step_tasks`) in two passes. The first reads and
tokenizes each file once, and stores its texts and their sizes. The sizes determine where every
shard begins, by the writer's own rule. In the second pass, the task of a file writes the shards
that begin in it. The result has the bytes of a single process.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mlbert.data.formats.manifest import make_folder, reading
from mlbert.data.formats.mds import UINT32, MdsWriter, compression_level, write_index
from mlbert.data.formats.mds_files import INDEX, INT_BYTES, STR
from mlbert.data.formats.mds_tokens import array_header_bytes
from mlbert.data.formats.ragged import offsets_of
from mlbert.data.formats.token_shards import (
    TEXT,
    TOKENS,
    vocabulary_sha256,
    whole_text_columns,
    whole_text_row,
)
from mlbert.data.formats.tokenizer import Tokenizer, hub_problem
from mlbert.data.prepare import python_text
from mlbert.data.prepare.corpus import is_held_out
from mlbert.data.prepare.corpus_files import (
    IN_FOLDER,
    PACKED,
    ROW_SUFFIXES,
    row_texts,
    suffix_of,
    text_blocks,
    text_lines,
)
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.step_tasks import INPUTS, StepTasks, is_begun, stamps
from mlbert.host.errors import UserError, import_package
from mlbert.host.files import plain_size, read_plain, whole_file, write_atomically, writing
from mlbert.host.progress import Progress

# Split -> (the part of the text, the number of its first texts to use or None for all).
SPLITS: dict[str, tuple[str, int | None]] = {
    "train": ("train", None),
    "train_small": ("train", 100_000),
    "val": ("val", None),
    "val_small": ("val", 10_000),
}
# Name -> (repository of the hub, its default subset).
HUB_SETS: dict[str, tuple[str, str | None]] = {
    "c4": ("allenai/c4", "en"),
    "the_pile": ("monology/pile-uncopyrighted", None),
}
_HUB_PARTS = {"train": "train", "val": "validation"}
TEXT_SUFFIXES = (".txt",)
# For text without a validation part.
VAL_SHARE = 1 / 50  # fraction of the texts that become one
VAL_SEED = 17  # selects them
# For the report of what truncation drops.
LOOKED_AT = 10_000  # texts examined
SHORT_SEQUENCE = 128  # tokens
TOGETHER = 256  # texts tokenized together
GROUP = 16 << 20  # bytes of small files that a task reads
_REPORT_SECONDS = 10.0  # between lines of progress
_ID_CHARACTERS = 16  # of a text's XXH3-64 in hexadecimal

# Returns the texts of a part ("train" or "val").
Texts = Callable[[str], Iterator[str]]
# Texts joined, as uint8 of UTF-8 or ids in the tokenizer's type, and the length of each.
Piece = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Concatenation:
    """Texts concatenated and cut: every sample has exactly this many tokens,
    and the last partial sample is dropped.

    Args:
        tokens: tokens per sample.
        bos_text, eos_text: put before and after each text, outside its [CLS] and [SEP].
        wrap: whether the rest of a text that does not fill a sample begins the next one;
            otherwise it is dropped.
    """

    tokens: int
    bos_text: str
    eos_text: str
    wrap: bool


@dataclass(frozen=True)
class WholeTexts:
    """Each text is a sample: its ids with [CLS] and [SEP], however many, as the pre-training of
    ModernBERT's research repository reads them.

    The columns are ``input_ids`` (an array of 16 bits if the vocabulary fits, else 32), ``len``
    (its tokens), and ``id`` (XXH3-64 of the ids as stored, in hexadecimal).
    """


Form = Concatenation | WholeTexts | None  # None: texts


def hub_texts(dataset: str, subset: str | None) -> Texts:
    """Return C4 or the Pile, streamed.

    Raises UserError: the hub does not answer, or has no such set.
    """
    repository, usual = HUB_SETS[dataset]
    remedy = "Connect to the hub, or convert your own text with --dataset text --path FILES"
    if problem := hub_problem():
        raise UserError(
            "network.unreachable", f"dataset {dataset}", f"needs the network, but {problem}", remedy
        )
    datasets = import_package("datasets", f"dataset {dataset}", "bert")

    def texts(part: str) -> Iterator[str]:
        try:
            rows = datasets.load_dataset(
                repository, subset or usual, split=_HUB_PARTS[part], streaming=True
            )
            for row in rows:
                yield row["text"]
        except Exception as error:
            reason = f"cannot be read from the hub's {repository} ({error})"
            raise UserError("network.unreachable", f"dataset {dataset}", reason, remedy) from None

    return texts


def own_texts(path: Path) -> Texts:
    """Return the texts of the user's files; about one in 50, chosen by hash, is "val",
    the others are "train".
    """
    files = text_files(path)
    return _parted(lambda: (text for file in files for text in read_texts(file)))


def python_texts() -> Texts:
    """Return the English text of this Python installation."""
    return _parted(lambda: (" ".join(sentences) for sentences in python_text.documents()))


def _parted(read: Callable[[], Iterator[str]]) -> Texts:
    return lambda part: (text for text in read() if _part(text) == part)


def _part(text: str) -> str:
    return "val" if is_held_out([text], VAL_SHARE, VAL_SEED) else "train"


def text_files(path: Path) -> list[Path]:
    """Return the file, or those below a folder sorted by name.

    Raises UserError: there is none, or none of a known kind;
    or one is a link to nothing, a pipe or a device.
    """
    kinds = (*TEXT_SUFFIXES, *ROW_SUFFIXES)
    remedy = (
        f"Give a file or folder of {', '.join(kinds)}, plain or compressed ({', '.join(PACKED)})"
    )
    if not path.exists():
        raise UserError("file.missing", path, "there is no such file or folder", remedy)
    if path.is_dir():
        with reading(path, remedy):
            os.listdir(path)  # rglob treats an unreadable folder as empty
    candidates = path.rglob("*") if path.is_dir() else [path]
    files = [file for file in candidates if suffix_of(file.name) in kinds and not file.is_dir()]
    for file in files:
        plain_size(file, IN_FOLDER if path.is_dir() else remedy)
    if not files:
        if path.is_dir():
            raise UserError("data.empty", path, "contains no text", remedy)
        raise UserError("data.format", path, "has an unknown file type", remedy)
    return sorted(files, key=lambda file: file.relative_to(path).as_posix())


def read_texts(path: Path) -> Iterator[str]:
    """Yield the non-blank texts of a file: blocks separated by blank lines in a .txt file,
    else as `row_texts`.
    """
    if suffix_of(path.name) in ROW_SUFFIXES:
        yield from (text for text in row_texts(path) if text.strip())
        return
    for block in text_blocks(text_lines(path, "Cut it into several")):
        yield "".join(block).rstrip()


def convert(
    texts: Texts,
    splits: Sequence[str],
    out_root: Path,
    *,
    tokenizer: Tokenizer,
    form: Form = None,
    compression: str | None = None,
    executor: Executor = Executor(),
) -> None:
    """Write a set for each of ``splits``, names of `SPLITS`,
    to the folder of that name in ``out_root``.

    Args:
        tokenizer: used by ``form`` and for the report on truncation.
        form: of the samples.
        compression: as in `mlbert.data.formats.mds.MdsWriter`.

    Raises UserError: a split already exists (checked before anything is written), has no text,
    or cannot be written.
    """
    check_absent(splits, out_root)
    encoder = _Encoder(tokenizer, form)
    for split in dict.fromkeys(splits):
        part, most = SPLITS[split]
        partial = out_root / f".{split}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        make_folder(partial)
        try:
            writer = MdsWriter(
                partial,
                encoder.columns,
                compression=compression,
                vocabulary_sha256=encoder.vocabulary_sha256,
            )
            count = 0
            first = []
            reported = time.monotonic()
            for sample in encoder.samples(
                map(encoder.encode, _together(islice(texts(part), most)))
            ):
                writer.write(encoder.row(sample))
                count += 1
                if count <= LOOKED_AT:
                    first.append(sample)
                if time.monotonic() - reported > _REPORT_SECONDS:
                    reported = time.monotonic()
                    executor.progress(f"{split}: {count:,} samples")
            if not count:
                raise _too_small(split)
            writer.finish()
            encoder.report(split, count, first, executor.progress)
            os.rename(partial, out_root / split)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def check_absent(splits: Sequence[str], out_root: Path) -> None:
    """Check that none of the splits exists. Raises UserError: one does."""
    for split in splits:
        folder = out_root / split
        with reading(folder):
            if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
                raise UserError(
                    "file.exists",
                    folder,
                    "already exists",
                    "Remove it, or choose another --out_root",
                )


def _too_small(split: str) -> UserError:
    remedy = "Give more text or leave the split out"
    return UserError(
        "data.too-small", f"split {split}", "has no text, or too little for one sample", remedy
    )


def _together(texts: Iterator[str]) -> Iterator[list[str]]:
    while several := [*islice(texts, TOGETHER)]:
        yield several


@dataclass(frozen=True)
class _Encoder:
    """Makes samples: each is a text, tokens by a `Concatenation`, or one of `WholeTexts`."""

    tokenizer: Tokenizer
    how: Form

    @property
    def columns(self) -> dict[str, str]:
        """Name and encoding of the columns of the set."""
        if self.how is None:
            return {TEXT: STR}
        if isinstance(self.how, WholeTexts):
            return whole_text_columns(self.dtype)
        return {TOKENS: "bytes"}

    def row(self, sample: bytes) -> dict[str, Any]:
        """Return the values of all columns of a sample."""
        if not isinstance(self.how, WholeTexts):
            return dict.fromkeys(self.columns, sample)
        return whole_text_row(np.frombuffer(sample, self.dtype))

    def row_bytes(self, sizes: np.ndarray, num_samples: int) -> np.ndarray:
        """Return int64 [num_samples], the bytes of samples in a shard without their offsets.

        ``sizes``, int64 [n], are those of the texts that they are made of.
        """
        if self.how is None:
            return sizes + UINT32.itemsize
        if isinstance(self.how, Concatenation):
            return np.full(num_samples, 8 * self.how.tokens + UINT32.itemsize)
        ids = array_header_bytes(sizes) + sizes * self.dtype.itemsize
        return ids + _ID_CHARACTERS + INT_BYTES + 2 * UINT32.itemsize

    @property
    def vocabulary_sha256(self) -> str | None:
        """The vocabulary that a set of tokens records; None for texts."""
        return None if self.how is None else vocabulary_sha256(self.tokenizer)

    @property
    def dtype(self) -> np.dtype:
        """Type of the first array of a `Piece`."""
        return np.dtype("u1") if self.how is None else self.tokenizer.dtype

    def encode(self, texts: Sequence[str]) -> Piece:
        """Return the texts, or their tokens with the special ones."""
        if self.how is None:
            encoded = [text.encode() for text in texts]
            return np.frombuffer(b"".join(encoded), self.dtype), np.array([*map(len, encoded)])
        before = [self.tokenizer.cls_id]
        after = [self.tokenizer.sep_id]
        if isinstance(self.how, Concatenation):
            before = [*_ids(self.tokenizer, self.how.bos_text), *before]
            after = [*after, *_ids(self.tokenizer, self.how.eos_text)]
        ids, offsets = self.tokenizer.encode_all(texts)
        ends = np.stack([offsets[:-1], offsets[1:]], 1).ravel()
        places = np.repeat(ends, np.tile([len(before), len(after)], len(texts)))
        content = np.insert(ids, places, np.tile([*before, *after], len(texts)))
        lengths = np.diff(offsets) + len(before) + len(after)
        return content.astype(self.dtype, copy=False), lengths

    def samples(self, pieces: Iterable[Piece]) -> Iterator[bytes]:
        """Yield the samples of consecutive texts. An incomplete last one is dropped."""
        how = self.how
        rest = np.empty(0, self.dtype)
        for content, sizes in pieces:
            wraps = isinstance(how, Concatenation) and how.wrap
            edges = offsets_of([len(content)] if wraps else sizes).tolist()
            for first, end in pairwise(edges):
                if not isinstance(how, Concatenation):
                    yield content[first:end].tobytes()
                    continue
                rest = np.concatenate([rest, content[first:end]])
                num_samples = len(rest) // how.tokens
                if not how.wrap:
                    num_samples = min(num_samples, 1)
                full = num_samples * how.tokens
                yield from (
                    row.tobytes() for row in rest[:full].reshape(-1, how.tokens).astype("<i8")
                )
                rest = rest[full:] if how.wrap or not full else rest[:0]

    def starts(self, sizes: np.ndarray, missing: int) -> tuple[np.ndarray, int]:
        """Return where in the content of some texts samples begin, and how many tokens the last one
        lacks; ``missing`` is what the last one of earlier texts lacks.
        """
        edges = offsets_of(sizes)
        total = int(edges[-1])
        if not isinstance(self.how, Concatenation):
            return edges[:-1], 0
        if self.how.wrap:
            begins = np.arange(missing, total, self.how.tokens)
        else:
            ends = edges.tolist()
            found = []
            text = bisect.bisect_left(ends, missing)
            while text < len(sizes):
                found.append(ends[text])
                text = bisect.bisect_left(ends, ends[text] + self.how.tokens)
            begins = np.array(found, np.int64)
        end = int(begins[-1]) + self.how.tokens if len(begins) else missing
        return begins, max(0, end - total)

    def report(self, split: str, count: int, first: Sequence[bytes], progress: Progress) -> None:
        """Report the number of samples, and what truncation leaves out of the first texts."""
        progress(f"{split}: {count:,} samples")
        if self.how is None:
            lengths = np.diff(self.tokenizer.encode_all([text.decode() for text in first])[1])
            room = SHORT_SEQUENCE - 2
            share = np.maximum(lengths - room, 0).sum() / max(lengths.sum(), 1)
            progress(
                f"{split}: truncation to {SHORT_SEQUENCE} tokens drops {share:.1%} of the tokens "
                "and the ends of "
                f"{(lengths > room).mean():.1%} of the texts (the first {len(lengths):,}); "
                "LONG_TEXTS=split drops none"
            )


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the id of a special token given by name, else the ids of plain text."""
    return [tokenizer.vocabulary[text]] if text in tokenizer.vocabulary else tokenizer.encode(text)


class _Shards(NamedTuple):
    """Consecutive shards of a split that begin in one group of files."""

    split: str
    first: int  # number of the first one
    group: int
    place: int  # where in the stored content of the group the first one begins
    samples: int


@dataclass(frozen=True)
class _FileJob:
    """Both passes over groups of files, and where they store what they read: picklable."""

    work: Path
    encoder: _Encoder
    parts: tuple[str, ...]
    num_groups: int
    compression: str | None

    def store(self, task: tuple[int, tuple[Path, ...]]) -> None:
        """Run pass 1 for a group of files."""
        group, paths = task
        texts = (text for path in paths for text in read_texts(path))
        with contextlib.ExitStack() as stack:
            stored = {
                part: [*map(stack.enter_context, map(whole_file, self._paths(part, group)))]
                for part in self.parts
            }
            for several in _together(texts):
                parts = [_part(text) for text in several]
                for part, files in stored.items():
                    own = [text for text, its in zip(several, parts, strict=True) if its == part]
                    content, sizes = self.encoder.encode(own)
                    files[0].write(content.tobytes())
                    files[1].write(sizes.astype(UINT32).tobytes())

    def write(self, shards: _Shards) -> list[dict[str, Any]]:
        """Run pass 2: write some shards and return their entries of the index."""
        columns = self.encoder.columns
        writer = MdsWriter(
            self.work / shards.split, columns, compression=self.compression, first=shards.first
        )
        pieces = self.pieces(SPLITS[shards.split][0], shards.group, shards.place)
        for sample in islice(self.encoder.samples(pieces), shards.samples):
            writer.write(self.encoder.row(sample))
        return writer.flush()

    def pieces(self, part: str, group: int = 0, place: int = 0) -> Iterator[Piece]:
        """Yield what pass 1 stored, from a place in a group on."""
        for number in range(group, self.num_groups):
            edges = offsets_of(self._sizes(part, number))
            if edges[-1]:
                content = np.memmap(self._paths(part, number)[0], self.encoder.dtype, "r")
                edges = edges[np.searchsorted(edges, place, side="right") - 1 :]
                edges[0] = place
                for low in range(0, len(edges) - 1, TOGETHER):
                    some = edges[low : low + TOGETHER + 1]
                    yield content[some[0] : some[-1]], np.diff(some)
            place = 0

    def shards(self, split: str) -> list[_Shards]:
        """Return all shards of a split, when pass 1 is complete.

        The first process that needs them stores them. Raises UserError: the split has no sample.
        """
        path = self.work / f"{split}.json"
        if not path.exists():
            write_atomically(path, json.dumps(self._find_shards(split)))
        return [_Shards(*values) for values in json.loads(read_plain(path))]

    def _find_shards(self, split: str) -> list[_Shards]:
        part, most = SPLITS[split]
        room = MdsWriter(self.work / split, self.encoder.columns, compression=self.compression).room
        found: list[_Shards] = []
        filled = missing = texts = count = 0
        for group in range(self.num_groups):
            sizes = self._sizes(part, group)[: None if most is None else most - texts]
            texts += len(sizes)
            places, missing = self.encoder.starts(sizes, missing)
            num_bytes = self.encoder.row_bytes(sizes, len(places))
            edges = offsets_of(num_bytes + UINT32.itemsize)
            done = 0
            while done < len(places):
                end = int(np.searchsorted(edges, edges[done] + room - filled, side="right")) - 1
                if not count or end <= done:  # a shard begins
                    end = max(
                        done + 1,
                        int(np.searchsorted(edges, edges[done] + room, side="right")) - 1,
                    )
                    filled = 0
                    if not found or found[-1].group != group:
                        found.append(_Shards(split, count, group, int(places[done]), 0))
                    count += 1
                found[-1] = found[-1]._replace(samples=found[-1].samples + end - done)
                filled = filled + int(edges[end] - edges[done])
                done = end
        if missing and found:  # the last sample is incomplete
            found[-1] = found[-1]._replace(samples=found[-1].samples - 1)
        if not any(shards.samples for shards in found):
            raise _too_small(split)
        return found

    def _paths(self, part: str, group: int) -> tuple[Path, Path]:
        return self.work / f"{part}-{group:05d}.content", self.work / f"{part}-{group:05d}.sizes"

    def _sizes(self, part: str, group: int) -> np.ndarray:
        path = self._paths(part, group)[1]
        with reading(path):
            return np.fromfile(path, UINT32).astype(np.int64)


def convert_files(
    path: Path,
    splits: Sequence[str],
    out_root: Path,
    *,
    tokenizer: Tokenizer,
    form: Form = None,
    compression: str | None = None,
    executor: Executor = Executor(),
) -> None:
    """Do the same as `convert` with `own_texts`, by tasks.

    Needs space for the texts, or 2 or 4 bytes a token, until it is complete.
    """
    splits = [*dict.fromkeys(splits)]
    work = out_root / f".{'-'.join(splits)}.partial"
    compression_level(compression)
    inputs = stamps(text_files(path))
    plan: dict[str, Any] = {
        "splits": splits,
        "tokenizer": tokenizer.identity,
        "compression": compression,
    }
    plan |= {"form": type(form).__name__, "options": asdict(form) if form else {}, INPUTS: inputs}
    if not is_begun(work, plan):
        check_absent(splits, out_root)
    tasks = StepTasks(work, plan, executor)
    sizes = [int(size) for _, size, _ in inputs]
    groups = [
        [*some]
        for _, some in groupby(range(len(sizes)), (offsets_of(sizes) // GROUP).tolist().__getitem__)
    ]
    items = [
        (number, tuple(Path(inputs[place][0]) for place in places))
        for number, places in enumerate(groups)
    ]
    parts = tuple(dict.fromkeys(SPLITS[split][0] for split in splits))
    job = _FileJob(tasks.folder, _Encoder(tokenizer, form), parts, len(groups), compression)
    sizes = [sum(sizes[place] for place in places) for places in groups]
    tasks.run("reading", job.store, items, sizes, is_last=False, keep=True)
    shards = [one for split in splits for one in job.shards(split)]
    entries = tasks.run(
        "writing", job.write, shards, [one.samples for one in shards], unit="samples", keep=True
    )
    for split in splits:
        if not (out_root / split / INDEX).exists():
            own = [
                entry
                for one, some in zip(shards, entries, strict=True)
                for entry in some
                if one.split == split
            ]
            write_index(tasks.folder / split, own, job.encoder.vocabulary_sha256)
            with writing(out_root / split, "Remove it"):
                for leftover in (tasks.folder / split).glob("*.tmp"):  # of killed tasks
                    leftover.unlink()
                os.rename(tasks.folder / split, out_root / split)
        first = [*islice(job.encoder.samples(job.pieces(SPLITS[split][0])), LOOKED_AT)]
        job.encoder.report(
            split,
            sum(one.samples for one in shards if one.split == split),
            first,
            executor.progress,
        )
    shutil.rmtree(work, ignore_errors=True)
