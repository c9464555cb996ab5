"""A folder of the user's own text files, good and bad."""

from __future__ import annotations

import os

import pytest

from mlbert.data.prepare import corpus
from user_errors import user_error


def test_a_file_is_a_document(tmp_path):
    (tmp_path / "b.txt").write_text("Second file. With two sentences.\n\nAnd a paragraph\nover two lines.")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_bytes("\ufeffFirst file.\r\nStill the same.".encode())
    (tmp_path / "notes.md").write_text("not read")
    assert list(corpus.documents(tmp_path)) == [
        ["First file.", "Still the same."],
        ["Second file.", "With two sentences.", "And a paragraph over two lines."],
    ]


def test_one_sentence_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("One. still one\ntwo\n\n\nthree\n")
    assert list(corpus.documents(tmp_path, one_per_line=True)) == [["One. still one", "two"], ["three"]]


def test_source_name_follows_the_content(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    before = corpus.source_name(tmp_path, False)
    assert corpus.source_name(tmp_path, False) == before
    (tmp_path / "a.txt").write_text("y")
    assert corpus.source_name(tmp_path, False) != before


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({}, "data.missing"),
        ({"a.md": b"text"}, "data.missing"),
        ({"a.txt": b"", "b.txt": b" \n\n"}, "data.empty"),
    ],
)
def test_bad_folders(tmp_path, files, code):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with user_error(code, tmp_path):
        list(corpus.documents(tmp_path))


def test_a_file_that_is_not_utf8_is_named_with_the_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\nline\n\xff bad")
    with user_error("data.encoding", tmp_path / "a.txt") as caught:
        list(corpus.documents(tmp_path))
    assert "line 3 " in str(caught.value)


def test_no_folder(tmp_path):
    with user_error("file.missing", tmp_path / "absent"):
        list(corpus.documents(tmp_path / "absent"))
    (tmp_path / "file").write_text("")
    with user_error("file.missing", tmp_path / "file"):
        list(corpus.documents(tmp_path / "file"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_unreadable(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.txt").chmod(0)
    with user_error("file.unreadable", tmp_path / "a.txt", wording=False):
        list(corpus.documents(tmp_path))
