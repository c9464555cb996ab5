"""WikiExtractor's lines to articles of sentences."""

import random
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbert.data.prepare import wiki_text
from mlbert.data.prepare.wiki_text import articles, drawn_articles, paragraphs, read_hashes, remove_markup
from user_errors import user_error

WIKI = b"""<doc id="1" url="https://example.org/1" title="Teapot">
Teapot

A teapot holds tea. It has a [[spout|beak]].

\x20
Many teapots are round.


</doc>
<doc id="2" url="https://example.org/2" title="Empty">
Empty

</doc>
<doc id="3" url="https://example.org/3" title="Cup">
Cup

A cup is small (see [[Teapot]]).<ref name="a">A book.</ref>

</doc>
"""


def read(text: bytes) -> list[str]:
    return list(paragraphs(Path("wiki_00"), text.splitlines(keepends=True)))


def test_tags_titles_and_empty_lines_go_and_breaks_stay() -> None:
    assert read(WIKI) == [
        *("A teapot holds tea. It has a beak.", "", "Many teapots are round.", ""),
        *("", "A cup is small (see Teapot).", ""),
    ]


def test_articles_as_the_benchmark_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentencex", reason="the splitter is in the extra `wiki`")
    lines = wiki_text.sentence_lines(read(WIKI), wiki_text.sentence_splitter())
    teapot = ["A teapot holds tea.\nIt has a beak.", "Many teapots are round."]
    assert list(articles(lines)) == [*teapot, "\nA cup is small (see Teapot).", "\n"]
    monkeypatch.setitem(sys.modules, "sentencex", None)
    with user_error("package.missing", "sentence splitting"):
        wiki_text.sentence_splitter()


def test_markup() -> None:
    for line, cleaned in {
        "plain text, 3 < 4 and a[i]": "plain text, 3 < 4 and ai",
        "a [[link]] and [[page|its text]]": "a link and its text",
        "[[File:x.png|thumb|A pot]]after": "after",
        "gone [[Category:Tea]] with its line": "",
        "[sic] alt=text": "sic text",
        "one<br>two<br />three<BR/>": "onetwothree",
        'said<ref name="x">Smith, p. 3</ref> so<ref name="y" /> far': "said so far",
        "<math>x^2</math> H<sup>2</sup> <small>o</small>": "x^2 H2 o",
        '<div class="x">in</div> <nowiki>raw</nowiki>': "in raw",
        "<unknown>stays</unknown>": "<unknown>stays</unknown>",
    }.items():
        assert remove_markup(line) == cleaned


def test_other_files_are_named_with_the_line() -> None:
    for text, words in (
        (b"Just text.\n", r"line 1\b"),
        (b'{"id": "1", "text": "Just text."}\n', r"line 1\b"),
        (WIKI.replace(b"</doc>", b"", 1), r"line 11\b"),
        (WIKI[:-8], r"line 18\b"),
    ):
        with user_error("data.damaged", "wiki_00") as caught:
            read(text)
        assert re.search(words, str(caught.value))
    with user_error("data.encoding", "wiki_00"):
        read(WIKI.replace(b"round", b"r\xffund"))


def plainly_drawn(counts: list[int], wanted: int) -> list[list[int]]:
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
    with user_error("data.too-small", "--eval-articles"):
        drawn_articles([10, 3], 9)


def test_hashes(tmp_path: Path) -> None:
    path = tmp_path / "eval.md5"
    path.write_text("d41d8cd98f00b204e9800998ecf8427e\n" * 2 + "0" * 32 + "\n")
    assert read_hashes(path) == {bytes.fromhex("d41d8cd98f00b204e9800998ecf8427e"), bytes(16)}
    for content in ("d41d8cd98f00b204e9800998ecf8427e\nno sum\n", "\n"):
        path.write_text(content)
        with user_error("data.row", path):
            read_hashes(path)
    with user_error("file.unreadable", tmp_path / "none"):
        read_hashes(tmp_path / "none")
