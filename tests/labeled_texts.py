"""Labelled sentences for tests of fine-tuning."""

import csv
import random
from collections.abc import Collection
from pathlib import Path

PLACES = {
    "warm": ["sun", "fire", "desert"],
    "cold": ["snow", "ice", "glacier"],
    "wet": ["rain", "river", "lake"],
}
OTHER = ["the", "a", "was", "near", "today", "seen", "old", "new"]


def write_csv(path: Path, *rows: list[object]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def sentences(
    count: int, kinds: Collection[str] = tuple(PLACES), seed: int = 1
) -> list[tuple[str, str]]:
    """Return texts with three words of their kind, and the kinds."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        kind = draw.choice(list(kinds))
        words = [*draw.choices(PLACES[kind], k=3), *draw.choices(OTHER, k=5), f"number{number}"]
        draw.shuffle(words)
        found.append((" ".join(words), kind))
    return found
