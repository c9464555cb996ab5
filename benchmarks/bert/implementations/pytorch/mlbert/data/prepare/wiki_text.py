"""WikiExtractor's output as articles of sentences, in the form of the benchmark's text parts.

WikiExtractor writes ``<doc id=... title=...>``, the title, paragraphs with empty lines in between, ``</doc>``. The
benchmark's pipeline drops tags, titles and empty lines, removes what is left of wiki and HTML markup, writes one
sentence a line, and a blank line for every ``</doc>`` and for every line of white space only. So an article can fall
into two, and a run of blank lines can make empty articles; its choice of evaluation articles counts them all, and
therefore so do we.

Which articles the benchmark withholds for evaluation.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from mlbert.data.formats.manifest import reading
from mlbert.host.errors import UserError

Split = Callable[[str], list[str]]

_EXTRACT = "Give the folder that WikiExtractor wrote (files wiki_00, wiki_01, ... with <doc> elements)"
_DOC = b"<doc id="
_INNERMOST_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_BRACKETED = re.compile(r"\[([^\[\]|]*)\]")
_MEDIA = ("file", "image", "media")
_WITH_CONTENT = re.compile(r"<(ref|includeonly|graph)\b[^<>/]*>[^<]*</\1\s*>", re.IGNORECASE)
_TAG = re.compile(
    r"</?(?:br|chem|del|div|gallery|graph|hr|includeonly|ins|mapframe|math|meta|noinclude|nowiki|onlyinclude|poem"
    r"|references|ref|section|small|sup)\b[^<>]*>|<http[^>]*>",
    re.IGNORECASE,
)


def sentence_splitter() -> Split:
    """The splitter for English of the library sentencex (Wikimedia). Raises UserError: the library is not installed."""
    try:
        from sentencex import segment
    except ImportError:
        reason = "the Python package that splits sentences is not installed"
        raise UserError("package.missing", "sentencex", reason, "Install it: pip install 'mlbert[wiki]'") from None
    return lambda text: [sentence.strip() for sentence in segment("en", text)]


def splitter_name() -> str:
    """Library and version, for the record of how a text was made."""
    sentence_splitter()
    return f"sentencex {version('sentencex')}"


def remove_markup(line: str) -> str:
    """A line without what WikiExtractor left of links, references and tags; the text in a link or tag stays."""
    if "[" in line:
        if "[[Category:" in line:
            return ""
        links = 1
        while links:  # a link's text may hold links: from the inside out
            line, links = _INNERMOST_LINK.subn(_link_text, line)
        line = _BRACKETED.sub(r"\1", line)
    if "<" in line:
        line = _TAG.sub("", _WITH_CONTENT.sub("", line))
    return line.replace("alt=", "")


def _link_text(link: re.Match[str]) -> str:
    """What a reader sees of ``[[target]]`` or ``[[target|text]]``; nothing of pictures and longer links."""
    fields = link[1].split("|")
    namespace = fields[0].lstrip(":").partition(":")[0].lower()
    return "" if namespace in _MEDIA or len(fields) > 2 else fields[-1]


def paragraphs(path: Path, lines: Iterable[bytes]) -> Iterator[str]:
    """Cleaned paragraphs of one WikiExtractor file; "" ends an article. Raises UserError: the file is not what
    WikiExtractor writes, is truncated, or is not UTF-8; names the line."""
    inside = skip_title = False
    number = 0
    for number, raw in enumerate(lines, 1):
        if raw.startswith(_DOC):
            if inside:
                raise UserError("data.damaged", path, f"line {number} begins an article within another", _EXTRACT)
            inside = skip_title = True
        elif raw.startswith(b"</doc>"):
            inside = False
            yield ""
        elif skip_title:
            skip_title = False
        elif raw != b"\n":
            line = _decoded(path, number, raw)
            if not inside and line.strip():
                raise UserError("data.damaged", path, f"line {number} {_kind(raw)}", _EXTRACT)
            if inside:
                yield remove_markup(line).strip()
    if inside:
        raise UserError(
            "data.damaged", path, f"line {number}, its last, is within an article: the file is truncated", _EXTRACT
        )


def _decoded(path: Path, number: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"line {number} is not UTF-8 (byte {error.start + 1} of the line)"
        raise UserError("data.encoding", path, reason, "Run WikiExtractor again") from None


def _kind(raw: bytes) -> str:
    if raw.startswith(b"{"):
        return "looks like WikiExtractor's JSON; run it without --json"
    return "is outside any <doc> element: this is not WikiExtractor's output"


def sentence_lines(lines: Iterable[str], split: Split) -> Iterator[str]:
    """Paragraphs to sentences, a line each; blank lines stay."""
    for line in lines:
        yield from split(line) if line else ("",)


def articles(lines: Iterable[str]) -> list[str]:
    """Articles of one file as the benchmark counts them: an odd number of line ends between two articles leaves one at
    the beginning of the second, and a longer run of them makes empty articles."""
    return ("".join(f"{line}\n" for line in lines) + "\n").split("\n\n")


SEED = 12345
SEED_STEP = 13
_MD5 = re.compile(r"[0-9a-f]{32}")


def drawn_articles(articles_per_file: Sequence[int], wanted: int) -> np.ndarray:
    """int64 [wanted]: numbers of the withheld articles, counted over all files, ascending.

    File i of n gives ``int((i + 1) * wanted / n) - int(i * wanted / n)`` articles, drawn without repeats by
    ``random.Random(12345 + 13 * i)`` as ``int(random() * articles)``: the rule by which the benchmark's evaluation
    text was separated.

    Raises UserError: a file has fewer articles than it has to give.
    """
    num_files = len(articles_per_file)
    chosen: list[int] = []
    first = 0
    for index, available in enumerate(articles_per_file):
        quota = int((index + 1) * wanted * 1.0 / num_files) - int(index * wanted * 1.0 / num_files)
        if quota > available:
            reason = f"{wanted} articles of {num_files} files means {quota} of file {index + 1}, which has {available}"
            raise UserError("data.too-small", "--eval-articles", reason, "Withhold fewer articles or give more text")
        rng = random.Random(SEED + SEED_STEP * index)
        drawn: set[int] = set()
        while len(drawn) < quota:
            drawn.add(int(rng.random() * available))
        chosen += (first + number for number in sorted(drawn))
        first += available
    return np.asarray(chosen, np.int64)


def read_hashes(path: Path) -> set[bytes]:
    """The distinct MD5 sums of an ``eval.md5``: one of 32 hexadecimal digits a line. Raises UserError: the file cannot
    be read, or a line is no MD5 sum (names it)."""
    remedy = "Give the benchmark's eval.md5"
    with reading(path, remedy):
        lines = path.read_bytes().decode("ascii", "replace").split("\n")
    hashes = set()
    for number, line in enumerate(lines, 1):
        if line.strip():
            if not _MD5.fullmatch(line.strip()):
                raise UserError("data.row", path, f"line {number} is not an MD5 sum", remedy)
            hashes.add(bytes.fromhex(line))
    if not hashes:
        raise UserError("data.row", path, "holds no MD5 sum", remedy)
    return hashes
