"""Extract English prose from docstrings, comments and marked-up text: sentences without code,
tables and mark-up.
"""

from __future__ import annotations

import re

from mlbert.data.prepare.sentences import split_sentences

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
