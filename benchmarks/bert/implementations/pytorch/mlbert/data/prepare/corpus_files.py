"""Documents from the user's text: plain, HTML, table, JSON and compressed files,
and saved Hugging Face data sets.

=================================  =================================================================
``.jsonl``, ``.json``              one JSON object per line; its ``text`` is a document; other
                                   ``.json`` files of a folder are left out
``.csv``, ``.tsv``                 one document per row; in a folder only if their column is named
``.parquet``                       one document per row, in the column ``text``;
                                   needs the package pyarrow
a folder saved by ``datasets``     one document per row, in the same way; needs the package
``.html``, ``.htm``, ``.xhtml``    a file is a document or several,
                                   of the visible text without navigation
other files and folders            ``.txt``, ``.text``, ``.md``, ``.rst``:
                                   a file is a document or several
=================================  =================================================================

Another column than ``text`` can be named. Files may be compressed (``.gz``, ``.zst``). Reads are
bounded, whatever the size of a file, a line or a text.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import chain, groupby
from pathlib import Path
from typing import Any, BinaryIO

from mlbert.data.formats.manifest import reading
from mlbert.data.formats.mds_files import INDEX, zstandard_module
from mlbert.data.formats.tasks import table_rows
from mlbert.host.errors import UserError, import_package
from mlbert.host.files import plain_size
from mlbert.host.json_files import text_in_line

PLAIN_SUFFIXES = (".txt", ".text", ".md", ".rst")
PACKED = (".gz", ".zst")
ROW_SUFFIXES = (".jsonl", ".json", ".parquet")
TABLE_SUFFIXES = (".csv", ".tsv")
HTML_SUFFIXES = (".html", ".htm", ".xhtml")
# Files that show that `datasets` saved a folder.
SAVED_SET = "dataset_info.json"  # of one split
SAVED_SETS = "dataset_dict.json"  # of several
TEXT = "text"  # column that is read by default
TRAIN = "train"  # split that is read, if there are several
LINKED_FOLDERS = "linked folder(s)"  # counted among the suffixes of what is not read
WHOLE = 32_000  # characters; a plain file up to this size is one document
MOST_DOCUMENT = 1_000_000  # characters; longer records are cut
_CHUNK = 1 << 20  # bytes of a plain or .gz file, read at a time
_PACKED_CHUNK = 1 << 16  # bytes of a .zst file, read at a time
_ROWS = 1024  # of a Parquet file, read at a time
_MOST_LINE = 64 << 20  # maximum characters of a line
_HTML_HEAD = 1024  # bytes with the declaration of the encoding
_KINDS = (
    f"{', '.join((*PLAIN_SUFFIXES, *HTML_SUFFIXES, '.parquet'))}, "
    ".jsonl or .json with an object on each line, "
    f"each plain or compressed ({', '.join(PACKED)})"
)
_REMEDY = f"Give text: {_KINDS}, or a folder of such files; or .csv or .tsv with --text COLUMN"
IN_FOLDER = "Remove it from the folder"  # remedy for what is not a plain file
UTF8 = "utf-8-sig"


@dataclass(frozen=True)
class CorpusSource:
    """A file, or a folder saved by ``datasets``."""

    path: Path
    num_bytes: int  # on disk
    modified: int  # nanoseconds since 1970
    column: str = TEXT  # of the text, in a file of rows
    encoding: str = UTF8  # of a plain file, a table or HTML

    @property
    def identity(self) -> list[str | int]:
        """JSON-serializable identifier that changes with the file."""
        column = [] if self.column == TEXT else [self.column]
        return [str(self.path.resolve()), self.num_bytes, self.modified, *column]

    @property
    def is_compressed(self) -> bool:
        """Whether the size on disk says little about that of the text."""
        return self.path.is_dir() or self.path.suffix.lower() in (*PACKED, ".parquet")

    @property
    def suffix(self) -> str:
        """Lower-case suffix, without that of the compression."""
        return suffix_of(self.path.name)


def suffix_of(name: str) -> str:
    """Return the lower-case suffix of a file name, without that of the compression."""
    path = Path(name.lower())
    return path.with_suffix("").suffix if path.suffix in PACKED else path.suffix


def find_sources(
    paths: Sequence[Path],
    without: Path,
    others: Counter[str] | None = None,
    column: str | None = None,
) -> list[CorpusSource]:
    """Return the files and saved sets at these paths, each once, in order.

    Skips hidden files and everything below the folder ``without``. Of a folder also skips links to
    folders, tables if no ``column`` is named, and JSON that is not one object per line. Counts all
    other files by suffix in ``others``.

    Raises UserError: a path does not exist, is neither a file nor a folder, or holds no text; or a
    text file of a folder is a link to nothing, a pipe or a device.
    """
    others = Counter() if others is None else others
    found: dict[Path, CorpusSource] = {}
    for path in paths:
        with reading(path, _REMEDY):
            if not path.exists():
                raise UserError("file.missing", path, "there is no such file or folder", _REMEDY)
            places = (
                _of_folder(path, without.resolve(), others, column) if path.is_dir() else [path]
            )
            if not path.is_dir() and not path.is_file():
                raise UserError("file.wrong-kind", path, "is neither a file nor a folder", _REMEDY)
        if not places and _holds_shards(path):
            reason = "contains shards of MosaicML Streaming (MDS), not files of text"
            remedy = "Give them to mlbert pretrain with --preset and --tokens, or with a YAML file"
            raise UserError("data.format", path, reason, remedy)
        if not places:
            found_instead = f", only {format_counts(others)}" if others else ""
            raise UserError("data.empty", path, f"contains no text{found_instead}", _REMEDY)
        for place in places:
            found.setdefault(place.resolve(), _source(place, column or TEXT))
    if not sum(source.num_bytes for source in found.values()):
        raise UserError(
            "data.empty",
            paths[0],
            "is empty" if len(found) == 1 else "all files are empty",
            "Give text",
        )
    return list(found.values())


def _holds_shards(folder: Path) -> bool:
    """Return True if a folder, or one in it, is an MDS set."""
    return (folder / INDEX).is_file() or any(folder.glob(f"*/{INDEX}"))


def format_counts(counts: Counter[str]) -> str:
    """Return counts of suffixes in words, such as ``12 .txt, 3 .pdf``."""
    return ", ".join(
        f"{count:,} {suffix or 'without a suffix'}" for suffix, count in counts.most_common()
    )


def _of_folder(folder: Path, without: Path, others: Counter[str], column: str | None) -> list[Path]:
    if any((folder / name).is_file() for name in (SAVED_SET, SAVED_SETS)):
        return [folder]
    known = {*PLAIN_SUFFIXES, *HTML_SUFFIXES, *ROW_SUFFIXES}
    if column is not None:
        known |= {*TABLE_SUFFIXES}
    places = []
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = sorted(
            f for f in folders if not f.startswith(".") and Path(parent, f).resolve() != without
        )
        if num_linked := sum(Path(parent, name).is_symlink() for name in folders):
            others[LINKED_FOLDERS] += num_linked
        for name in (name for name in names if not name.startswith(".")):
            place = Path(parent, name)
            if without in place.resolve().parents:
                continue
            suffix = suffix_of(name)
            if suffix in known:
                plain_size(place, IN_FOLDER)
            if suffix in known and (suffix != ".json" or _has_rows(place, column or TEXT)):
                places.append(place)
            else:
                others[Path(name.lower()).suffix] += 1
    return sorted(places)


def _has_rows(path: Path, column: str) -> bool:
    """Return whether the first line of a .json file is an object with a text.

    In a folder, few such files are.
    """
    try:
        return next(row_texts(path, column), None) is not None
    except UserError as error:
        return error.code not in ("data.row", "data.encoding")  # reading reports what is damaged


def _raise(error: OSError) -> None:
    raise error


def _source(path: Path, column: str) -> CorpusSource:
    with reading(path):
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        states = [file.stat() for file in files]
        if not path.is_dir():
            path.open("rb").close()  # fail now, not after an hour of other files
    modified = max((state.st_mtime_ns for state in states), default=0)
    return CorpusSource(path, sum(state.st_size for state in states), modified, column)


def documents(source: CorpusSource, piece: int, is_cut: bool) -> Iterator[str]:
    """Return the documents of a source, without blank ones.

    Args:
        piece: characters after which a large plain file is cut, at a blank line.
        is_cut: also cut small files and records.

    Raises UserError: not UTF-8 or not JSON (names the line), no such column, damaged,
    or unreadable.
    """
    limit = piece if is_cut else MOST_DOCUMENT
    if source.path.is_dir():
        texts = _rows(source.path, source.column)
    elif source.suffix in ROW_SUFFIXES:
        texts = row_texts(source.path, source.column)
    elif source.suffix in TABLE_SUFFIXES:
        texts = _table_texts(source)
    else:
        if source.path.suffix.lower() in PACKED or source.num_bytes > WHOLE:
            limit = piece
        is_html = source.suffix in HTML_SUFFIXES
        characters = _html_text(source) if is_html else _characters(source.path, source.encoding)
        return (part for part in _pieces(characters, limit) if part.strip())
    return (part for text in texts for part in _pieces(iter([text]), limit) if part.strip())


def _pieces(chunks: Iterator[str], size: int) -> Iterator[str]:
    """Cut text after the first blank line that follows ``size`` characters.

    If there is none before twice that size, cut after a line end, a space, or anywhere.
    """
    rest = ""
    for chunk in chunks:
        rest = rest + chunk
        start = 0
        while len(rest) - start > 2 * size:
            low = start + size
            high = start + 2 * size
            end = next(
                (e for mark in ("\n\n", "\n", " ") if (e := rest.find(mark, low, high)) >= 0),
                high - 1,
            )
            yield rest[start : end + 1]
            start = end + 1
        rest = rest[start:]
    yield rest


def _unpacked(file: BinaryIO) -> Iterator[bytes]:
    """Decompress Zstandard frames; EOFError if the last is cut off,
    which the package's own reader does not notice.
    """
    frame: Any = None
    while raw := (frame.unused_data if frame and frame.eof else b"") or file.read(_PACKED_CHUNK):
        if frame is None or frame.eof:
            frame = zstandard_module().ZstdDecompressor().decompressobj()
        yield frame.decompress(raw)
    if frame and not frame.eof:
        raise EOFError("its end is missing")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file, decompressed if it ends in .gz.

    Raises UserError also for what is read later: damaged or unreadable.
    """
    with reading(path), contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(path.open("rb"))
        broken: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, zlib.error)
        if path.suffix.lower() == ".gz":
            file = stack.enter_context(gzip.GzipFile(fileobj=file))
        elif path.suffix.lower() == ".zst":
            broken += (zstandard_module().ZstdError,)
        try:
            yield file
        except broken as error:
            raise UserError(
                "data.damaged", path, f"is damaged ({error})", "Restore or remove the file"
            ) from None


def _chunks(path: Path) -> Iterator[bytes]:
    """Yield the content of a file, decompressed, in parts that are not empty."""
    with opened(path) as file:
        packed = path.suffix.lower() == ".zst"
        yield from filter(None, _unpacked(file)) if packed else iter(lambda: file.read(_CHUNK), b"")


def _characters(path: Path, encoding: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder(encoding)()
    lines = 0
    for raw in chain(_chunks(path), [b""]):
        try:
            text = decoder.decode(raw, final=not raw)
        except UnicodeError as error:  # the UTF-16 decoder raises the base class
            before = error.object[: error.start] if isinstance(error, UnicodeDecodeError) else b""
            raise _not_text(path, lines + before.count(b"\n") + 1, raw, encoding) from None
        if "\0" in text:
            raise _with_zeros(path, lines + text[: text.index("\0")].count("\n") + 1, text)
        lines += raw.count(b"\n")
        yield text.replace("\r\n", "\n")


def _not_text(path: Path, line: int, raw: bytes, encoding: str = UTF8) -> UserError:
    name = encoding.removesuffix("-sig").upper()
    if b"\0" in raw:
        remedy = "Give text, or convert it: iconv -f utf-16 -t utf-8 FILE > NEW"
        return UserError("data.encoding", path, f"is binary or not encoded as {name}", remedy)
    reason = f"line {line} is not {name}"
    return UserError(
        "data.encoding", path, reason, "Convert the file: iconv -f latin1 -t utf-8 FILE > NEW"
    )


def _with_zeros(path: Path, line: int, text: str) -> UserError:
    """Return the error for text with zero characters.

    Half of UTF-16 text is zeros when it is read as UTF-8.
    """
    if text.count("\0") > max(1, len(text) // 4):
        return _not_text(path, line, text.encode())
    reason = f"line {line} has a zero byte"
    return UserError("data.damaged", path, reason, "Remove it: tr -d '\\000' < FILE > NEW")


class _HtmlText(HTMLParser):
    """Collects visible text, with a blank line between blocks."""

    _HIDDEN = frozenset(("script", "style", "template", "noscript", "nav", "svg"))
    _INLINE = re.compile(
        "a|abbr|b|bdi|bdo|cite|code|data|del|dfn|em|font|i|img|ins|kbd|mark|q|s|samp|small|span|strong|sub|sup|time|tt"
        "|u|var|wbr"
    )

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[str] = []
        self._hidden_by: str | None = None

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if self._hidden_by is None and tag in self._HIDDEN:
            self._hidden_by = tag
        self._separate(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == self._hidden_by:
            self._hidden_by = None
        self._separate(tag)

    def _separate(self, tag: str) -> None:
        if not self._INLINE.fullmatch(tag):
            self._parts.append(" " if tag in ("td", "th") else "\n")

    def handle_data(self, data: str) -> None:
        if self._hidden_by is None:
            self._parts.append(re.sub(r"\s+", " ", data))

    def take(self) -> str:
        """Return the text since the last call."""
        text = re.sub(" +", " ", "".join(self._parts))
        self._parts.clear()
        return re.sub(r" ?\n[\n ]*", "\n\n", text)

    def parse_marked_section(self, start: int, report: bool = True) -> int:
        """Skip to the next ``>``, as browsers do; the base class fails for ``<![unknown[``."""
        return self.parse_bogus_comment(start, report)


def _html_text(source: CorpusSource) -> Iterator[str]:
    parser = _HtmlText()
    for chunk in _characters(source.path, _html_encoding(source)):
        parser.feed(chunk)
        yield parser.take()
    parser.close()
    yield parser.take()


def _html_encoding(source: CorpusSource) -> str:
    """Return the encoding that a file declares, unless it is asked for another one."""
    head = next(_chunks(source.path), b"")[:_HTML_HEAD]
    found = re.search(rb"""(?:charset|encoding)\s*=\s*["']?([\w:.-]+)""", head)
    if (
        source.encoding != UTF8
        or found is None
        or not is_encoding(name := found[1].decode(errors="replace"))
    ):
        return source.encoding
    name = codecs.lookup(name).name
    # As browsers do.
    return {"utf-8": UTF8, "iso8859-1": "cp1252", "ascii": "cp1252"}.get(name, name)


def is_encoding(name: str) -> bool:
    """Return True for an encoding of text that Python knows."""
    try:
        b"text".decode(name, "ignore")
    except (LookupError, UnicodeError):
        return False
    return True


def check_encoding(name: str | None) -> None:
    """Raise UserError unless an encoding, if one is given, is known to Python."""
    if name is not None and not is_encoding(name):
        remedy = "Name one that Python knows, such as cp1252, latin-1, gb18030 or utf-16"
        raise UserError("config.choice", f"--encoding {name}", "is not a known encoding", remedy)


def _table_texts(source: CorpusSource) -> Iterator[str]:
    lines = text_lines(source.path, "Cut it into several", source.encoding)
    rows = table_rows(source.path, lines, source.suffix == ".csv", [source.column])
    return (fields[0] for _, fields in rows if fields)


def row_texts(path: Path, column: str = TEXT) -> Iterator[str]:
    """Yield the text of every row of a Parquet file, or of every JSON line of another file.

    Raises UserError, which names the line that is not UTF-8 or JSON, or has no text.
    """
    if suffix_of(path.name) == ".parquet":
        yield from _parquet_texts(path, column)
        return
    remedy = f'Give one JSON object per line, with its text as "{column}"'
    for number, line in enumerate(text_lines(path, remedy), 1):
        if line.strip():
            yield text_in_line(path, number, line, remedy, column)


def _parquet_texts(path: Path, column: str) -> Iterator[str]:
    import_package("pyarrow", path, "bert")
    from pyarrow import ArrowException, parquet, types

    remedy = f"Give a Parquet file with text in a column named {column}"
    with opened(path) as file:
        try:
            rows = parquet.ParquetFile(file)
            names = rows.schema_arrow.names
            kind = rows.schema_arrow.field(column).type if column in names else None
            if kind is None or not (types.is_string(kind) or types.is_large_string(kind)):
                raise UserError(
                    "data.columns",
                    path,
                    f"has the columns {', '.join(names)}, but no text in a column {column}",
                    remedy,
                )
            for batch in rows.iter_batches(_ROWS, columns=[column]):
                yield from (text for text in batch.column(0).to_pylist() if text)
        except (ArrowException, OSError) as error:
            raise UserError(
                "data.damaged", path, f"cannot be read by pyarrow ({error})", remedy
            ) from None


def text_lines(path: Path, remedy: str, encoding: str = UTF8) -> Iterator[str]:
    """Yield the lines of a file.

    Raises UserError, which names the line that is not in the encoding or too long.
    """
    number = 0
    rest = ""
    for chunk in _characters(path, encoding):
        *lines, rest = (rest + chunk).split("\n")
        yield from (f"{line}\n" for line in lines)
        number += len(lines)
        if len(rest) > _MOST_LINE:
            raise UserError(
                "data.row", path, f"line {number + 1} is longer than {_MOST_LINE >> 20} MiB", remedy
            )
    if rest:
        yield rest


def text_blocks(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield the lines between blank lines."""
    for has_text, block in groupby(lines, key=lambda line: bool(line.strip())):
        if has_text:
            yield list(block)


def _rows(folder: Path, column: str) -> Iterator[str]:
    """Yield the text of each row of a folder saved by ``datasets``:
    of the training split, or of all splits if there is none.
    """
    datasets = import_package("datasets", folder, "bert")
    remedy = f"Save a set with a column {column} of text, by save_to_disk"
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # datasets raises many types
        raise UserError(
            "data.damaged", folder, f"cannot be read by datasets ({error})", remedy
        ) from None
    sets = [loaded]
    if isinstance(loaded, datasets.DatasetDict):
        sets = [loaded[TRAIN]] if TRAIN in loaded else list(loaded.values())
    for one in sets:
        if column not in one.column_names:
            raise UserError(
                "data.columns",
                folder,
                f"has columns {', '.join(one.column_names)}, not {column}",
                remedy,
            )
        for row in one.select_columns([column]):
            if not isinstance(row[column], str):
                raise UserError(
                    "data.row",
                    folder,
                    f"has a row whose {column} is {type(row[column]).__name__}",
                    remedy,
                )
            yield row[column]
