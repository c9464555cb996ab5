"""Split a paragraph of English text into sentences.

A sentence ends at ``.``, ``!`` or ``?`` (with closing quotes or brackets) before white space and a
possible start: a capital, a digit, an opening quote or bracket, or a backtick. Known abbreviations,
single letters and numbered list marks do not end one. A sentence that begins in lower case is not
recognized and stays joined to the one before.
"""

from __future__ import annotations

import re

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
