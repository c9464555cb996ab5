"""Sentences of held-out text with a word masked: what shows people what a model has learnt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from mlbert.data.formats.tokenizer import Tokenizer
from mlbert.data.prepare.prose import split_sentences

COUNT = 10
_WORDS = range(7, 26)  # of a sentence
_LEAST_LETTERS = 3  # of the word that is masked
_LOOKED_AT = 20_000  # sentences


@dataclass(frozen=True)
class MaskedSentence:
    """A text with one [MASK], and the word that stood there."""

    text: str
    answer: str


def choose_sentences(texts: Iterable[str], tokenizer: Tokenizer) -> list[MaskedSentence]:
    """Up to `COUNT` sentences, the same for the same texts; each masks one word, an entry of the vocabulary."""
    found: dict[str, str] = {}
    for sentence in islice(_sentences(texts), _LOOKED_AT):
        if len(sentence.split()) in _WORDS and "[" not in sentence:
            found.setdefault(hashlib.sha256(sentence.encode()).hexdigest(), sentence)
    chosen = []
    for digest in sorted(found):
        masked = _mask(found[digest], int(digest[:8], 16), tokenizer)
        if masked is not None:
            chosen.append(masked)
        if len(chosen) == COUNT:
            break
    return chosen


def _sentences(texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        for paragraph in text.split("\n\n"):
            sentences = split_sentences(paragraph)
            yield from sentences[1:-1] or sentences  # a document may be cut within its first and last


def _mask(sentence: str, number: int, tokenizer: Tokenizer) -> MaskedSentence | None:
    """Masks one of the words that are entries; None: there is none."""
    words = sentence.split()
    places = [
        place
        for place, word in enumerate(words)
        if word.isalpha() and len(word) >= _LEAST_LETTERS and len(tokenizer.encode(word)) == 1
        if tokenizer.encode(word)[0] not in tokenizer.special_ids
    ]
    if not places:
        return None
    place = places[number % len(places)]
    masked = [*words[:place], "[MASK]", *words[place + 1 :]]
    return MaskedSentence(" ".join(masked), words[place].lower() if tokenizer.lower_case else words[place])
