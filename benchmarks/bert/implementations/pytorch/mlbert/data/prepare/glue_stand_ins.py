"""Make stand-ins for GLUE's files from the documentation of Python's standard library.

They have the exact file formats, and labels that follow from the texts:

================= ==================================================================================
cola sst2         1: a sentence; 0: its words in another order
stsb              5 times the share of words that both sentences have
all others        entailment, 1: one text is a part of the other; neutral, 0: a part of another
                  sentence; contradiction: a denied part of it; not_entailment: half of each
================= ==================================================================================

The mismatched files of mnli use modules that no training file uses.
The same Python installation produces the same files.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mlbert.data.formats.glue_tasks import TASKS
from mlbert.data.prepare.glue_files import Row, write_file
from mlbert.data.prepare.python_text import documents_by_file

# Of the stand-ins.
SIZES = {  # rows of each training file
    "mnli": 2400,
    "qqp": 1200,
    "cola": 1200,
    "sst2": 1200,
    "qnli": 1200,
    "rte": 480,
    "mrpc": 480,
    "stsb": 480,
}
EVALUATION_ROWS = 240  # rows of each evaluation file
SHORTEST = 7  # words of a sentence, at least
LONGEST = 24  # words of a sentence, at most
# Beginnings of the names of the modules that only the mismatched files of mnli use.
_MISMATCHED = (
    "lib2to3/",
    "distutils/",
    "idlelib/",
    "tkinter/",
    "unittest/",
    "ctypes/",
    "turtle",
    "typing",
    "ast.",
)
_DENIALS = (
    "It is not true that",
    "It is never the case that",
    "Nobody can say that",
    "It is wrong that",
)
# Labels of a text that is a part of another sentence.
_UNRELATED = ("not_entailment", "neutral", "0")
Words = list[str]


def make(
    folder: Path, size: float = 1.0, documents: Iterable[tuple[str, Sequence[str]]] | None = None
) -> None:
    """Write all stand-in tasks; ``size`` scales the numbers of rows,
    ``documents`` defaults to `documents_by_file`.
    """
    by_file = [(name, _sentences(document)) for name, document in documents or documents_by_file()]
    matched = [sentences for name, sentences in by_file if not name.startswith(_MISMATCHED)]
    held_out = _unique(matched[::6], set())
    elsewhere = _unique((s for name, s in by_file if name.startswith(_MISMATCHED)), set(held_out))
    kept = _unique((s for number, s in enumerate(matched) if number % 6), {*held_out, *elsewhere})
    sides = {
        "train.tsv": kept,
        "dev.tsv": held_out,
        "dev_matched.tsv": held_out,
        "dev_mismatched.tsv": elsewhere,
    }
    for task, rows in SIZES.items():
        files = (
            ("train.tsv", "dev_matched.tsv", "dev_mismatched.tsv")
            if task == "mnli"
            else ("train.tsv", "dev.tsv")
        )
        for file in files:
            count = max(12, round(size * (rows if file == "train.tsv" else EVALUATION_ROWS)))
            rows_of_file = _rows(
                task, random.Random(f"{task} {file}"), list(sides[file].values()), count
            )
            write_file(folder / TASKS[task].folder / file, TASKS[task], rows_of_file)


def _rows(task: str, generator: random.Random, sentences: list[Words], count: int) -> Iterator[Row]:
    classes = TASKS[task].classes
    for number in range(count):
        first, other = generator.sample(sentences, 2)
        if task == "stsb":
            second = _replaced(generator, first, other, number % 6 / 5)
            common = len(set(first) & set(second)) / len(set(first) | set(second))
            yield (" ".join(first), " ".join(second)), f"{5 * common:.3f}"
            continue
        label = classes[number % len(classes)]
        if task in ("cola", "sst2"):
            yield (" ".join(first if label == "1" else generator.sample(first, len(first))),), label
            continue
        is_denied = label == "contradiction" or (label == "not_entailment" and number % 4 == 3)
        part = " ".join(_part(generator, other if label in _UNRELATED and not is_denied else first))
        if is_denied:
            part = f"{generator.choice(_DENIALS)} {part}"
        yield ((part, " ".join(first)) if task == "qnli" else (" ".join(first), part)), label


def _part(generator: random.Random, words: Words) -> Words:
    """Return a contiguous part with at least half of the words."""
    length = generator.randint((len(words) + 1) // 2, len(words) - 1)
    first = generator.randint(0, len(words) - length)
    return words[first : first + length]


def _replaced(generator: random.Random, words: Words, other: Words, share: float) -> Words:
    """Replace a share of the words by words of another sentence."""
    places = set(generator.sample(range(len(words)), round(share * len(words))))
    return [
        generator.choice(other) if place in places else word for place, word in enumerate(words)
    ]


def _sentences(document: Sequence[str]) -> list[Words]:
    found = (sentence.split() for sentence in document)
    return [words for words in found if SHORTEST <= len(words) <= LONGEST]


def _unique(parts: Iterable[list[Words]], without: set[str]) -> dict[str, Words]:
    found = {" ".join(words): words for part in parts for words in part}
    return {text: words for text, words in found.items() if text not in without}
