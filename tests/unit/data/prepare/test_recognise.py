"""What a folder holds."""

import shutil

from mlbert.data.prepare.clean import recognise
from mlbert.data.prepare.tfrecords import hdf5_to_tfrecords
from nvidia_shards import bert_rows, write_variable
from tfrecord_examples import write_parts
from user_errors import user_error


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
