"""Documents of a folder: files or paragraphs, their identity, and bad folders."""

from mlbert.data.prepare import corpus, text_folder
from user_errors import user_error


def test_a_file_is_a_document(tmp_path):
    (tmp_path / "b.txt").write_text(
        "Second file. With two sentences.\n\nAnd a paragraph\nover two lines."
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_bytes("\ufeffFirst file.\r\nStill the same.".encode())
    (tmp_path / "notes.md").write_text("not read")
    assert list(text_folder.documents(tmp_path)) == [
        ["First file.", "Still the same."],
        ["Second file.", "With two sentences.", "And a paragraph over two lines."],
    ]


def test_one_sentence_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("One. still one\ntwo\n\n\nthree\n")
    found = list(text_folder.documents(tmp_path, one_per_line=True))
    assert found == [["One. still one", "two"], ["three"]]
    before = text_folder.source_name(tmp_path, False)
    corpus.write_text(tmp_path / "a.txt", found)
    assert (tmp_path / "a.txt").read_text() == "One. still one\ntwo\n\nthree\n"
    assert text_folder.source_name(tmp_path, False) != before, "it follows the content"


def test_bad_folders(tmp_path):
    for name, content, code, subject in (
        ("a.md", b"text", "data.missing", "."),
        ("a.txt", b"", "data.empty", "."),
        ("b.txt", b" \n\n", "data.empty", "."),
        ("a.txt", b"good\nline\n\xff bad", "data.encoding", "a.txt"),
    ):
        (tmp_path / name).write_bytes(content)
        with user_error(code, tmp_path / subject) as caught:
            list(text_folder.documents(tmp_path))
    assert "line 3 " in str(caught.value)
    (tmp_path / "file").write_text("")
    for name in ("absent", "file"):
        with user_error("file.missing", tmp_path / name):
            list(text_folder.documents(tmp_path / name))
