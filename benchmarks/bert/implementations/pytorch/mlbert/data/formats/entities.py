"""Entities in words with tags: B- begins one, I- continues it, O is outside.

Tags of other schemes (E- ends, S- is a single word, no B- at the beginning) are read as the program
conlleval of CoNLL-2000 reads them, and the Python package seqeval by default: a word continues the
entity before it if its tag begins with I or E, the one before with B or I, and both name the same
kind. Every other word with a tag but O begins an entity.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

OUTSIDE = "O"
_TAG = re.compile(r"[BIES]-.+")


class Entity(NamedTuple):
    """An entity: its kind, the first word, and the word after the last."""

    kind: str
    first: int
    end: int


def is_entity_tag(tag: str) -> bool:
    """Return whether a tag is O, or a letter of a scheme and a kind: B-PER."""
    return tag == OUTSIDE or _TAG.fullmatch(tag) is not None


def entities_of(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of one text, in order."""
    found: list[Entity] = []
    before = OUTSIDE
    for word, tag in enumerate(tags):
        letter, _, kind = tag.partition("-")
        letter_before, _, kind_before = before.partition("-")
        continues = letter in ("I", "E") and letter_before in ("B", "I") and kind == kind_before
        if continues:
            found[-1] = found[-1]._replace(end=word + 1)
        elif tag != OUTSIDE:
            found.append(Entity(kind, word, word + 1))
        before = tag
    return found


def tags_of(entities: Sequence[Entity], num_words: int) -> list[str]:
    """Return the tags B-, I- and O of a text with these entities, which do not overlap."""
    tags = [OUTSIDE] * num_words
    for entity in entities:
        tags[entity.first : entity.end] = [f"I-{entity.kind}"] * (entity.end - entity.first)
        tags[entity.first] = f"B-{entity.kind}"
    return tags


class Counts(NamedTuple):
    """Entities that are right, predicted and labeled."""

    right: int
    predicted: int
    labeled: int

    @property
    def precision(self) -> float:
        """Share of the predicted entities that are right, 0 if there is none."""
        return self.right / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Share of the labeled entities that are found, 0 if there is none."""
        return self.right / self.labeled if self.labeled else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of both, 0 if there is no entity."""
        total = self.predicted + self.labeled
        return 2 * self.right / total if total else 0.0


def count_entities(
    predicted: Sequence[Sequence[str]], labeled: Sequence[Sequence[str]]
) -> dict[str, Counts]:
    """Return the counts of each kind, by name in order, from the tags of texts.

    An entity is right if its kind and all its words are.
    """
    numbers: dict[str, list[int]] = {}
    for guess, truth in zip(predicted, labeled, strict=True):
        guessed = set(entities_of(guess))
        true = set(entities_of(truth))
        for place, part in enumerate((guessed & true, guessed, true)):
            for entity in part:
                numbers.setdefault(entity.kind, [0, 0, 0])[place] += 1
    return {kind: Counts(*numbers[kind]) for kind in sorted(numbers)}


def sum_counts(counts: Sequence[Counts]) -> Counts:
    """Return the counts of all kinds together."""
    return Counts(
        right=sum(part.right for part in counts),
        predicted=sum(part.predicted for part in counts),
        labeled=sum(part.labeled for part in counts),
    )
