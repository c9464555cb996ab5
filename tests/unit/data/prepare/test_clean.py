"""A WikiExtractor folder to text parts and evaluation text, and what a folder holds."""

import hashlib
import json
import random
import shutil
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from file_limits import largest_file
from mlbert.data.prepare import clean as module
from mlbert.data.prepare.clean import CleanOptions, clean, file_articles, missing_files, part_bounds, recognise
from mlbert.data.prepare.jobs import Executor
from mlbert.data.prepare.tfrecords import hdf5_to_tfrecords
from mlbert.data.prepare.wiki_text import drawn_articles
from mlbert.host.errors import UserError
from nvidia_shards import bert_rows, write_variable
from programs import write_files
from stored_sets import tree
from tfrecord_examples import write_parts
from user_errors import user_error

pytest.importorskip("sentencex", reason="the splitter is in the extra `wiki`")

OPTIONS = CleanOptions(num_parts=3, eval_articles=5)


@pytest.fixture
def wiki(tmp_path: Path) -> Path:
    """Write four files of 12 articles; some have a line of white space, which splits them, some have no text."""
    rng = random.Random(7)
    folder = tmp_path / "wiki"
    for number in range(4):
        path = folder / ("AB"[number // 2] * 2) / f"wiki_{number % 2:02d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(article(rng, number * 12 + i) for i in range(12)))
    return folder


def article(rng: random.Random, number: int) -> str:
    def sentence(i: int) -> str:
        return f"Sentence {i} of article {number} has {rng.randrange(10_000)} words."

    paragraphs = [" ".join(map(sentence, range(rng.randrange(1, 6)))) for _ in range(rng.randrange(4))]
    if number % 5 == 0:
        paragraphs.insert(len(paragraphs) // 2, " ")
    title = f'<doc id="{number}" url="https://example.org/{number}" title="Article {number}">\nArticle {number}\n\n'
    return title + "".join(f"{paragraph}\n\n" for paragraph in paragraphs) + "\n</doc>\n"


def expected(wiki: Path, withheld: int) -> tuple[list[str], list[str]]:
    """Return the training and evaluation articles, from the whole input at once."""
    files = [list(file_articles(path)) for path in sorted(wiki.glob("*/wiki_*"))]
    chosen = set(drawn_articles([len(found) for found in files], withheld).tolist())
    numbered = list(enumerate(article for found in files for article in found))
    training = [article.strip("\n") for i, article in numbered if i not in chosen and article.strip()]
    return training, [article for i, article in numbered if i in chosen]


@pytest.mark.parametrize("workers", [1, 2])
def test_parts_and_evaluation_text(wiki, tmp_path, workers, monkeypatch):
    monkeypatch.setattr(module, "UNIT_BYTES", 3000)
    out = tmp_path / "out"
    summary = clean(wiki, out, OPTIONS, executor=Executor(workers=workers))
    training, evaluation = expected(wiki, 5)
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


def test_a_folder_with_foreign_parts_is_left_alone(wiki, tmp_path):
    (tmp_path / "part-00000-of-00500").write_text("precious\n")
    with user_error("file.in-the-way", tmp_path / "part-00000-of-00500"):
        clean(wiki, tmp_path, OPTIONS)
    assert (tmp_path / "part-00000-of-00500").read_text() == "precious\n"


def test_hashes_in_place_of_the_draw(wiki, tmp_path, said):
    clean(wiki, tmp_path / "drawn", OPTIONS)
    hashes = tmp_path / "drawn" / "eval.md5"
    hashes.write_text(hashes.read_text() + "0" * 32 + "\n")
    clean(wiki, tmp_path / "by_md5", CleanOptions(num_parts=3, eval_md5=hashes), executor=Executor(progress=said))
    texts, by_md5 = (
        [a for a in (tmp_path / name / "eval.txt").read_text().split("\n\n") if a.strip()]
        for name in ("drawn", "by_md5")
    )
    assert by_md5 == texts
    assert said.lines == [f"evaluation: {len(texts)} of {len(texts) + 1} articles of {hashes} found"]
    hashes.write_text("0" * 32 + "\n")
    with user_error("data.other-text", hashes):
        clean(wiki, tmp_path / "none", CleanOptions(num_parts=3, eval_md5=hashes))


def test_a_half_written_part_is_made_whole(wiki, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "UNIT_BYTES", 3000)
    clean(wiki, tmp_path / "whole", OPTIONS)
    out = tmp_path / "out"
    effects = [mock.DEFAULT, UserError("file.unwritable", "disk", "is full")]
    with (
        mock.patch.object(module, "make_part", wraps=module.make_part, side_effect=effects),
        user_error("file.unwritable", "disk", wording=False),
    ):
        clean(wiki, out, OPTIONS)
    for name in ("clean.tmp/unit-000000.txt", "part-00002-of-00003", "eval.txt"):
        (out / f"{name}.12345.tmp").write_bytes(b"half")
    clean(wiki, out, OPTIONS)
    assert tree(out) == tree(tmp_path / "whole")


def test_changed_input_is_not_mixed_with_an_interrupted_run(wiki, tmp_path):
    out = tmp_path / "out"
    with (
        mock.patch.object(module, "_write_evaluation", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        clean(wiki, out, OPTIONS)
    first = wiki / "AA" / "wiki_00"
    first.write_text(first.read_text().replace("Sentence", "Phrase"))
    clean(wiki, out, OPTIONS)
    assert not [path for path in out.iterdir() if "Sentence 0 of article 1 " in path.read_text()]


def test_bad_folders(tmp_path, wiki):
    folder = tmp_path / "empty"
    folder.mkdir()
    with user_error("file.missing", tmp_path / "none"):
        clean(tmp_path / "none", tmp_path / "out", OPTIONS)
    with user_error("data.missing", folder):
        clean(folder, tmp_path / "out", OPTIONS)
    for name, content, code in (("wiki_00.bz2", "BZh", "data.encoding"), ("wiki_00", "Just text.\n", "data.damaged")):
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


def test_a_full_disk_is_one_line_and_can_be_continued(wiki, tmp_path):
    out = tmp_path / "out"
    with user_error("file.unwritable", out / "clean.tmp/unit-000000.txt", wording=False), largest_file(1000):
        clean(wiki, out, OPTIONS, executor=Executor(workers=1))
    assert not (out / "clean.json").exists()
    clean(wiki, out, OPTIONS)
    clean(wiki, tmp_path / "whole", OPTIONS)
    assert tree(out) == tree(tmp_path / "whole")


def test_most_lines_equal_the_reference_text(shared_data, tmp_path):
    clean(shared_data / "wikiextractor", tmp_path / "out", CleanOptions(num_parts=2, eval_articles=0))
    ours, reference = (
        Counter(line for path in sorted(folder.glob("part-*")) for line in path.read_text().split("\n") if line)
        for folder in (tmp_path / "out", shared_data / "text")
    )
    assert (ours & reference).total() / reference.total() > 0.92
    assert json.loads((tmp_path / "out" / "clean.json").read_text())["articles"] == 79


def test_a_gap_in_the_numbers():
    assert missing_files(["AA/wiki_00", "AA/wiki_01", "AB/wiki_00", "AB/wiki_01", "AC/wiki_00"]) == []
    assert missing_files(["wiki_00", "wiki_02"]) == ["wiki_01"]
    assert missing_files(["AA/wiki_00", "AA/wiki_01", "AB/wiki_01"]) == ["AB/wiki_00"]
    assert missing_files(["AA/wiki_00", "AB/wiki_00", "AB/wiki_01", "AC/wiki_00"]) == ["AA/wiki_01"]


def test_text_and_sets(assets, source, tmp_path):
    (tmp_path / "text").mkdir()
    part = shutil.copy(assets / "text.txt", tmp_path / "text/part-00000-of-00001")
    assert recognise(tmp_path / "text") == recognise(part) == "text"
    assert recognise(write_parts(tmp_path / "records", bert_rows(1, max_length=29))) == "tfrecord"  # the same name
    hdf5_to_tfrecords(source, tmp_path / "listed")
    assert recognise(tmp_path / "listed") == "tfrecord"
    assert recognise(source) == "prepared"
    (tmp_path / "nvidia").mkdir()
    write_variable(tmp_path / "nvidia/part_00000_of_00001.hdf5", bert_rows(1))
    assert recognise(tmp_path / "nvidia") == "nvidia"


def test_a_wikiextractor_folder(tmp_path):
    (tmp_path / "AA").mkdir()
    (tmp_path / "AA" / "wiki_00").write_text('<doc id="1">\n')
    assert recognise(tmp_path) == "wikiextractor"
    (tmp_path / "AA" / "wiki_00").rename(tmp_path / "AA" / "wiki_00.bz2")
    with user_error("data.encoding", tmp_path / "AA/wiki_00.bz2"):
        recognise(tmp_path)


def test_anything_else_and_text_in_another_encoding_is_refused(tmp_path):
    with user_error("file.missing", tmp_path / "none"):
        recognise(tmp_path / "none")
    for name, content in (("photo.jpg", b"\xff\xd8\0"), ("notes.txt", "schön\n".encode("latin-1") * 100)):
        (tmp_path / name).write_bytes(content)
        with user_error("data.format", tmp_path):
            recognise(tmp_path)
        (tmp_path / name).unlink()
    (tmp_path / "notes.txt").write_text("schön\n" * 20_000)  # the first bytes looked at end within a character
    assert recognise(tmp_path) == "text"
