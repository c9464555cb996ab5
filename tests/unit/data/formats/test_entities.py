"""Entities in tags: against a slow reference, and against what seqeval 1.2.2 counted."""

import random

import pytest

from mlbert.data.formats.entities import count_entities, entities_of, sum_counts, tags_of
from mlbert.data.formats.tagged_words import split_words, word_places

KINDS = ("PER", "LOC")


def reference(tags: list[str]) -> set[tuple[str, int, int]]:
    """Return the entities by conlleval's questions: does one end before a word, does one begin."""

    def ends(before: str, tag: str) -> bool:
        return before[0] in "ES" or tag[0] in "BSO" or before[2:] != tag[2:]

    def begins(before: str, tag: str) -> bool:
        if tag == "O":
            return False
        return tag[0] in "BS" or before[0] in "ESO" or before[2:] != tag[2:]

    found = set()
    open_at = None
    before = "O"
    for word, tag in enumerate([*tags, "O"]):
        if open_at is not None and ends(before, tag):
            found.add((before[2:], open_at, word))
            open_at = None
        if begins(before, tag):
            open_at = word
        before = tag
    return found


def random_tags(draw: random.Random, count: int) -> list[str]:
    known = ["O", *(f"{letter}-{kind}" for letter in "BIES" for kind in KINDS)]
    return [draw.choice(known) for _ in range(count)]


def test_entities_are_those_of_the_reference() -> None:
    draw = random.Random(0)
    for _ in range(3000):
        tags = random_tags(draw, draw.randrange(9))
        assert {tuple(entity) for entity in entities_of(tags)} == reference(tags), tags


def test_tags_come_back() -> None:
    draw = random.Random(1)
    for _ in range(300):
        tags = random_tags(draw, 8)
        found = entities_of(tags)
        assert entities_of(tags_of(found, 8)) == found


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_counts_are_those_of_the_reference(seed: int) -> None:
    draw = random.Random(seed)
    labeled = [random_tags(draw, 6) for _ in range(50)]
    predicted = [tags if draw.random() < 0.5 else random_tags(draw, 6) for tags in labeled]
    total = sum_counts(list(count_entities(predicted, labeled).values()))
    pairs = [(reference(a), reference(b)) for a, b in zip(predicted, labeled, strict=True)]
    assert total.right == sum(len(a & b) for a, b in pairs)
    assert total.predicted == sum(len(a) for a, _ in pairs)
    assert total.labeled == sum(len(b) for _, b in pairs)
    precision = total.right / total.predicted
    recall = total.right / total.labeled
    assert total.f1 == pytest.approx(2 * precision * recall / (precision + recall))


def test_words_of_a_text() -> None:
    text = "Ada, (b. 1815)  visited 東京 and नई दिल्ली."
    words = split_words(text)
    assert "".join(words) == text
    expected = "Ada , ( b . 1815 ) visited 東 京 and नई दिल्ली ."
    assert [word.strip() for word in words] == expected.split()
    assert [text[start:end] for start, end in word_places(words)] == [w.strip() for w in words]
    assert split_words("Parisian", [5]) == ["Paris", "ian"]
