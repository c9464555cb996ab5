"""Split documents of sentences into training and evaluation text that share no sentence.

`split` drops repeated documents and sentences, holds out documents by a hash of their text and a
seed, and drops training sentences that nearly repeat an evaluation sentence.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from mlbert.host.errors import UserError
from mlbert.host.files import write_atomically

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
        if len(document) < MIN_SENTENCES:
            continue
        if is_held_out(document, share, seed):
            corpus.evaluation.append(document)
        else:
            corpus.train.append(document)
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
