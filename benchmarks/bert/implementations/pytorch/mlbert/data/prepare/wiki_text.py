"""Convert WikiExtractor's output to articles of sentences,
in the format of the benchmark's text parts.

WikiExtractor writes ``<doc id=... title=...>``, the title, paragraphs separated by empty lines,
``</doc>``. The benchmark's pipeline drops tags, titles and empty lines, removes remaining wiki and
HTML markup, and writes one sentence per line. It writes a blank line for every ``</doc>`` and for
every line that is only white space. So an article can split in two, and a run of blank lines can
create empty articles. The benchmark's choice of evaluation articles (`drawn_articles`) counts them
all, so this module does too.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from mlbert.host.errors import UserError, import_package
from mlbert.host.files import read_plain

Split = Callable[[str], list[str]]

_EXTRACT = (
    "Give the folder that WikiExtractor wrote (files wiki_00, wiki_01, ... with <doc> elements)"
)
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
# The draw of the benchmark's evaluation articles: file i uses SEED + SEED_STEP * i.
SEED = 12345
SEED_STEP = 13
_MD5 = re.compile(r"[0-9a-f]{32}")


def sentence_splitter() -> Split:
    """Return the English splitter of the library sentencex (Wikimedia).

    Raises UserError: the library is not installed.
    """
    package = import_package("sentencex", "sentence splitting", "wiki")
    return lambda text: [sentence.strip() for sentence in package.segment("en", text)]


def splitter_name() -> str:
    """Return library and version, to record how a text was made."""
    sentence_splitter()
    return f"sentencex {version('sentencex')}"


def remove_markup(line: str) -> str:
    """Remove links, references and tags that WikiExtractor left in a line;
    the text inside a link or tag stays.
    """
    if "[" in line:
        if "[[Category:" in line:
            return ""
        links = 1
        while links:  # links may be nested: replace the innermost first
            line, links = _INNERMOST_LINK.subn(_link_text, line)
        line = _BRACKETED.sub(r"\1", line)
    if "<" in line:
        line = _TAG.sub("", _WITH_CONTENT.sub("", line))
    return line.replace("alt=", "")


def _link_text(link: re.Match[str]) -> str:
    """Return the visible text of ``[[target]]`` or ``[[target|text]]``;
    empty for media and links with more fields.
    """
    fields = link[1].split("|")
    namespace = fields[0].lstrip(":").partition(":")[0].lower()
    return "" if namespace in _MEDIA or len(fields) > 2 else fields[-1]


def paragraphs(path: Path, lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the cleaned paragraphs of one WikiExtractor file; "" ends an article.

    Raises UserError, which names the line: the file is not WikiExtractor's, is truncated,
    or is not UTF-8.
    """
    inside = skip_title = False
    number = 0
    for number, raw in enumerate(lines, 1):
        if raw.startswith(_DOC):
            if inside:
                raise UserError(
                    "data.damaged",
                    path,
                    f"line {number} begins an article within another",
                    _EXTRACT,
                )
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
            "data.damaged",
            path,
            f"is truncated: it ends within an article, at line {number}",
            _EXTRACT,
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
    """Split paragraphs into sentences, one per line; blank lines stay."""
    for line in lines:
        yield from split(line) if line else ("",)


def articles(lines: Iterable[str]) -> list[str]:
    """Return the articles of one file as the benchmark counts them: with an odd number of line ends
    between two articles, the second begins with a line end; a longer run creates empty articles.
    """
    return ("".join(f"{line}\n" for line in lines) + "\n").split("\n\n")


def drawn_articles(articles_per_file: Sequence[int], wanted: int) -> np.ndarray:
    """Return int64 [wanted]: ascending numbers of the withheld articles, counted over all files.

    File i of n contributes ``int((i + 1) * wanted / n) - int(i * wanted / n)`` articles, drawn
    without repeats by ``random.Random(12345 + 13 * i)`` as ``int(random() * articles)``: the rule
    that produced the benchmark's evaluation text.

    Raises UserError: a file has fewer articles than it must contribute.
    """
    num_files = len(articles_per_file)
    chosen: list[int] = []
    first = 0
    for index, available in enumerate(articles_per_file):
        quota = int((index + 1) * wanted * 1.0 / num_files) - int(index * wanted * 1.0 / num_files)
        if quota > available:
            reason = (
                f"{wanted} articles from {num_files} files require {quota} from file {index + 1}, "
                f"which has {available}"
            )
            raise UserError(
                "data.too-small",
                "--eval-articles",
                reason,
                "Withhold fewer articles or give more text",
            )
        rng = random.Random(SEED + SEED_STEP * index)
        drawn: set[int] = set()
        while len(drawn) < quota:
            drawn.add(int(rng.random() * available))
        chosen += (first + number for number in sorted(drawn))
        first += available
    return np.asarray(chosen, np.int64)


def read_hashes(path: Path) -> set[bytes]:
    """Return the distinct MD5 sums of an ``eval.md5``, which has 32 hexadecimal digits per line.

    Raises UserError: the file cannot be read, or a line is not an MD5 sum (names it).
    """
    remedy = "Give the benchmark's eval.md5"
    lines = read_plain(path, remedy).decode("ascii", "replace").split("\n")
    hashes = set()
    for number, line in enumerate(lines, 1):
        if line.strip():
            if not _MD5.fullmatch(line.strip()):
                raise UserError("data.row", path, f"line {number} is not an MD5 sum", remedy)
            hashes.add(bytes.fromhex(line))
    if not hashes:
        raise UserError("data.row", path, "contains no MD5 sum", remedy)
    return hashes
