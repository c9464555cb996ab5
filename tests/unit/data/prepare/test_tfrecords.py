"""`mlbert prepare tfrecord-to-hdf5` and back: equality, bad input, interruption."""

from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from mlbert.data.formats.manifest import read_manifest
from mlbert.data.formats.prepared import ShardSet, ShardWriter
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tfrecord import ExampleReader, write_examples
from mlbert.data.formats.wordpiece import SPECIAL_TOKENS
from mlbert.data.prepare.jobs import Executor
from mlbert.data.prepare.tfrecords import hdf5_to_tfrecords, tfrecords_to_hdf5
from nvidia_shards import bert_rows, write_vocabulary
from stored_sets import assert_same_rows, flip, tree
from tfrecord_examples import write_parts
from user_errors import user_error


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    return write_vocabulary(tmp_path / "vocab.txt")


@pytest.fixture
def parts() -> list[Ragged]:
    return [bert_rows(50 + 10 * part, part, max_length=29) for part in range(3)]


@pytest.fixture
def folder(tmp_path: Path, parts: list[Ragged]) -> Path:
    return write_parts(tmp_path / "records", *parts)


def test_there_and_back(folder, parts, vocab, tmp_path):
    manifest = tfrecords_to_hdf5([folder], vocab, tmp_path / "set", executor=Executor(workers=2))
    assert (manifest.num_sequences, manifest.max_seq_length, manifest.max_predictions) == (180, 32, 5)
    assert (manifest.vocab_size, manifest.provenance["skipped"]) == (500, {})
    rows = ShardSet.open(tmp_path / "set", verify=True).gather(np.arange(180))
    assert_same_rows(rows, Ragged.concatenate(parts))

    made = hdf5_to_tfrecords(tmp_path / "set", tmp_path / "back", executor=Executor(workers=2))
    assert made.num_sequences == 180
    for part, file in enumerate(made.files):
        assert (tmp_path / "back" / file.file).read_bytes() == sorted(folder.iterdir())[part].read_bytes()


def test_other_input_is_refused(folder, vocab, tmp_path):
    tfrecords_to_hdf5([folder], vocab, tmp_path / "set")
    hdf5_to_tfrecords(tmp_path / "set", tmp_path / "back")
    with user_error("prepare.other-options", tmp_path / "set"):
        tfrecords_to_hdf5(sorted(folder.iterdir())[:2], vocab, tmp_path / "set")
    tfrecords_to_hdf5(sorted(folder.iterdir())[:2], vocab, tmp_path / "two")
    with user_error("prepare.other-options", tmp_path / "back"):
        hdf5_to_tfrecords(tmp_path / "two", tmp_path / "back")


def test_bad_input(folder, vocab, tmp_path):
    files, out = sorted(folder.iterdir()), tmp_path / "set"
    absent = tmp_path / "absent"
    for code, subject, inputs, words in (
        ("config.duplicate", files[0], [folder, files[0]], vocab),
        ("file.missing", absent, [absent], vocab),
        ("data.missing", tmp_path, [tmp_path], vocab),
        ("file.unreadable", tmp_path / "no-vocab.txt", [folder], tmp_path / "no-vocab.txt"),
    ):
        with user_error(code, subject):
            tfrecords_to_hdf5(inputs, words, out)
    write_examples(tmp_path / "wide.tfrecord", bert_rows(3), 64, 5)
    with user_error("data.mixed", tmp_path / "wide.tfrecord"):
        tfrecords_to_hdf5([folder, tmp_path / "wide.tfrecord"], vocab, out)
    small = tmp_path / "small.txt"
    small.write_text("\n".join([*SPECIAL_TOKENS, *map(str, range(55))]) + "\n")
    with user_error("data.damaged", folder / "part-00000-of-00003"):
        tfrecords_to_hdf5([folder], small, out)
    assert not (out / "manifest.json").exists()


def test_skip_bad(folder, vocab, tmp_path, run_mlbert):
    files = sorted(folder.iterdir())
    flip(files[1], 200)
    flip(files[2], int(next(iter(ExampleReader(files[2]))).starts[30]) + 60)
    with user_error("data.damaged", folder / "part-00001-of-00003"):
        tfrecords_to_hdf5([folder], vocab, tmp_path / "set", executor=Executor(workers=2))
    words = ["--input", folder, "--vocab", vocab, "--out", tmp_path / "set", "--skip-bad"]
    status, output, error = run_mlbert("prepare", "tfrecord-to-hdf5", *words)
    assert status == 0, error
    skipped = read_manifest(tmp_path / "set").provenance["skipped"]
    assert [Path(file).name for file in skipped] == [files[1].name, files[2].name]
    assert skipped[str(files[1])] == ["record 0 (byte 0) has damaged data: its checksum is wrong"]
    assert f"skipped: {files[1]}: record 0 (byte 0)" in output + error
    assert "2 records skipped" in output + error
    assert read_manifest(tmp_path / "set").num_sequences == 178
    assert not list((tmp_path / "set").glob("skipped-*"))


def test_list_of_skipped_survives_an_interruption(folder, vocab, tmp_path):
    flip(sorted(folder.iterdir())[0], 200)
    tfrecords_to_hdf5([folder], vocab, tmp_path / "straight", skip_bad=True)
    with mock.patch.object(ShardWriter, "finish", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        tfrecords_to_hdf5([folder], vocab, tmp_path / "killed", skip_bad=True)
    kept = (tmp_path / "killed" / "shard-00000-of-00003.h5").stat().st_mtime_ns
    tfrecords_to_hdf5([folder], vocab, tmp_path / "killed", skip_bad=True)
    assert tree(tmp_path / "killed") == tree(tmp_path / "straight")
    assert (tmp_path / "killed" / "shard-00000-of-00003.h5").stat().st_mtime_ns == kept
