"""Prose out of documentation strings, comments and marked-up text, as sentences.

Code, tables and mark-up signs are left out. A sentence ends at ``.``, ``!`` or ``?`` (with closing quotes or brackets)
before white space and something that may begin one: a capital, a digit, an opening quote or bracket, a back-tick. Known
abbreviations, single letters and numbered list marks do not end one. A lower-case beginning is not recognised; then two
sentences stay together.
"""

from __future__ import annotations

import re

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
_WORD = re.compile(r"\b[A-Za-z]{2,}\b")
_HYPHEN = re.compile(r"([a-z]-) (?=[a-z])(?!(?:and|or|to)\b)")  # a compound word cut at the end of a line
_URL = re.compile(r"<?\bhttps?://\S+")

_ABBREVIATION = re.compile(
    r"e\.g|i\.e|etc|vs|cf|viz|resp|approx|incl|mr|mrs|ms|dr|prof|sr|jr|st|figs?|eq|sec|no|vol|ed|al|inc|ltd|co|dept"
    r"|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec|pp?"
)
_BOUNDARY = re.compile(r"""[.!?]["'”’)\]]*(\s+)(?=["'“‘(\[`*<_]*[A-Z0-9])""")
_LAST_WORD = re.compile(r"[\w.]+$")


def split_sentences(text: str) -> list[str]:
    """Sentences of one paragraph; white space within becomes single spaces."""
    text = " ".join(text.split())
    sentences, start = [], 0
    for match in _BOUNDARY.finditer(text):
        if text[match.start()] == "." and _continues(text[start : match.start()]):
            continue
        sentences.append(text[start : match.start(1)])
        start = match.end()
    if start < len(text):
        sentences.append(text[start:])
    return sentences


def _continues(before: str) -> bool:
    """Whether the full stop after ``before`` belongs to an abbreviation, an initial or a list mark."""
    match = _LAST_WORD.search(before)
    if match is None:
        return False
    word = match.group().lower()
    return (
        _ABBREVIATION.fullmatch(word) is not None
        or (len(word) == 1 and word.isalpha())
        or (match.start() == 0 and word.isdigit())
    )


def paragraphs(text: str) -> list[str]:
    """Blocks of prose: separated by blank lines or bullets, literal blocks and tables left out."""
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
            literal_next, literal_indent = False, indent if indent > 0 else None
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
    """A paragraph without mark-up signs and addresses."""
    text = _ROLE.sub(r"\1", paragraph)
    text = _TICKS.sub(r"\1", text)
    text = _URL.sub("", text)
    text = _EMPHASIS.sub(r"\1", text)
    text = _SIGNATURE.sub("", text) if _SIGNATURE.match(text) and len(text.split()) > 6 else text
    return text.replace("::", ":").strip(" |*")


def is_prose(sentence: str) -> bool:
    """Whether a sentence reads as English: enough words, mostly letters."""
    words = len(_WORD.findall(sentence))
    letters = len(_LETTERS.findall(sentence))
    return words >= MIN_WORDS and letters >= MIN_LETTERS * len(sentence) and words >= 0.5 * len(sentence.split())


def prose_sentences(text: str) -> list[str]:
    """Sentences of English prose in a documentation text, in order."""
    return [
        sentence
        for paragraph in paragraphs(text)
        for sentence in split_sentences(plain(paragraph))
        if is_prose(sentence)
    ]
