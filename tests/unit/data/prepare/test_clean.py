"""WikiExtractor's lines to articles, text parts and evaluation text; what a folder holds."""

import hashlib
import json
import random
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbert.data.prepare import clean as module
from mlbert.data.prepare import wiki_text
from mlbert.data.prepare.clean import (
    CleanOptions,
    clean,
    file_articles,
    missing_files,
    part_bounds,
    recognize,
)
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.tfrecords import hdf5_to_tfrecords
from mlbert.data.prepare.wiki_text import (
    articles,
    drawn_articles,
    paragraphs,
    read_hashes,
    remove_markup,
)
from nvidia_shards import bert_rows, write_variable
from programs import write_files
from stored_sets import tree
from tfrecord_examples import write_parts
from user_errors import user_error

pytest.importorskip("sentencex", reason="the splitter is in the extra `wiki`")

OPTIONS = CleanOptions(num_parts=3, eval_articles=5)
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


@pytest.fixture
def wiki(tmp_path: Path) -> Path:
    """Write four files of 12 articles; some have a line of white space, which splits them,
    some have no text.
    """
    rng = random.Random(7)
    names = ("AA/wiki_00", "AA/wiki_01", "BB/wiki_00", "BB/wiki_01")
    files = {
        name: "".join(article(rng, number * 12 + i) for i in range(12))
        for number, name in enumerate(names)
    }
    return write_files(tmp_path / "wiki", files)


def article(rng: random.Random, number: int) -> str:
    def sentence(i: int) -> str:
        return f"Sentence {i} of article {number} has {rng.randrange(10_000)} words."

    paragraphs = [
        " ".join(map(sentence, range(rng.randrange(1, 6)))) for _ in range(rng.randrange(4))
    ]
    if number % 5 == 0:
        paragraphs.insert(len(paragraphs) // 2, " ")
    title = (
        f'<doc id="{number}" url="https://example.org/{number}" title="Article '
        f'{number}">\nArticle {number}\n\n'
    )
    return title + "".join(f"{paragraph}\n\n" for paragraph in paragraphs) + "\n</doc>\n"


@pytest.mark.parametrize("workers", [1, 2])
def test_parts_and_evaluation_text(wiki, tmp_path, workers, monkeypatch):
    monkeypatch.setattr(module, "UNIT_BYTES", 3000)
    out = tmp_path / "out"
    summary = clean(wiki, out, OPTIONS, executor=Executor(workers=workers))
    files = [list(file_articles(path)) for path in sorted(wiki.glob("*/wiki_*"))]
    chosen = set(drawn_articles([len(found) for found in files], 5).tolist())
    numbered = list(enumerate(article for found in files for article in found))
    training = [
        article.strip("\n") for i, article in numbered if i not in chosen and article.strip()
    ]
    evaluation = [article for i, article in numbered if i in chosen]
    parts = sorted(out.glob("part-*"))
    assert [path.name for path in parts] == [f"part-{i:05d}-of-00003" for i in range(3)]
    texts = [path.read_text() for path in parts]
    assert [a for text in texts for a in text.removesuffix("\n").split("\n\n")] == training
    assert all("\n\n\n" not in text and not text.startswith("\n") for text in texts)
    assert max(map(len, texts)) < 1.5 * min(map(len, texts))
    assert (out / "eval.txt").read_text() == "".join(f"{article}\n\n" for article in evaluation)
    sums = [hashlib.md5(article.rstrip().encode()).hexdigest() for article in evaluation]
    assert (out / "eval.md5").read_text().split() == sums
    assert (summary["articles"], summary["eval_articles"]) == (len(training), 5)
    assert not (out / "clean.tmp").exists()


def test_a_finished_folder_is_kept_and_a_damaged_one_made_again(wiki, tmp_path):
    out = tmp_path / "out"
    part = out / "part-00001-of-00003"
    clean(wiki, out, OPTIONS)
    before = tree(out)
    written = part.stat().st_mtime_ns
    clean(wiki, out, OPTIONS)
    assert part.stat().st_mtime_ns == written
    with user_error("prepare.other-options", out):
        clean(wiki, out, CleanOptions(num_parts=4, eval_articles=5))
    part.unlink()
    clean(wiki, out, OPTIONS)
    assert tree(out) == before
    for name in (part.name, "clean.tmp/unit-000000.npz"):
        write_files(out, {name: "cut off or left over"})
        clean(wiki, out, OPTIONS)
        assert tree(out) == before


def test_hashes_in_place_of_the_draw(wiki, tmp_path, said):
    clean(wiki, tmp_path / "drawn", OPTIONS)
    hashes = tmp_path / "drawn" / "eval.md5"
    clean(
        wiki,
        tmp_path / "by_md5",
        CleanOptions(num_parts=3, eval_md5=hashes),
        executor=Executor(progress=said),
    )
    texts, by_md5 = (
        [a for a in (tmp_path / name / "eval.txt").read_text().split("\n\n") if a.strip()]
        for name in ("drawn", "by_md5")
    )
    assert by_md5 == texts
    assert said.lines == [f"evaluation: all {len(texts)} articles of {hashes} found"]
    hashes.write_text("0" * 32 + "\n")
    with user_error("data.other-text", hashes):
        clean(wiki, tmp_path / "none", CleanOptions(num_parts=3, eval_md5=hashes))


def test_hashes_that_are_not_found(wiki, tmp_path, said):
    clean(wiki, tmp_path / "drawn", OPTIONS)
    found = (tmp_path / "drawn" / "eval.md5").read_text()
    others = "".join(f"{number:032x}\n" for number in range(6))
    hashes = tmp_path / "eval.md5"
    options = CleanOptions(num_parts=3, eval_md5=hashes)
    hashes.write_text(found + "0" * 32 + "\n")
    clean(wiki, tmp_path / "most", options, Executor(progress=said))
    assert said.lines.pop().startswith(f"warning: {hashes}: 5 of 6 articles found; the others")
    hashes.write_text(found + others)
    with user_error("data.other-text", hashes) as caught:
        clean(wiki, tmp_path / "few", options)
    assert "only 5 of its 11 articles" in str(caught.value)
    assert not (tmp_path / "few" / "clean.json").exists()
    summary = clean(
        wiki, tmp_path / "few", replace(options, eval_min_found=5 / 11), Executor(progress=said)
    )
    assert summary["eval_articles"] == 5
    assert said.lines.pop().startswith(f"warning: {hashes}: 5 of 11 articles found")


@pytest.mark.parametrize("changed", ["nothing", "input", "code"])
def test_an_interrupted_run_is_continued_with_the_same_input_and_code_only(
    wiki, tmp_path, monkeypatch, changed
):
    monkeypatch.setattr(module, "UNIT_BYTES", 3000)
    out = tmp_path / "out"
    first = wiki / "AA" / "wiki_00"
    broken = mock.Mock(wraps=module.make_part, side_effect=[mock.DEFAULT, KeyboardInterrupt])
    with mock.patch.object(module, "make_part", broken), pytest.raises(KeyboardInterrupt):
        clean(wiki, out, OPTIONS)
    for name in ("clean.tmp/unit-000000.txt", "part-00002-of-00003", "eval.txt"):
        (out / f"{name}.12345.tmp").write_bytes(b"half")
    if changed == "input":
        first.write_text(first.read_text().replace("Sentence", "Phrase"))
    if changed == "code":  # as if other code had cleaned the first unit
        monkeypatch.setattr(module, "code_identity", lambda: {"tool": "mlbert of tomorrow"})
        unit = out / "clean.tmp" / "unit-000000.txt"
        unit.write_text(unit.read_text().replace("Sentence", "Another"))
    for folder in (out, tmp_path / "whole"):
        clean(wiki, folder, OPTIONS)
    assert tree(out) == tree(tmp_path / "whole")


def test_bad_folders(tmp_path, wiki):
    write_files(tmp_path, {"part-00000-of-00500": "precious\n"})
    with user_error("file.in-the-way", tmp_path / "part-00000-of-00500"):
        clean(wiki, tmp_path, OPTIONS)
    folder = tmp_path / "empty"
    folder.mkdir()
    with user_error("file.missing", tmp_path / "none"):
        clean(tmp_path / "none", tmp_path / "out", OPTIONS)
    with user_error("data.missing", folder):
        clean(folder, tmp_path / "out", OPTIONS)
    for name, content, code in (
        ("wiki_00.bz2", "BZh", "data.encoding"),
        ("wiki_00", "Just text.\n", "data.damaged"),
    ):
        (folder / name).write_text(content)
        with user_error(code, folder / name):
            clean(folder, tmp_path / "out", OPTIONS)
    for options, subject in (
        ({"num_parts": 1000, "eval_articles": 5}, "--parts"),
        ({"num_parts": 3}, "--eval-articles"),
    ):
        with user_error("data.too-small", subject):
            clean(wiki, tmp_path / "few", CleanOptions(**options))


def test_parts_are_never_empty():
    for lengths in ([1, 1, 1], [100, 1, 1], [1, 1, 100], [5] * 50):
        bounds = part_bounds(np.asarray(lengths), 3)
        assert (bounds[0], bounds[-1]) == (0, len(lengths))
        assert (np.diff(bounds) > 0).all()


def test_most_lines_equal_the_reference_text(shared_data, tmp_path):
    clean(
        shared_data / "wikiextractor", tmp_path / "out", CleanOptions(num_parts=2, eval_articles=0)
    )
    ours, reference = (
        Counter(
            line
            for path in sorted(folder.glob("part-*"))
            for line in path.read_text().split("\n")
            if line
        )
        for folder in (tmp_path / "out", shared_data / "text")
    )
    assert (ours & reference).total() / reference.total() > 0.92
    assert json.loads((tmp_path / "out" / "clean.json").read_text())["articles"] == 79


def test_a_gap_in_the_numbers():
    assert (
        missing_files(["AA/wiki_00", "AA/wiki_01", "AB/wiki_00", "AB/wiki_01", "AC/wiki_00"]) == []
    )
    assert missing_files(["wiki_00", "wiki_02"]) == ["wiki_01"]
    assert missing_files(["AA/wiki_00", "AA/wiki_01", "AB/wiki_01"]) == ["AB/wiki_00"]
    assert missing_files(["AA/wiki_00", "AB/wiki_00", "AB/wiki_01", "AC/wiki_00"]) == ["AA/wiki_01"]


def test_kinds_of_folders(assets, source, tmp_path, tmp_path_factory):
    text = (assets / "text.txt").read_text()
    wiki = tmp_path_factory.mktemp("wiki")
    write_files(
        tmp_path,
        {
            "text/part-00000-of-00001": text,
            "notes/notes.txt": "schön\n" * 20_000,
            "nvidia/README": "",
        },
    )
    write_files(wiki, {"AA/wiki_00": '<doc id="1">\n'})
    write_parts(tmp_path / "records", bert_rows(1, max_length=29))  # the same names as text
    hdf5_to_tfrecords(source, tmp_path / "listed")
    write_variable(tmp_path / "nvidia/part_00000_of_00001.hdf5", bert_rows(1))
    for name, kind in {
        "text": "text",
        "text/part-00000-of-00001": "text",
        "notes": "text",  # its head ends within a character
        "records": "tfrecord",
        "listed": "tfrecord",
        "source": "prepared",
        "nvidia": "nvidia",
    }.items():
        assert recognize(tmp_path / name) == kind, name
    assert recognize(wiki) == "wikiextractor"
    (wiki / "AA/wiki_00").rename(wiki / "AA/wiki_00.bz2")
    for path, code in (
        (wiki / "AA/wiki_00.bz2", "data.encoding"),
        (tmp_path / "none", "file.missing"),
    ):
        with user_error(code, path):
            recognize(wiki if path.exists() else path)
    for name, content in (
        ("photo.jpg", b"\xff\xd8\0"),
        ("notes.txt", "schön\n".encode("latin-1") * 100),
    ):
        folder = tmp_path_factory.mktemp("other")
        (folder / name).write_bytes(content)
        with user_error("data.format", folder):
            recognize(folder)


def read(text: bytes) -> list[str]:
    return list(paragraphs(Path("wiki_00"), text.splitlines(keepends=True)))


def test_tags_titles_and_empty_lines_go_and_breaks_stay() -> None:
    assert read(WIKI) == [
        "A teapot holds tea. It has a beak.",
        "",
        "Many teapots are round.",
        "",
        "",
        "A cup is small (see Teapot).",
        "",
    ]


def test_articles_as_the_benchmark_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
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
