"""Simple measures of a document: its letters, its markup, and the scripts of its letters."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping

LEAST_SHARE = 0.01  # of the letters, from which a script is named
_LETTERS = re.compile(r"[^\W\d_]+")
_ASCII_OTHERS = bytes(code for code in range(128) if not chr(code).isalpha())
_MARKUP = re.compile(r"</?[A-Za-z][^<>\n]*>|\{\{|\}\}|\[\[|\]\]|&[a-z]+;")


def letters_of(text: str) -> bytes:
    """Return the letters of a text without case in UTF-8, by which repeats are found; all of the
    text if it has no letter.
    """
    if text.isascii():
        letters = text.encode().lower().translate(None, _ASCII_OTHERS)
    else:
        # The regular expression is slower by the match, so it gets the text in few long words.
        joined = text.casefold().encode().translate(None, _ASCII_OTHERS).decode()
        letters = "".join(_LETTERS.findall(joined)).encode()
    return letters or text.encode()


def markup_of(text: str) -> int:
    """Return the number of characters that are tags, entities or wiki syntax."""
    return sum(len(found.group()) for found in _MARKUP.finditer(text))


def scripts_of(characters: Mapping[str, int]) -> Counter[str]:
    """Return the number of letters of each script, such as LATIN; ``characters`` counts each."""
    found: Counter[str] = Counter()
    for char, count in characters.items():
        if char.isalpha():
            found[unicodedata.name(char, "other").split()[0].split("-")[0]] += count
    return found


def script_words(scripts: Counter[str]) -> str:
    """Return the scripts of at least `LEAST_SHARE` of the letters, as ``97 % Latin, 3 % CJK``."""
    total = scripts.total()
    shares = {
        name: count / total for name, count in scripts.most_common() if count >= LEAST_SHARE * total
    }
    return ", ".join(
        f"{share:.0%} {name if name == 'CJK' else name.capitalize()}"
        for name, share in shares.items()
    )
