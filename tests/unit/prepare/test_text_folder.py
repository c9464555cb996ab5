"""A folder of the user's own text files, good and bad."""

from __future__ import annotations

import os

import pytest

from mlbert.core.errors import UserError
from mlbert.prepare import text_folder


def test_a_file_is_a_document(tmp_path):
    (tmp_path / "b.txt").write_text("Second file. With two sentences.\n\nAnd a paragraph\nover two lines.")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_bytes("\ufeffFirst file.\r\nStill the same.".encode())
    (tmp_path / "notes.md").write_text("not read")
    assert list(text_folder.documents(tmp_path)) == [
        ["First file.", "Still the same."],
        ["Second file.", "With two sentences.", "And a paragraph over two lines."],
    ]


def test_one_sentence_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("One. still one\ntwo\n\n\nthree\n")
    assert list(text_folder.documents(tmp_path, one_per_line=True)) == [["One. still one", "two"], ["three"]]


def test_source_name_follows_the_content(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    before = text_folder.source_name(tmp_path, False)
    assert text_folder.source_name(tmp_path, False) == before
    (tmp_path / "a.txt").write_text("y")
    assert text_folder.source_name(tmp_path, False) != before


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, r"holds no \*.txt file"),
        ({"a.md": b"text"}, r"holds no \*.txt file"),
        ({"a.txt": b"", "b.txt": b" \n\n"}, "are all empty"),
        ({"a.txt": b"good\nline\n\xff bad"}, "a.txt: line 3 is not UTF-8"),
    ],
)
def test_bad_folders(tmp_path, files, words):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words):
        list(text_folder.documents(tmp_path))


def test_no_folder(tmp_path):
    with pytest.raises(UserError, match="there is no such folder"):
        list(text_folder.documents(tmp_path / "absent"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file, not a folder"):
        list(text_folder.documents(tmp_path / "file"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_unreadable(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(UserError, match="cannot be read"):
        list(text_folder.documents(tmp_path))
