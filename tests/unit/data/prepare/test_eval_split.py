"""The choice of the evaluation articles."""

from __future__ import annotations

import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mlbert.data.prepare.wiki_text import drawn_articles, read_hashes
from user_errors import user_error


def plainly_drawn(counts: list[int], wanted: int) -> list[list[int]]:
    """The published rule, file by file."""
    chosen = []
    for file_id, count in enumerate(counts):
        quota = int((file_id + 1) * wanted / len(counts)) - int(file_id * wanted / len(counts))
        rng = random.Random(12345 + file_id * 13)
        ids: list[int] = []
        while len(ids) < quota:
            new = int(rng.random() * count)
            if new not in ids:
                ids.append(new)
        chosen.append(sorted(ids))
    return chosen


@given(st.lists(st.integers(8, 40), min_size=1, max_size=30), st.data())
def test_equals_the_published_rule(counts: list[int], data: st.DataObject) -> None:
    wanted = data.draw(st.integers(0, 8 * len(counts)))
    got = drawn_articles(counts, wanted).tolist()
    starts = [sum(counts[:i]) for i in range(len(counts))]
    plain = plainly_drawn(counts, wanted)
    assert got == [start + i for start, ids in zip(starts, plain, strict=True) for i in ids]
    assert len(got) == wanted


def test_too_few_articles_name_the_file() -> None:
    with user_error("data.too-small", "--eval-articles"):
        drawn_articles([10, 3], 9)


def test_hashes(tmp_path: Path) -> None:
    path = tmp_path / "eval.md5"
    path.write_text("d41d8cd98f00b204e9800998ecf8427e\n" * 2 + "0" * 32 + "\n")
    assert read_hashes(path) == {bytes.fromhex("d41d8cd98f00b204e9800998ecf8427e"), bytes(16)}
    path.write_text("d41d8cd98f00b204e9800998ecf8427e\nno sum\n")
    with user_error("data.row", path):
        read_hashes(path)
    path.write_text("\n")
    with user_error("data.row", path):
        read_hashes(path)
    with user_error("file.unreadable", tmp_path / "none"):
        read_hashes(tmp_path / "none")
