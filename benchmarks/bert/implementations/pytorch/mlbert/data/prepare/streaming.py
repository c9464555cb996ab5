"""Convert texts to MDS sets in MosaicML Streaming's format, one per split, of texts or of tokens in equal samples.

The text is from the Hugging Face hub (C4, the Pile), from the user's files, or from this Python installation. A split
is written under a temporary name and renamed when complete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mlbert.data.formats.manifest import make_folder, reading
from mlbert.data.formats.mds import MdsWriter
from mlbert.data.formats.token_shards import TEXT, TOKENS
from mlbert.data.formats.tokenizer import Tokenizer, hub_problem
from mlbert.data.prepare import python_text
from mlbert.data.prepare.corpus import is_held_out
from mlbert.data.prepare.corpus_files import LINES_SUFFIXES, PACKED, json_texts, opened, suffix_of
from mlbert.data.prepare.jobs import SILENT, Progress
from mlbert.host.errors import UserError

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
VAL_SHARE, VAL_SEED = 1 / 50, 17  # for text without a validation part
LOOKED_AT, SHORT_SEQUENCE = 10_000, 128  # texts examined, and tokens, for the report of what truncation drops
TOGETHER = 256  # texts tokenised together
_REPORT_SECONDS = 10.0

# Returns the texts of a part ("train" or "val").
Texts = Callable[[str], Iterator[str]]


@dataclass(frozen=True)
class Concatenation:
    """Texts concatenated and cut: every sample has exactly this many tokens, and the last partial sample is dropped.

    Args:
        tokens: tokens per sample.
        bos_text, eos_text: put before and after each text, outside its [CLS] and [SEP].
        wrap: whether the rest of a text that does not fill a sample begins the next one; otherwise it is dropped.
    """

    tokens: int
    bos_text: str
    eos_text: str
    wrap: bool


def hub_texts(dataset: str, subset: str | None) -> Texts:
    """Return C4 or the Pile, streamed. Raises UserError: the hub does not answer, or has no such set."""
    repository, usual = HUB_SETS[dataset]
    remedy = "Connect to the hub, or convert your own text with --dataset text --path FILES"
    if problem := hub_problem():
        raise UserError("network.unreachable", f"dataset {dataset}", f"needs the network, but {problem}", remedy)
    try:
        import datasets
    except ImportError:
        reason = "needs the package datasets"
        remedy = "Install it: pip install 'mlbert[bert]'"
        raise UserError("package.missing", f"dataset {dataset}", reason, remedy) from None

    def texts(part: str) -> Iterator[str]:
        try:
            rows = datasets.load_dataset(repository, subset or usual, split=_HUB_PARTS[part], streaming=True)
            for row in rows:
                yield row["text"]
        except Exception as error:
            reason = f"cannot be read from the hub's {repository} ({error})"
            raise UserError("network.unreachable", f"dataset {dataset}", reason, remedy) from None

    return texts


def own_texts(path: Path) -> Texts:
    """Return the texts of the user's files; about one in 50, chosen by hash, is "val", the others are "train"."""
    files = text_files(path)
    return _parted(lambda: (text for file in files for text in read_texts(file)))


def python_texts() -> Texts:
    """Return the English text of this Python installation."""
    return _parted(lambda: (" ".join(sentences) for sentences in python_text.documents()))


def _parted(read: Callable[[], Iterator[str]]) -> Texts:
    def texts(part: str) -> Iterator[str]:
        return (text for text in read() if is_held_out([text], VAL_SHARE, VAL_SEED) == (part == "val"))

    return texts


def text_files(path: Path) -> list[Path]:
    """Return the file, or those below a folder sorted by name. Raises UserError: there is none, or none of a known
    kind."""
    kinds = (*TEXT_SUFFIXES, *LINES_SUFFIXES)
    remedy = f"Give a file or folder of {', '.join(kinds)}, also compressed as {' or '.join(PACKED)}"
    if not path.exists():
        raise UserError("file.missing", path, "there is no such file or folder", remedy)
    if path.is_dir():
        with reading(path, remedy):
            os.listdir(path)  # rglob treats an unreadable folder as empty
    candidates = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    files = [file for file in candidates if suffix_of(file.name) in kinds]
    if not files:
        if path.is_dir():
            raise UserError("data.empty", path, "holds no text", remedy)
        raise UserError("data.format", path, "is of an unknown kind", remedy)
    return sorted(files, key=lambda file: file.relative_to(path).as_posix())


def read_texts(path: Path) -> Iterator[str]:
    """Yield the non-blank texts of a file: blocks separated by blank lines in a .txt file, else ``text`` of every JSON
    line. Raises UserError, which names the line that is not UTF-8 or JSON, or has no text."""
    if suffix_of(path.name) in LINES_SUFFIXES:
        yield from (text for text in json_texts(path) if text.strip())
        return
    block: list[str] = []
    with opened(path) as file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                reason = f"line {number} is not UTF-8"
                raise UserError("data.encoding", path, reason, "Convert the file to UTF-8") from None
            if line.strip():
                block.append(line)
            elif block:
                yield "".join(block).rstrip()
                block = []
    if block:
        yield "".join(block).rstrip()


def convert(
    texts: Texts,
    splits: Sequence[str],
    out_root: Path,
    *,
    tokenizer: Tokenizer,
    concatenation: Concatenation | None = None,
    compression: str | None = None,
    progress: Progress = SILENT,
) -> None:
    """Write a set for each of ``splits``, names of `SPLITS`, to the folder of that name in ``out_root``.

    Args:
        tokenizer: used by ``concatenation`` and for the report on truncation.
        compression: as in `mlbert.data.formats.mds.MdsWriter`.

    Raises UserError: a split already exists (checked before anything is written), has no text, or cannot be written.
    """
    check_absent(splits, out_root)
    for split in dict.fromkeys(splits):
        part, most = SPLITS[split]
        partial = out_root / f".{split}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        make_folder(partial)
        try:
            _write(islice(texts(part), most), partial, split, tokenizer, concatenation, compression, progress)
            os.rename(partial, out_root / split)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def check_absent(splits: Sequence[str], out_root: Path) -> None:
    """Check that none of the splits exists. Raises UserError: one does."""
    for split in splits:
        folder = out_root / split
        with reading(folder):
            if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
                raise UserError("file.exists", folder, "already exists", "Remove it, or choose another --out_root")


def _write(
    texts: Iterator[str],
    folder: Path,
    split: str,
    tokenizer: Tokenizer,
    concatenation: Concatenation | None,
    compression: str | None,
    progress: Progress,
) -> None:
    kept = _CountedTexts(texts, split, tokenizer, progress)
    columns = {TEXT: "str"} if concatenation is None else {TOKENS: "bytes"}
    samples: Iterator[Any] = iter(kept) if concatenation is None else _cut(kept, tokenizer, concatenation)
    column, count = next(iter(columns)), 0
    with contextlib.ExitStack() as stack:
        writer = MdsWriter(folder, columns, compression=compression)
        for sample in samples:
            if not count:  # from here on the writer writes its index on exit, except after an error
                stack.enter_context(writer)
            writer.write({column: sample})
            count += 1
    if not count:
        reason = "no text is left for it" if not kept.count else f"{kept.count} texts do not fill a sample"
        raise UserError("data.too-small", f"split {split}", reason, "Give more text or leave the split out")
    progress(f"{split}: {kept.count:,} texts in {count:,} samples, {kept.characters:,} characters")
    if concatenation is None:
        progress(f"{split}: {kept.dropped()}")


def _cut(texts: _CountedTexts, tokenizer: Tokenizer, how: Concatenation) -> Iterator[bytes]:
    before, after = ((*_ids(tokenizer, text),) for text in (how.bos_text, how.eos_text))
    rest: list[int] = []
    for ids in _tokenised(texts, tokenizer):
        rest += (*before, tokenizer.cls_id, *ids, tokenizer.sep_id, *after)
        while len(rest) >= how.tokens:
            yield np.asarray(rest[: how.tokens], "<i8").tobytes()
            rest = rest[how.tokens :] if how.wrap else []


def _tokenised(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the ids of each text, tokenising many texts at a time."""
    left = iter(texts)
    while several := [*islice(left, TOGETHER)]:
        tokens, offsets = tokenizer.encode_all(several)
        for first, end in pairwise(offsets.tolist()):
            yield tokens[first:end].tolist()


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the id of a special token given by name, else the ids of plain text."""
    return [tokenizer.vocabulary[text]] if text in tokenizer.vocabulary else tokenizer.encode(text)


class _CountedTexts:
    """Passes texts on, counts them, and keeps the first ones to measure how much short sequences would drop."""

    def __init__(self, texts: Iterator[str], split: str, tokenizer: Tokenizer, progress: Progress) -> None:
        self._texts, self._split, self._tokenizer, self._progress = texts, split, tokenizer, progress
        self.count = self.characters = 0
        self._first: list[str] = []

    def __iter__(self) -> Iterator[str]:
        reported = time.monotonic()
        for text in self._texts:
            self.count += 1
            self.characters += len(text)
            if self.count <= LOOKED_AT:
                self._first.append(text)
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                self._progress(f"{self._split}: {self.count:,} texts, {self.characters:,} characters")
            yield text

    def dropped(self) -> str:
        """What truncation leaves out, in words."""
        lengths = np.diff(self._tokenizer.encode_all(self._first)[1])
        room = SHORT_SEQUENCE - 2
        share = np.maximum(lengths - room, 0).sum() / max(lengths.sum(), 1)
        return (
            f"truncation to {SHORT_SEQUENCE} tokens drops {share:.1%} of the tokens and the ends of "
            f"{(lengths > room).mean():.1%} of the texts (the first {len(lengths):,}); LONG_TEXTS=split drops none"
        )
