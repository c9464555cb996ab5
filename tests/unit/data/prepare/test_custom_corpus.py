"""A user's own text as it is on disk: read in any form, held out without leaks,
in bounded memory.
"""

import csv
import gzip
import io
import json
import os
import random
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from babel import Locale
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from mlbert.data.formats.mds import MdsReader
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.prepare import baselines, corpus_files, custom_corpus, streaming, text_folder
from mlbert.data.prepare.clean import wiki_files
from mlbert.data.prepare.corpus_files import documents, find_sources
from mlbert.data.prepare.corpus_sequences import RUN
from mlbert.data.prepare.custom_corpus import Facts, Request, prepare, take_inventory
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.text_parts import expand_inputs, inspect_parts
from programs import write_files
from stored_sets import tree
from text_sets import json_lines
from user_errors import user_error

SHARDS = Path(__file__).parents[3] / "assets/mds/documents"

NOUNS = [
    "river",
    "house",
    "letter",
    "garden",
    "machine",
    "teacher",
    "mountain",
    "window",
    "market",
    "story",
]
VERBS = [
    "finds",
    "builds",
    "carries",
    "paints",
    "watches",
    "answers",
    "follows",
    "repairs",
    "describes",
    "leaves",
]
REST = ["slowly", "twice", "again", "today", "quietly", "once", "together", "early"]
PAGE = """<!DOCTYPE html><html><head><meta charset="utf-8"><title>Tea &amp; cake</title>
<style>p { color: red }</style><script>if (a < b) document.write("<p>never</p>");</script></head>
<body><nav><ul><li><a href="/">Home</a></li></ul></nav>
<![if lt IE 9]><![endif]><![unknown[x]]><!-- <p>no -->
<h1>A&nbsp;page</h1><p>Fresh<b>ly</b> brewed,
   d&eacute;j&agrave; &#x4E2D; vu <p>5 < 6 &amp;&amp; 7 > 6<br/>next line<table>
<tr><td>one</td><td>two</td></tr>
</table><noscript>Enable JavaScript</noscript></p></body>&copy"""
SHOWN = [
    "Tea & cake",
    "A page",
    "Freshly brewed, déjà 中 vu",
    "5 < 6 && 7 > 6",
    "next line",
    "one two",
    "©",
]
LONG = "word " * 10_000
OF_ALL_FILES = {"data.too-small", "data.repetitive", "vocabulary.other-language"}


def sentence(draw: random.Random) -> str:
    first, second, third = draw.choices(NOUNS, k=3)
    verb = draw.choice(VERBS)
    rest = draw.choice(REST)
    last = draw.choice(REST)
    return f"The {first} {verb} the {second} {rest} beside every {third} {last}."


def texts_of(count: int, seed: int = 1, sentences: int = 6) -> list[str]:
    draw = random.Random(seed)
    return ["\n".join(sentence(draw) for _ in range(sentences)) for _ in range(count)]


def request_of(folder: Path, *paths: Path, **changes: object) -> Request:
    """Return a request for 400 entries and sequences of 32 tokens."""
    return replace(Request(find_sources(paths, folder), None, 400, None, 32, 0.15), **changes)


def prepared(folder: Path, *paths: Path) -> Facts:
    return prepare(request_of(folder, *paths, lower_case=True), folder)


def rows(folder: Path) -> list[list[int]]:
    assert MdsReader(folder).vocabulary_sha256 is not None
    return [np.frombuffer(row["tokens"], "<i8").tolist() for row in iter(MdsReader(folder))]


def parquet_of(columns: dict[str, list]) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue()


def table_of(texts: list[str], **form: str) -> str:
    sink = io.StringIO()
    csv.writer(sink, **form).writerows([["id", " body "], *enumerate(texts)])
    return sink.getvalue()


def test_every_form_gives_the_same_documents(tmp_path: Path) -> None:
    texts = texts_of(12)
    lines = json_lines(texts, other=1).encode()
    files = {"a.jsonl": lines, "a.json": lines, "b.jsonl.gz": gzip.compress(lines)}
    files["c.parquet"] = parquet_of({"other": [1] * len(texts), "text": texts})
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    many = {
        f"{number:03d}.txt" if number % 2 else f"deep/{number:03d}.md": text
        for number, text in enumerate(texts)
    }
    write_files(tmp_path / "many", many | {"picture.png": "\x89PNG\0\0", ".hidden.txt": "secret"})
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")
    train = datasets.DatasetDict({"train": datasets.load_from_disk(str(tmp_path / "saved"))})
    train.save_to_disk(tmp_path / "splits")
    for form in (*files, "many", "saved", "splits"):
        assert sorted(texts_at(tmp_path / form)) == sorted(texts), form


def texts_at(path: Path, column: str | None = None, encoding: str = "utf-8-sig") -> list[str]:
    sources = [
        replace(source, encoding=encoding)
        for source in find_sources([path], path / "out", column=column)
    ]
    return [text for source in sources for text in documents(source, 500, False)]


def test_rows_of_a_named_column(tmp_path: Path) -> None:
    texts = [
        'He said "no; never", twice.',
        "two\nlines\n\nand a blank one",
        "größer, 中文",
        "x" * 200_000,
    ]
    objects = "".join(json.dumps({"body": text}) + "\n" for text in texts)
    for name, content, expected in (
        ("a.csv", table_of(texts).encode(), texts),
        ("b.csv", ("\ufeff" + table_of(texts, delimiter=";", lineterminator="\n")).encode(), texts),
        ("c.tsv", b'0\tbody\r\n1\t"one\r\n2\ttwo"\r\n', ['"one', 'two"']),
        ("d.jsonl", objects.encode(), texts),
        ("e.parquet", parquet_of({"body": texts, "text": [""] * len(texts)}), texts),
    ):
        (tmp_path / name).write_bytes(content)
        assert texts_at(tmp_path / name, "body") == expected, name
    (tmp_path / "f.csv").write_bytes(table_of([*texts[:1], "schön"]).encode("cp1252"))
    assert texts_at(tmp_path / "f.csv", "body", "cp1252")[1] == "schön"
    others: Counter[str] = Counter()
    assert len(find_sources([tmp_path], tmp_path / "out", others)) == 2
    assert others == {".csv": 3, ".tsv": 1}, "tables in folders need the name of the column"
    assert len(find_sources([tmp_path], tmp_path / "out", column="body")) == 6


@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_visible_text_of_html(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_files, "_CHUNK", chunk)
    (tmp_path / "a.HTML").write_text(PAGE, encoding="utf-8")
    blocks = "".join(texts_at(tmp_path / "a.HTML")).split("\n\n")
    assert [" ".join(block.split()) for block in blocks if block.strip()] == SHOWN


def test_encoding_of_html(tmp_path: Path) -> None:
    for declared, stored, asked in (
        ('charset="utf-8"', "utf-8", "utf-8-sig"),
        ("charset=ISO-8859-1", "cp1252", "utf-8-sig"),
        ("charset='shift_jis'", "shift_jis", "utf-8-sig"),
        ("charset=hex", "utf-8", "utf-8-sig"),
        ("charset=utf-8", "gb18030", "gb18030"),
        ("", "utf-16", "utf-16"),
    ):
        word = "größer…" if stored == "cp1252" else "中国"
        (tmp_path / "a.htm").write_bytes(f"<meta {declared}><p>{word}".encode(stored))
        assert [text.strip() for text in texts_at(tmp_path / "a.htm", encoding=asked)] == [word], (
            declared
        )


@settings(max_examples=60)
@given(
    st.text(alphabet="ab \n\0é漢\r", min_size=1, max_size=300), st.integers(1, 40), st.booleans()
)
def test_cutting_loses_nothing(
    tmp_path_factory: pytest.TempPathFactory, text: str, piece: int, packed: bool
) -> None:
    path = tmp_path_factory.mktemp("cut") / ("a.txt.gz" if packed else "a.txt")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    (source,) = find_sources([path], path / "out")
    if "\0" in text:
        is_wide = text.count("\0") > max(1, len(text) // 4)
        with user_error("data.encoding" if is_wide else "data.damaged", path, wording=False):
            list(documents(source, piece, True))
        return
    parts = list(documents(source, piece, True))
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert max(map(len, parts), default=0) <= 2 * piece


def test_held_out_text_is_not_trained_on(tmp_path: Path) -> None:
    # Each document comes thrice: as it is, again, and with another last line.
    texts = texts_of(150)
    again = [*texts, *texts, *(f"{text}\n{sentence(random.Random(text))}" for text in texts)]
    (tmp_path / "a.jsonl").write_text(json_lines(again))
    facts = prepared(tmp_path / "out", tmp_path / "a.jsonl")
    assert facts.near_repeats > 0
    held_out = {
        tuple(row[i : i + RUN])
        for row in rows(tmp_path / "out/val")
        for i in range(1, len(row) - RUN)
    }
    runs = [
        tuple(row[i : i + RUN])
        for row in rows(tmp_path / "out/train")
        for i in range(1, len(row) - RUN)
    ]
    assert len(held_out) > 300
    assert np.mean([run in held_out for run in runs]) < 0.01
    assert facts.train_tokens + facts.held_out_tokens + facts.near_repeats <= 20 * 6 * 450 * 1.2


def test_each_sequence_is_a_piece_of_one_document_if_none_are_joined(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text(json_lines(texts_of(400)))
    joined = request_of(tmp_path / "joined", tmp_path / "text.jsonl", lower_case=True)
    apart = replace(joined, joins=False)
    facts = [prepare(joined, tmp_path / "joined"), prepare(apart, tmp_path / "apart")]
    assert facts[0].train_tokens == pytest.approx(facts[1].train_tokens, rel=0.02)
    assert facts[0].train_sequences < facts[1].train_sequences
    sep = load_tokenizer(tmp_path / "apart").sep_id
    for name in ("train", "val"):
        inside = [row[1:-1].count(sep) for row in rows(tmp_path / "apart" / name)]
        assert max(inside) == 0
        assert max(row[1:-1].count(sep) for row in rows(tmp_path / "joined" / name)) > 0


def test_order_and_files_do_not_matter_to_what_is_held_out(tmp_path: Path) -> None:
    texts = texts_of(120)
    (tmp_path / "a.jsonl").write_text(json_lines(texts))
    halves = [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    for path, half in zip(halves, (texts[60:][::-1], texts[:60]), strict=True):
        path.write_text(json_lines(half))
    first = prepared(tmp_path / "x", tmp_path / "a.jsonl")
    second = prepared(tmp_path / "y", *halves)
    assert rows(tmp_path / "x/val") == rows(tmp_path / "y/val")
    assert (first.train_tokens, first.unknown_share) == (second.train_tokens, 0)
    assert all(max(row) < 400 and len(row) <= 32 for row in rows(tmp_path / "x/train"))
    tokenizer = load_tokenizer(tmp_path / "x")
    assert tokenizer.lower_case
    assert all(entry == entry.lower() for entry in tokenizer.entries if not entry.startswith("["))
    assert len(first.sentences) == 10
    assert all(text.count("[MASK]") == 1 for text, _ in first.sentences)
    # A second call reads nothing.
    before = (tmp_path / "x/train/index.json").stat().st_mtime_ns
    assert prepared(tmp_path / "x", tmp_path / "a.jsonl") == first
    assert (tmp_path / "x/train/index.json").stat().st_mtime_ns == before


def test_any_number_of_processes_writes_the_same(tmp_path, monkeypatch, said):
    for name, value in {"_TOGETHER": 1 << 13, "_MOST_WORDS": 70, "_MOST_KNOWN": 60}.items():
        monkeypatch.setattr(custom_corpus, name, value)
    (tmp_path / "a.txt").write_text(
        "\n\n".join([*texts_of(300), *texts_of(50, seed=1), *texts_of(50, seed=2)])
    )
    (tmp_path / "b.jsonl.gz").write_bytes(
        gzip.compress(b'{"text": "%s"}\n' % b"One more document. " * 20)
    )
    (tmp_path / "bad.txt").write_bytes(b"fine\ncaf\xe9\n")
    request = request_of(tmp_path / "out", tmp_path, skip_bad=True)
    made = []
    for processes in (1, 3):
        out = tmp_path / f"out{processes}"
        made.append((prepare(request, out, Executor(processes, said)), tree(out)))
        assert all(done == total for done, total in said.done.values()), said.done
    assert made[0] == made[1]


def test_memory_does_not_grow_with_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("_SHARD_BYTES", 1 << 16),
        ("HELD_OUT_AT_MOST", 6000),
        ("_TOGETHER", 1 << 15),
    ):
        monkeypatch.setattr(custom_corpus, name, value)
    monkeypatch.setattr(baselines, "_TOGETHER", 1 << 12)
    peaks = []
    for count in (300, 300, 1500):  # the first call fills caches
        path = tmp_path / f"{len(peaks)}.jsonl"
        path.write_text(json_lines(texts_of(count, count)))
        tracemalloc.start()
        prepared(tmp_path / path.stem, path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < peaks[1] + 300_000, peaks  # of 450,000 more characters, 4 times as many bytes


@pytest.mark.parametrize("languages", ["zh", "ar", "hi", "de+zh+en"])
def test_every_script_is_known_kept_and_shown(tmp_path: Path, languages: str) -> None:
    draw = random.Random(1)
    locales = {language: Locale(language) for language in languages.split("+")}
    known = {
        name: sorted({*one.languages.values(), *one.territories.values()})
        for name, one in locales.items()
    }

    def sentence(language: str) -> str:
        gap, end = ("", "。") if language == "zh" else (" ", ". ")
        return gap.join(draw.choices(known[language], k=5)) + end

    texts = ("".join(sentence(draw.choice(list(known))) for _ in range(8)) for _ in range(900))
    (tmp_path / "a.txt").write_text("\n\n".join(texts), encoding="utf-8")
    request = request_of(tmp_path, tmp_path / "a.txt", vocab_size=2048, length=64)
    facts = prepare(request, tmp_path / "out")
    assert facts.held_out_unknown <= 0.005
    tokenizer = load_tokenizer(tmp_path / "out")
    words = [entry for entry in tokenizer.entries if not entry.startswith("[")]
    assert not tokenizer.lower_case
    assert "de" not in languages or any(word != word.lower() for word in words)
    assert "case and accents: kept" in facts.inventory[-1]
    assert len(facts.sentences) == 10
    for text, answer in facts.sentences:
        assert text.count("[MASK]") == 1
        assert tokenizer.encode(answer) == [tokenizer.vocabulary[answer]]
    is_chinese = {any("一" <= char <= "鿿" for char in text) for text, _ in facts.sentences}
    assert is_chinese == ({True, False} if "+" in languages else {languages == "zh"})


def test_rare_characters_take_no_entries_and_numbers_are_text(tmp_path: Path) -> None:
    rare = "".join(chr(0x4E00 + number) for number in range(300))
    (tmp_path / "a.txt").write_text("\n\n".join([*texts_of(3000), rare]), encoding="utf-8")
    prepared(tmp_path / "out", tmp_path / "a.txt")
    entries = load_tokenizer(tmp_path / "out").entries
    assert not [entry for entry in entries if entry in rare]
    assert "river" in entries, "English gains from losing its case"
    draw = random.Random(1)
    (tmp_path / "b.txt").write_text(
        "\n".join(f"{draw.randrange(10**6)} {draw.random():.3f}" for _ in range(4000))
    )
    facts = prepare(request_of(tmp_path, tmp_path / "b.txt"), tmp_path / "numbers")
    assert "no letters" in facts.inventory[-1]
    assert (facts.sentences, facts.scripts) == ([], "")


def test_a_dirty_folder_is_described_and_its_bad_files_are_listed_at_once(tmp_path, said):
    folder = tmp_path / "dirty"
    folder.mkdir()
    texts = texts_of(200)
    for name, content in {
        "a.txt": "\n\n".join(texts).encode(),
        "copy.txt": "\n\n".join(texts).encode(),
        "upper.txt": "\n\n".join(texts).upper().encode(),
        "tags.md": (
            "<p>" + "</p>\n<p>".join(sentence(random.Random(n)) for n in range(1500)) + "</p>"
        ).encode(),
        "latin.txt": "Ein schöner Text, öfter größer".encode("cp1252"),
        "latin2.txt": "Noch ein schöner Text, öfter größer".encode("cp1252"),
        "rows.jsonl": b'{"text": 3}\n',
        **dict.fromkeys(("a.pdf", "b.PDF", "c.html", "t.csv", "z.bz2", "README"), b"x"),
    }.items():
        (folder / name).write_bytes(content)
    others: Counter[str] = Counter()
    sources = find_sources([folder], tmp_path / "out", others)
    request = Request(sources, None, 400, None, 32, 0.15, others=others)
    with user_error("data.encoding", folder / "latin.txt") as caught:
        prepare(request, tmp_path / "out", Executor(progress=said))
    assert "2 more cannot be read" in str(caught.value)
    assert [Path(line.split(": ")[1]).name for line in said.lines] == ["latin.txt", "latin2.txt"]
    with user_error("data.row", folder / "rows.jsonl"):
        take_inventory(replace(request, encoding="cp1252"))
    request = replace(request, encoding="cp1252", skip_bad=True)
    files, text, markup = take_inventory(request)
    assert files.startswith("files: 7 read (5 .txt, 1 .html, 1 .md); not read: 2 .pdf, 1 .csv, ")
    assert files.endswith(f"skipped: {folder / 'rows.jsonl'}")
    assert "letters: 100% Latin" in text
    assert int(text.split(" documents, ")[1].split()[0]) >= 0.4 * int(
        text.split(" in ")[1].split()[0].replace(",", "")
    )
    assert "markup" in markup
    facts = prepare(request, tmp_path / "out")
    assert facts.inventory[:3] == [files, text, markup]
    assert prepare(request, tmp_path / "out", Executor(progress=said)) == facts
    assert len(said.lines) == 2, "nothing was read again"


def test_bad_files_are_listed_when_the_text_is_read_again_in_smaller_pieces(tmp_path: Path) -> None:
    rng = random.Random(3)
    # One long document.
    (tmp_path / "whole.txt").write_text(" ".join(sentence(rng) for _ in range(500))[:30_000])
    (tmp_path / "rows.jsonl").write_text('{"text": 3}\n')
    request = request_of(tmp_path / "out", tmp_path, skip_bad=True)
    files, *_ = take_inventory(request)
    assert files.endswith(f"skipped: {tmp_path / 'rows.jsonl'}")


def test_held_out_text_of_ones_own(tmp_path: Path) -> None:
    for name, seed in (("a.txt", 1), ("mine.txt", 2)):
        (tmp_path / name).write_text("\n\n".join(texts_of(100, seed)))
    (tmp_path / "b.txt").write_text((tmp_path / "mine.txt").read_text())
    held_out = find_sources([tmp_path / "mine.txt"], tmp_path / "out")
    request = request_of(
        tmp_path / "out", tmp_path / "a.txt", tmp_path / "b.txt", lower_case=True, held_out=held_out
    )
    both, one = (
        prepare(replace(request, sources=request.sources[:n]), tmp_path / "out") for n in (2, 1)
    )
    assert both.train_tokens == one.train_tokens, "b.txt is not trained on"


BAD = [
    ("empty.txt", b"", "data.empty", ""),
    ("blank.txt", b"\n \n" * 10, "data.too-small", "0 characters"),
    ("line.txt", b"one line of text\n", "data.too-small", "17 characters"),
    ("binary.txt", bytes(range(256)) * 10, "data.encoding", ""),
    ("utf16.txt", "many words of text".encode("utf-16"), "data.encoding", ""),
    ("latin.txt", b"fine\nfine\ncaf\xe9 " + LONG.encode(), "data.encoding", "line 3 "),
    ("zero.txt", b"fine\nfi\0ne\n" + LONG.encode(), "data.damaged", "line 2 has a zero byte"),
    ("short.txt", b"a\0b", "data.damaged", "line 1 has a zero byte"),
    ("wide.txt", "many words of text".encode("utf-16-le"), "data.encoding", ""),
    ("zero.jsonl", b'{"text": "a"}\n{"text": "a\0"}\n', "data.damaged", "line 2 "),
    ("late.txt", LONG.encode() * 30 + b"\n\xff", "data.encoding", "line 2 "),
    ("word.txt", LONG.encode(), "data.repetitive", ""),
    ("same.txt", b"the same line of text again and again\n" * 2000, "data.repetitive", ""),
    (
        "random.txt",
        random.Random(1).randbytes(60_000).hex().encode(),
        "vocabulary.other-language",
        "100%",
    ),
    ("bad.jsonl", b'{"text": "a"}\n{"text": 3}\n', "data.row", "line 2 "),
    ("list.jsonl", b"[1, 2]\n", "data.row", "line 1 "),
    ("half.jsonl", b'{"text": "a"}\n{"text": ', "data.row", "line 2 "),
    ("deep.jsonl", b"[" * 100_000, "data.row", "line 1 "),
    ("cut.txt.gz", gzip.compress(LONG.encode())[:-20], "data.damaged", ""),
    ("no.txt.gz", b"no gzip at all", "data.damaged", ""),
    ("no.parquet", b"no Parquet at all", "data.damaged", ""),
    ("other.parquet", parquet_of({"body": ["a"]}), "data.columns", "has the columns body,"),
    ("number.parquet", parquet_of({"text": [3]}), "data.columns", "no text in a column text"),
    (
        "other.csv",
        b"id,body\n1,a\n",
        "data.columns",
        "has no column 'text'. Its columns are id, body",
    ),
    ("short.csv", b"\nid,text\n1,a\n2\n", "data.row", "line 4 has 1 field, but the header has 2"),
    ("open.csv", b'id,text\n1,"a\n2,b\n', "data.row", "line 2: unexpected end of data"),
    ("latin.csv", b"text\ncaf\xe9\n", "data.encoding", "line 2 "),
    ("cut.parquet", parquet_of({"text": [LONG] * 9})[:-9], "data.damaged", ""),
]


@pytest.mark.parametrize(("name", "content", "code", "named"), BAD, ids=[name for name, *_ in BAD])
def test_unusable_text_is_reported(
    tmp_path: Path, name: str, content: bytes, code: str, named: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with user_error(code, "the text" if code in OF_ALL_FILES else tmp_path / name) as caught:
        prepared(tmp_path / "out", tmp_path / name)
    assert named in str(caught.value)


def test_paths_without_text_are_reported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    paths = {
        tmp_path / "no": "file.missing",
        tmp_path / "empty": "data.empty",
        Path("/dev/zero"): "file.wrong-kind",
        SHARDS: "data.format",
        SHARDS / "uint16": "data.format",
    }
    for path, code in paths.items():
        with user_error(code, path):
            find_sources([path], tmp_path / "out")


def test_json_in_a_folder_is_read_if_it_has_a_text_on_each_line(tmp_path: Path, said) -> None:
    texts = texts_of(4)
    lines = json_lines(texts, url="u").encode()
    files = {
        "c4.json": lines,
        "c4.json.gz": gzip.compress(lines),
        "cut.json.gz": gzip.compress(lines)[:-20],
        "package.json": b'{\n "text": "no line"\n}\n',
        "settings.json": b'{"body": "no text"}\n',
        "array.json": b'[{"text": "in an array"}]\n',
        "latin.json": b'{"text": "caf\xe9"}\n',
        "README.md": b"# About",
    }
    (tmp_path / "mixed").mkdir()
    for name, content in files.items():
        (tmp_path / "mixed" / name).write_bytes(content)
    others: Counter[str] = Counter()
    found = find_sources([tmp_path / "mixed"], tmp_path / "out", others)
    names = [source.path.name for source in found]
    assert names == ["README.md", "c4.json", "c4.json.gz", "cut.json.gz"], "reading reports cut"
    assert others == {".json": 4}
    found = find_sources([tmp_path / "mixed"], tmp_path / "out", column="body")
    assert "settings.json" in [source.path.name for source in found]
    (tmp_path / "only").mkdir()
    (tmp_path / "mixed" / "package.json").rename(tmp_path / "only" / "package.json")
    with user_error("data.empty", tmp_path / "only"):
        find_sources([tmp_path / "only"], tmp_path / "out")


def test_what_is_no_plain_file_in_a_folder_is_not_passed_over(tmp_path: Path, said) -> None:
    folder = write_files(tmp_path / "texts", {"a.txt": "fine", "x.txt/b.txt": "in a folder"})
    (folder / "linked").symlink_to(tmp_path, target_is_directory=True)
    others: Counter[str] = Counter()
    assert len(find_sources([folder], tmp_path / "out", others)) == 2
    assert others == {"linked folder(s)": 1}
    files = {"z.txt": Path("/dev/zero"), "gone.txt": tmp_path / "gone", "pipe.txt": None}
    for name, target in files.items():
        place = folder / name
        if target is None:
            os.mkfifo(place)
        else:
            place.symlink_to(target)
        code = "file.unreadable" if name == "gone.txt" else "file.wrong-kind"
        with user_error(code, place):
            find_sources([folder], tmp_path / "out")
        with user_error(code, place):
            streaming.text_files(folder)
        with user_error("file.missing" if name == "gone.txt" else code, place):
            streaming.text_files(place)
        with user_error(code, place):
            text_folder.text_files(folder)
        with user_error(code, place):
            inspect_parts(expand_inputs([folder]))
        place.rename(folder / "wiki_00")
        with user_error(code, folder / "wiki_00"):
            wiki_files(folder)
        (folder / "wiki_00").unlink()
