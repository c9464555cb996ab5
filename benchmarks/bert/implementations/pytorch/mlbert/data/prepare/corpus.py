"""Documents of sentences: extract them from text files and mark-up,
and split them into training and evaluation text.

`split` drops repeated documents and sentences, holds out documents by a hash of their text and a
seed, and drops training sentences that nearly repeat an evaluation sentence.

`prose_sentences` extracts English prose from docstrings, comments and marked-up text; it drops
code, tables and mark-up. A sentence ends at ``.``, ``!`` or ``?`` (with closing quotes or brackets)
before white space and a possible start: a capital, a digit, an opening quote or bracket, or a
backtick. Known abbreviations, single letters and numbered list marks do not end one. A sentence
that begins in lower case is not recognised and stays joined to the one before.

`documents` reads every ``*.txt`` below a folder. With ``one_per_line``, each line is a sentence and
a blank line ends a document. Otherwise each file is one document and its paragraphs are split into
sentences.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path

from mlbert.data.formats.manifest import check_folder, file_sha256, reading
from mlbert.data.prepare.corpus_files import IN_FOLDER, text_blocks, text_lines
from mlbert.host.errors import UserError
from mlbert.host.files import plain_size, write_atomically

SHINGLE_WORDS = 5
MIN_SENTENCES = 2  # of a document
NEAR_DUPLICATE = 0.5  # fraction of a sentence's word runs that also occur on the other side
_WORD = re.compile(r"\w+")


@dataclass
class Corpus:
    """The training and evaluation sides of a text, each a list of documents of sentences,
    and counts of dropped sentences.
    """

    train: list[list[str]]
    evaluation: list[list[str]]
    dropped: dict[str, int] = field(default_factory=dict)

    def summary(self) -> dict[str, int]:
        """Return counts for the report."""
        counts = {}
        for name, side in (("train", self.train), ("eval", self.evaluation)):
            counts[f"{name}_documents"] = len(side)
            counts[f"{name}_sentences"] = sum(map(len, side))
            counts[f"{name}_words"] = sum(
                len(sentence.split()) for document in side for sentence in document
            )
        return {**counts, **self.dropped}


def _words(sentence: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(sentence.lower()))


def _shingles(sentence: str) -> set[tuple[str, ...]]:
    words = _words(sentence)
    return {words[i : i + SHINGLE_WORDS] for i in range(max(1, len(words) - SHINGLE_WORDS + 1))}


def drop_repeats(documents: Iterable[list[str]]) -> tuple[list[list[str]], int]:
    """Keep the first of all sentences with the same words and count the dropped ones; documents
    that become empty are dropped.
    """
    seen: set[tuple[str, ...]] = {()}
    kept = []
    dropped = 0
    for document in documents:
        fresh = []
        for sentence in document:
            words = _words(sentence)
            if words not in seen:
                seen.add(words)
                fresh.append(sentence)
        dropped += len(document) - len(fresh)
        if fresh:
            kept.append(fresh)
    return kept, dropped


def is_held_out(document: list[str], share: float, seed: int) -> bool:
    """Return whether a document is for evaluation, by SHA-256 of the seed and its text,
    so its position does not matter.
    """
    text = "\n".join([str(seed), *document]).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") < share * 2**64


def cut(document: list[str], most: int) -> list[list[str]]:
    """Cut a document into nearly equal pieces of at most ``most`` sentences."""
    pieces = -(-len(document) // most)
    edges = [len(document) * piece // pieces for piece in range(pieces + 1)]
    return [document[first:end] for first, end in pairwise(edges)]


def split(documents: Iterable[list[str]], share: float, seed: int, *, max_sentences: int) -> Corpus:
    """De-duplicate, cut, hold out, and drop near-repeats of evaluation sentences from the training
    side. Documents of fewer than `MIN_SENTENCES` are dropped.

    Args:
        share: fraction of the documents to hold out, between 0 and 1.
        max_sentences: longer documents are cut into pieces,
            so that none dominates the evaluation side.

    Raises UserError: one side is empty.
    """
    unique, repeats = drop_repeats(documents)
    corpus = Corpus([], [])
    for document in (piece for whole in unique for piece in cut(whole, max_sentences)):
        if len(document) >= MIN_SENTENCES:
            (corpus.evaluation if is_held_out(document, share, seed) else corpus.train).append(
                document
            )
    held_out = {
        shingle
        for document in corpus.evaluation
        for text in document
        for shingle in _shingles(text)
    }
    near = 0
    train = []
    for document in corpus.train:
        kept = [text for text in document if not _nearly_repeats(text, held_out)]
        near += len(document) - len(kept)
        if len(kept) >= MIN_SENTENCES:
            train.append(kept)
    corpus.train = train
    corpus.dropped = {"repeated_sentences": repeats, "near_repeats_of_eval": near}
    if not corpus.train or not corpus.evaluation:
        side = "training" if not corpus.train else "evaluation"
        reason = f"no document is left for {side}"
        raise UserError(
            "data.too-small", "input text", reason, "Give more text or another --eval-share"
        )
    return corpus


def _nearly_repeats(sentence: str, held_out: set[tuple[str, ...]]) -> bool:
    shingles = _shingles(sentence)
    return len(shingles & held_out) >= NEAR_DUPLICATE * len(shingles)


def write_text(path: Path, documents: list[list[str]]) -> None:
    """Write one sentence per line and a blank line between documents,
    like the benchmark's text parts.
    """
    write_atomically(path, "\n\n".join("\n".join(document) for document in documents) + "\n")


MIN_WORDS = 4
MIN_LETTERS = 0.7

_ROLE = re.compile(r":[a-z:+-]+:`~?([^`<]*?)(?:\s*<[^`>]*>)?`")
_TICKS = re.compile(r"``?([^`]+?)(?:\s*<[^`<>]*>)?``?_{0,2}")
_EMPHASIS = re.compile(r"(?<![\w*])\*{1,2}(?=[\w(\"'])([^*]+?)(?<=[\w.)\"',?!])\*{1,2}(?![\w*])")
_BULLET = re.compile(r"^\s*(?:[-*+•#]|\d+[.)]|\([a-z0-9]\)|[a-z]\))\s+")
_FIELD = re.compile(r"^\s*(?:[@:](?:param|type|return|returns|rtype|raise|raises)\b[^:]*:)\s*")
_RULE = re.compile(r"^\s*([=\-~^\"'*+#_.])\1{2,}\s*$|^\s*[=+|-]{3,}[\s=+|-]*$")
_CODE_START = re.compile(r"^\s*(?:>>>|\.\.\.(?:\s|$)|\.\. |\$ |[|+]\s)")
_SIGNATURE = re.compile(r"^\s*[\w.]+\([^)]*\)(?:\s*->\s*[\w.\[\], |]+)?\s*(?:--|:)?\s*")
_LETTERS = re.compile(r"[A-Za-z\s]")
_LONG_WORD = re.compile(r"\b[A-Za-z]{2,}\b")
# A hyphenated word broken at the end of a line.
_HYPHEN = re.compile(r"([a-z]-) (?=[a-z])(?!(?:and|or|to)\b)")
_URL = re.compile(r"<?\bhttps?://\S+")

_ABBREVIATION = re.compile(
    r"e\.g|i\.e|etc|vs|cf|viz|resp|approx|incl|mr|mrs|ms|dr|prof|sr|jr|st|figs?|eq|sec|no|vol|ed|al|inc|ltd|co|dept"
    r"|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec|pp?"
)
_BOUNDARY = re.compile(r"""[.!?]["'”’)\]]*(\s+)(?=["'“‘(\[`*<_]*[A-Z0-9])""")
_LAST_WORD = re.compile(r"[\w.]+$")
_LONGEST_WORD = 64  # characters before a full stop that are looked at


def split_sentences(text: str) -> list[str]:
    """Return the sentences of one paragraph, with white space reduced to single spaces."""
    text = " ".join(text.split())
    sentences = []
    start = 0
    for match in _BOUNDARY.finditer(text):
        if text[match.start()] == "." and _continues(text, start, match.start()):
            continue
        sentences.append(text[start : match.start(1)])
        start = match.end()
    if start < len(text):
        sentences.append(text[start:])
    return sentences


def _continues(text: str, start: int, end: int) -> bool:
    """Return whether the full stop at ``end`` belongs to an abbreviation,
    an initial or a list mark.

    ``start`` is where its sentence begins. Only a number that begins there is a list mark.
    """
    begin = max(start, end - _LONGEST_WORD)
    match = _LAST_WORD.search(text[begin:end])
    if match is None:
        return False
    word = match.group().lower()
    if match.start() == 0 and word.isdigit():
        return text[start:end].isdigit()
    return _ABBREVIATION.fullmatch(word) is not None or (len(word) == 1 and word.isalpha())


def paragraphs(text: str) -> list[str]:
    """Return blocks of prose, separated by blank lines or bullets,
    without literal blocks and tables.
    """
    blocks: list[list[str]] = [[]]
    literal_indent: int | None = None
    literal_next = False
    for line in text.expandtabs().splitlines():
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if not stripped:
            blocks.append([])
            continue
        if literal_next:
            literal_next = False
            literal_indent = indent if indent > 0 else None
        if literal_indent is not None:
            if indent >= literal_indent:
                continue
            literal_indent = None
        if _RULE.match(line) or _CODE_START.match(line):
            blocks.append([])
            continue
        if _BULLET.match(line) or _FIELD.match(line):
            blocks.append([])
            line = _FIELD.sub("", _BULLET.sub("", line))
        blocks[-1].append(line.strip())
        literal_next = stripped.endswith("::")
    return [_HYPHEN.sub(r"\1", " ".join(block)) for block in blocks if block]


def plain(paragraph: str) -> str:
    """Remove mark-up and URLs from a paragraph."""
    text = _ROLE.sub(r"\1", paragraph)
    text = _TICKS.sub(r"\1", text)
    text = _URL.sub("", text)
    text = _EMPHASIS.sub(r"\1", text)
    text = _SIGNATURE.sub("", text) if _SIGNATURE.match(text) and len(text.split()) > 6 else text
    return text.replace("::", ":").strip(" |*")


def is_prose(sentence: str) -> bool:
    """Return whether a sentence looks like English: enough words, mostly letters."""
    words = len(_LONG_WORD.findall(sentence))
    letters = len(_LETTERS.findall(sentence))
    return (
        words >= MIN_WORDS
        and letters >= MIN_LETTERS * len(sentence)
        and words >= 0.5 * len(sentence.split())
    )


def prose_sentences(text: str) -> list[str]:
    """Return the English prose sentences of a documentation text, in order."""
    return [
        sentence
        for paragraph in paragraphs(text)
        for sentence in split_sentences(plain(paragraph))
        if is_prose(sentence)
    ]


def text_files(folder: Path) -> list[Path]:
    """Return the ``*.txt`` files below a folder, sorted by relative name.

    Raises UserError: the folder does not exist, cannot be read, or has no text file; or one is a
    link to nothing, a pipe or a device.
    """
    remedy = "Give a folder with *.txt files"
    check_folder(folder, remedy)
    with reading(folder, remedy):
        os.listdir(folder)  # rglob treats an unreadable folder as empty
    files = [path for path in folder.rglob("*.txt") if not path.is_dir()]
    for path in files:
        plain_size(path, IN_FOLDER)
    if not files:
        raise UserError("data.missing", folder, "holds no *.txt file", remedy)
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def name_note(folder: Path) -> str:
    """Return a sentence about the visible files below a folder that are not `text_files`,
    or an empty text.
    """
    names = sorted(
        path.name for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")
    )
    kinds = Counter(
        Path(name).suffix or "without suffix" for name in names if not name.endswith(".txt")
    )
    listed = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common(5))
    return (
        f"{kinds.total():,} of {len(names):,} files are left out because of their names: {listed}"
        if kinds
        else ""
    )


def keep_out(folder: Path, out: Path) -> None:
    """Check that ``out`` is not in the input folder.

    Raises UserError: it is, so its text files would be read the next time.
    """
    if folder.resolve() in (out.resolve(), *out.resolve().parents):
        raise UserError(
            "file.in-input",
            out,
            f"is the input folder {folder} or inside it",
            "Choose another --out",
        )


def documents(folder: Path, one_per_line: bool = False) -> Iterator[list[str]]:
    """Yield the documents of a folder as the module docstring describes.

    Raises UserError: a file cannot be read or is not UTF-8 (names the line),
    or all files are empty.
    """
    empty = True
    for path in text_files(folder):
        for document in _documents(text_lines(path, "Cut it into several"), one_per_line):
            empty = False
            yield document
    if empty:
        raise UserError("data.empty", folder, "its text files are all empty", "Give text")


def source_name(folder: Path, one_per_line: bool) -> dict[str, str | bool]:
    """Return an identifier of the text, which is stored with the data and compared on a rerun.

    Raises UserError as `documents`.
    """
    state = hashlib.sha256()
    for path in text_files(folder):
        state.update(f"{path.relative_to(folder).as_posix()}\0{file_sha256(path)}\n".encode())
    return {"kind": "text", "sha256": state.hexdigest(), "one_per_line": one_per_line}


def _documents(lines: Iterable[str], one_per_line: bool) -> Iterator[list[str]]:
    blocks = text_blocks(chain.from_iterable(map(str.splitlines, lines)))
    if one_per_line:
        yield from ([line.strip() for line in block] for block in blocks)
    elif sentences := [
        sentence for block in blocks for sentence in split_sentences(" ".join(block))
    ]:
        yield sentences
