"""The text that a tokenizer is trained on: a sample of the documents, and held-out ones, for each
source.

The text is read twice, in constant memory: once to count it and to choose the held-out documents,
once to train. Documents are chosen by the SHA-256 of their text, so neither order nor number of
files matters, and a copy of a held-out document is not trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlbert.data.prepare.corpus_files import CorpusSource
from mlbert.data.prepare.custom_corpus import LEAST_CHARACTERS, held_out_size, new_held_out
from mlbert.data.prepare.held_out import DIGEST_BITS, HeldOut, text_digest
from mlbert.data.prepare.readable_sources import (
    BadSources,
    piece_size,
    read_documents,
    read_texts,
    scan_readable,
)
from mlbert.host.errors import UserError
from mlbert.host.progress import Progress

_FEW = 1 / 3  # of the characters to hold out of a source; if there are fewer, documents are cut
MOST_GROUPS = 20  # sources with figures for each
_ALL = "all text"


@dataclass
class SourceText:
    """What the first reading found in one source."""

    held_out: HeldOut = field(default_factory=new_held_out)
    characters: int = 0
    documents: int = 0


@dataclass
class _Scan:
    piece: int  # characters, see `mlbert.data.prepare.corpus_files.documents`
    is_cut: bool  # also cut documents that could stay whole
    groups: dict[str, SourceText] = field(default_factory=dict)
    bad: BadSources = field(default_factory=dict)

    @property
    def characters(self) -> int:
        return sum(group.characters for group in self.groups.values())


@dataclass(frozen=True)
class TokenizerText:
    """The text to train on and the held-out text; see `read_text`.

    Attributes:
        sources: those that can be read.
        groups: by the name of the source, as printed.
        share: fraction of the documents to train on.
    """

    sources: Sequence[CorpusSource]
    groups: dict[str, SourceText]
    share: float
    _names: dict[Path, str]
    _scan: _Scan

    @property
    def characters(self) -> int:
        """Characters of all text."""
        return self._scan.characters

    @property
    def skipped(self) -> list[Path]:
        """Files that were left out because they cannot be read."""
        return [source.path for source in self._scan.bad]

    def texts(self, counts: TextCounts, progress: Progress = Progress()) -> Iterator[str]:
        """Yield the documents to train on, and count them."""
        limit = int(self.share * (1 << DIGEST_BITS))
        num_bytes = sum(source.num_bytes for source in self.sources)
        scan = self._scan
        with progress.task("training", num_bytes, "bytes") as advance:
            for source, text in read_texts(self.sources, scan.piece, scan.is_cut, advance):
                digest = text_digest(text)
                held_out = self.groups[self._names[source.path]].held_out
                if digest < limit and digest not in held_out:
                    counts.characters += len(text)
                    counts.documents += 1
                    yield text


@dataclass
class TextCounts:
    """Counts of the text that a tokenizer was trained on."""

    characters: int = 0
    documents: int = 0


def read_text(
    paths: Sequence[Path],
    sources: Sequence[CorpusSource],
    sample: int,
    encoding: str | None = None,
    skip_bad: bool = False,
    progress: Progress = Progress(),
) -> TokenizerText:
    """Read all text once.

    Args:
        paths: files and folders as the user gave them, which name the sources.
        sources: the files in them.
        sample: characters to train on, about.
        encoding, skip_bad: as of `mlbert.data.prepare.readable_sources.scan_readable`.
        progress: receives the progress.

    Raises:
        UserError: text cannot be read or is too short.
    """
    names = source_names(paths, [source.path for source in sources])
    for is_cut in (False, True):

        def scan_once(some: Sequence[CorpusSource], is_cut: bool = is_cut) -> _Scan:
            return _scan_once(some, is_cut, names, progress)

        readable, scan = scan_readable(sources, encoding, skip_bad, scan_once, progress)
        if scan.characters < LEAST_CHARACTERS:
            reason = f"has only {scan.characters:,} characters, too few to train a tokenizer"
            remedy = f"Give {LEAST_CHARACTERS:,} or more; a useful one needs many millions"
            raise UserError("data.too-small", "the text", reason, remedy)
        has_enough = True
        for group in scan.groups.values():
            most = held_out_size(group.characters)
            group.held_out.shrink(most)
            has_enough &= group.held_out.characters >= _FEW * most
        if has_enough:
            break
    # The held-out documents have the smallest digests, and are not trained on.
    held_out = sum(group.held_out.characters for group in scan.groups.values())
    share = min(1.0, (sample + held_out) / scan.characters)
    return TokenizerText(readable, scan.groups, share, names, scan)


def _scan_once(
    sources: Sequence[CorpusSource], is_cut: bool, names: dict[Path, str], progress: Progress
) -> _Scan:
    scan = _Scan(piece_size(sources), is_cut)
    num_bytes = sum(source.num_bytes for source in sources)
    with progress.task("reading", num_bytes, "bytes") as advance:
        for source, text in read_documents(sources, scan.piece, is_cut, scan.bad, advance):
            group = scan.groups.setdefault(names[source.path], SourceText())
            group.characters += len(text)
            group.documents += 1
            group.held_out.offer(text_digest(text), text)
    return scan


def source_names(paths: Sequence[Path], files: Sequence[Path]) -> dict[Path, str]:
    """Return the name of the source to which each file belongs, for a table.

    Each given path is a source. Of a single folder, its folders are, which often are languages. If
    there are too many, all are one.
    """
    names: dict[Path, str] = {}
    for file in files:
        given = next(path for path in paths if file == path or path in file.parents)
        names[file] = str(given)
        if len(paths) == 1 and file != given:
            inner = file.relative_to(given).parts
            names[file] = inner[0] if len(inner) > 1 else given.name or str(given)
    if len(set(names.values())) > MOST_GROUPS:
        return dict.fromkeys(files, _ALL)
    return names
