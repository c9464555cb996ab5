"""Plain text to sentences, by a few rules of our own.

A sentence ends at ``.``, ``!`` or ``?`` (with closing quotes or brackets) before white space and something that may
begin one: a capital, a digit, an opening quote or bracket, a back-tick. Known abbreviations, single letters and
numbered list marks do not end one. A lower-case beginning is not recognised; then two sentences stay together.
"""

from __future__ import annotations

import re

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
