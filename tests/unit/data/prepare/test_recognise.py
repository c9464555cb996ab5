"""What a folder holds."""

import shutil
from pathlib import Path

import pytest

from mlbert.data.prepare.clean import recognise
from mlbert.data.prepare.instance_set import InstanceJob, SetFormat, make_instances
from mlbert.data.prepare.instances import InstanceOptions
from mlbert.data.prepare.jobs import Executor, inspect_parts
from nvidia_shards import bert_rows, write_variable
from user_errors import user_error


@pytest.fixture
def text(assets: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    shutil.copy(assets / "text.txt", folder / "part-00000-of-00001")
    return folder


def made(assets: Path, text: Path, out: Path, set_format: SetFormat) -> Path:
    options = InstanceOptions(max_seq_length=64, max_predictions_per_seq=10, dupe_factor=1)
    parts = (text / "part-00000-of-00001",)
    job = InstanceJob(parts, assets / "vocab.txt", out, options, set_format=set_format)
    make_instances(job, inspect_parts(parts), {}, executor=Executor(workers=1))
    return out


def test_text_and_tfrecords_of_the_same_names(assets, text, tmp_path):
    assert recognise(text) == recognise(text / "part-00000-of-00001") == "text"
    records = made(assets, text, tmp_path / "records", SetFormat.tfrecord)
    assert recognise(records) == "tfrecord"
    for path in records.iterdir():
        path.rename(records / "part-00000-of-00001") if path.suffix == ".tfrecord" else path.unlink()
    assert recognise(records) == "tfrecord"


def test_prepared_sets_of_ours_and_of_nvidia(assets, text, tmp_path):
    assert recognise(made(assets, text, tmp_path / "set", SetFormat.hdf5)) == "prepared"
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
