"""Read the documents of many sources in one pass, and settle which sources can be read.

Files that are not UTF-8 are read in another encoding if one is given, and files that cannot be read
are left out if that is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from mlbert.data.prepare.corpus_files import CorpusSource, documents
from mlbert.host.errors import UserError
from mlbert.host.progress import Progress

# Errors of a file that can be left out.
_SKIPPED = (
    "data.encoding",
    "data.damaged",
    "data.row",
    "data.columns",
)

BadSources = dict[CorpusSource, UserError]


class Pass(Protocol):
    """What one reading of all sources found, and the sources that could not be read."""

    bad: BadSources


Found = TypeVar("Found", bound=Pass)


def piece_size(sources: Iterable[CorpusSource]) -> int:
    """Return the characters after which large plain files are cut, see `documents`."""
    num_bytes = sum(source.num_bytes for source in sources)
    return max(500, min(20_000, num_bytes // 400))


def read_documents(
    sources: Iterable[CorpusSource],
    piece: int,
    is_cut: bool,
    bad: BadSources,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Iterator[tuple[CorpusSource, str]]:
    """Yield the documents of all sources, each with its source; advance by bytes on disk.

    ``piece`` and ``is_cut`` as in `documents`. A source that cannot be read is added to ``bad``.
    """
    for source in sources:
        left = source.num_bytes
        try:
            for text in documents(source, piece, is_cut):
                yield source, text
                done = 0 if source.is_compressed else min(left, len(text.encode()))
                advance(done)
                left -= done
        except UserError as error:
            if error.code not in _SKIPPED:
                raise
            bad[source] = error
        advance(left)


def read_texts(
    sources: Iterable[CorpusSource],
    piece: int,
    is_cut: bool,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Iterator[tuple[CorpusSource, str]]:
    """Yield what `read_documents` does.

    Raises UserError at the end, for the first source that cannot be read: it has changed since it
    was found to be readable.
    """
    bad: BadSources = {}
    yield from read_documents(sources, piece, is_cut, bad, advance)
    for error in bad.values():
        raise error


def scan_readable(
    sources: Sequence[CorpusSource],
    encoding: str | None,
    skip_bad: bool,
    scan: Callable[[Sequence[CorpusSource]], Found],
    progress: Progress,
) -> tuple[Sequence[CorpusSource], Found]:
    """Return the sources that can be read, with the encoding in which they can, and what ``scan``
    found in them; its ``bad`` are those that were left out.

    Args:
        sources: all sources.
        encoding: of the files that are not UTF-8; None refuses them.
        skip_bad: leave out files that cannot be read.
        scan: reads sources once.
        progress: names the files that cannot be read.

    Raises UserError: some cannot be read, which are all named.
    """
    found = scan(sources)
    if found.bad and encoding is not None:
        other = {source for source, error in found.bad.items() if error.code == "data.encoding"}
        sources = [
            replace(source, encoding=encoding) if source in other else source for source in sources
        ]
        found = scan(sources)
    bad = found.bad
    if bad and not skip_bad:
        raise _unreadable(list(bad.values()), progress)
    if bad:
        sources = [source for source in sources if source not in bad]
        found = scan(sources)
        found.bad = bad
    return sources, found


def readable_sources(
    sources: Sequence[CorpusSource], encoding: str | None, skip_bad: bool, progress: Progress
) -> list[CorpusSource]:
    """Return the sources that can be read, with the encoding in which they can.

    Without ``encoding`` and ``skip_bad`` nothing is read: the first error then ends the reading.
    Raises UserError as `scan_readable`.
    """
    if encoding is None and not skip_bad:
        return [*sources]

    def scan(some: Sequence[CorpusSource]) -> _Scanned:
        scanned = _Scanned()
        for _ in read_documents(some, piece_size(some), False, scanned.bad):
            pass
        return scanned

    readable, _ = scan_readable(sources, encoding, skip_bad, scan, progress)
    return [*readable]


@dataclass
class _Scanned:
    bad: BadSources = field(default_factory=dict)


def _unreadable(errors: Sequence[UserError], progress: Progress) -> UserError:
    first = errors[0]
    more = len(errors) - 1
    for error in errors[:more]:
        progress(f"cannot be read: {error.subject}: {error.problem}")
    others = f", and {more} more cannot be read" if more else ""
    encoding = "--encoding NAME, such as cp1252, or " if first.code == "data.encoding" else ""
    remedy = f"{first.remedy}; or give {encoding}--skip-bad"
    return UserError(first.code, first.subject, f"{first.problem}{others}", remedy)


def together(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yield the texts in lists of at least ``size`` characters, for one process to work on."""
    several = list[str]()
    num_characters = 0
    for text in texts:
        several.append(text)
        num_characters += len(text)
        if num_characters >= size:
            yield several
            several = []
            num_characters = 0
    if several:
        yield several
