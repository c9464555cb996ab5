"""Imports give the sequences of the shards and records, exports what their readers expect;
all can be resumed.
"""

from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import pytest

from mlbert.data.formats.manifest import read_manifest
from mlbert.data.formats.prepared import ShardSet, ShardWriter
from mlbert.data.formats.ragged import Ragged, offsets_of
from mlbert.data.formats.tfrecord import ExampleReader, write_examples
from mlbert.data.formats.wordpiece import SPECIAL_TOKENS
from mlbert.data.prepare import import_store as importing
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.export_nvidia import export_nvidia
from mlbert.data.prepare.import_store import import_store
from mlbert.data.prepare.tfrecords import hdf5_to_tfrecords, tfrecords_to_hdf5
from nvidia_shards import (
    PREDICTIONS,
    VOCAB_SIZE,
    WIDTH,
    bert_rows,
    pack_counts,
    write_kind,
    write_vocabulary,
)
from stored_sets import assert_same_rows, flip, tree
from tfrecord_examples import write_parts
from user_errors import user_error

EACH = 30
FILES = 3
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def vocab(tmp_path) -> Path:
    return write_vocabulary(tmp_path / "vocab.txt")


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"part_{number:05d}_of_{FILES:05d}.hdf5"


def write(folder: Path, kind: str) -> Ragged:
    folder.mkdir()
    parts = [
        bert_rows(EACH, number, WIDTH // 3 if kind == "packed" else WIDTH)
        for number in range(FILES)
    ]
    for number, rows in enumerate(parts):
        write_kind(kind, shard_path(folder, number), rows, number)
    return Ragged.concatenate(parts)


@pytest.fixture
def ours(tmp_path, vocab) -> Path:
    """Return a set that was imported from variable-length shards in `theirs`."""
    write(tmp_path / "theirs", "variable")
    import_store(tmp_path / "theirs", vocab, tmp_path / "ours")
    return tmp_path / "ours"


@pytest.mark.parametrize("kind", ["fixed", "variable", "packed"])
def test_import_and_export_round_trip(tmp_path, vocab, kind):
    expected = write(tmp_path / "theirs", kind)
    executor = Executor(workers=2 if kind == "packed" else 1)
    manifest = import_store(tmp_path / "theirs", vocab, tmp_path / "ours", executor=executor)
    ours = ShardSet.open(tmp_path / "ours", verify=True)
    assert_same_rows(ours.gather(np.arange(len(ours))), expected)
    assert (manifest.vocab_size, len(manifest.shards)) == (VOCAB_SIZE, FILES)
    widths = (WIDTH, PREDICTIONS) if kind == "fixed" else (512, 76)
    assert (manifest.max_seq_length, manifest.max_predictions) == widths
    names = [shard_path(tmp_path, number).name for number in range(FILES)]
    assert [source["file"] for source in manifest.provenance["sources"]] == names
    assert manifest.provenance["skipped"] == {"count": 0, "first": []}
    counts = np.concatenate([pack_counts(EACH, number) for number in range(FILES)])
    if kind == "packed":
        assert (manifest.num_packs, manifest.max_pack_tokens) == (len(counts), 512)
        rows, found = ours.gather_packs(np.arange(ours.num_packs))
        assert_same_rows(rows, expected)
        assert np.array_equal(found, counts)
    (path,) = export_nvidia(tmp_path / "ours", tmp_path / "back", kind, num_files=1)
    columns: dict[str, list[np.ndarray]] = {}
    for number in range(FILES):
        with h5py.File(shard_path(tmp_path / "theirs", number)) as file:
            for name in file:
                columns.setdefault(name, []).extend(file[name][:])
    with h5py.File(path) as file, h5py.File(shard_path(tmp_path / "theirs", 0)) as first:
        assert set(file) == set(columns)
        for name, rows in columns.items():
            assert file[name].dtype == first[name].dtype
            assert h5py.check_vlen_dtype(file[name].dtype) == h5py.check_vlen_dtype(
                first[name].dtype
            )
            assert all(
                np.array_equal(one, other) for one, other in zip(file[name][:], rows, strict=True)
            )


def test_export_refuses_what_the_layout_cannot_store_and_keeps_existing_files(tmp_path, ours):
    for layout, files, code, subject in (
        ("packed", 1, "data.format", ours),
        ("odd", 1, "config.choice", "--layout"),
        ("fixed", 91, "config.range", "--files"),
    ):
        with user_error(code, subject):
            export_nvidia(tmp_path / "ours", tmp_path / "out", layout, num_files=files)
    paths = export_nvidia(ours, tmp_path / "out", "variable", num_files=2)
    before = tree(tmp_path / "out")
    time = paths[0].stat().st_mtime_ns
    with user_error("prepare.other-options", paths[0]):
        export_nvidia(ours, tmp_path / "out", "variable", num_files=3)
    for damage in (Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-5])):
        damage(paths[1])
        (tmp_path / "out" / "part_00001_of_00002.hdf5.tmp").write_bytes(b"x")
        export_nvidia(ours, tmp_path / "out", "variable", num_files=2)
        assert tree(tmp_path / "out") == before
    assert paths[0].stat().st_mtime_ns == time


def test_bins_become_one_set(tmp_path, vocab):
    short = bert_rows(20, 0, 12)
    long = bert_rows(30, 1, min_length=13)
    for name, rows in (("a", short), ("b", long)):
        (tmp_path / "bins" / name).mkdir(parents=True)
        write_kind("variable", tmp_path / "bins" / name / "part_00000.hdf5", rows)
    manifest = import_store(tmp_path / "bins", vocab, tmp_path / "ours")
    assert [source["file"] for source in manifest.provenance["sources"]] == [
        "a/part_00000.hdf5",
        "b/part_00000.hdf5",
    ]
    ours = ShardSet.open(tmp_path / "ours")
    assert_same_rows(ours.gather(np.arange(50)), Ragged.concatenate([short, long]))
    write_kind(
        "variable", tmp_path / "bins" / "b" / "part_00000.hdf5", bert_rows(30, 1, min_length=12)
    )
    with user_error("data.mixed", tmp_path / "bins"):
        import_store(tmp_path / "bins", vocab, tmp_path / "again")


@pytest.mark.parametrize("kind", ["variable", "packed"])
def test_sets_without_files_of_their_own_are_cut_into_pieces(tmp_path, vocab, kind, monkeypatch):
    monkeypatch.setattr(importing, "PIECE", 25)
    expected = write(tmp_path / "theirs", kind)
    import_store(tmp_path / "theirs", vocab, tmp_path / "ours")
    manifest = import_store(tmp_path / "ours", vocab, tmp_path / "again")
    again = ShardSet.open(tmp_path / "again", verify=True)
    assert_same_rows(again.gather(np.arange(len(again))), expected)
    rows = manifest.num_packs or manifest.num_sequences
    assert len(manifest.shards) == -(-rows // 25)
    assert manifest.num_packs == ShardSet.open(tmp_path / "ours").num_packs


@pytest.mark.parametrize("kind", ["variable", "packed"])
def test_bad_rows_are_named_or_left_out(tmp_path, vocab, kind):
    rows = write(tmp_path / "theirs", kind)
    with h5py.File(shard_path(tmp_path / "theirs", 0), "r+") as file:
        file["input_ids"][7] = np.zeros(0, np.int16)
        tokens = file["input_ids"][12]
        tokens[2] = VOCAB_SIZE
        file["input_ids"][12] = tokens
    cut = shard_path(tmp_path / "theirs", 1)
    cut.write_bytes(cut.read_bytes()[:-100])
    with user_error("data.damaged", tmp_path / "theirs/part_00000_of_00003.hdf5"):
        import_store(tmp_path / "theirs", vocab, tmp_path / "ours")
    with (
        mock.patch.object(importing, "_finish", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        import_store(tmp_path / "theirs", vocab, tmp_path / "ours", skip_bad=True)
    assert not (tmp_path / "ours" / "manifest.json").exists()
    manifest = import_store(tmp_path / "theirs", vocab, tmp_path / "ours", skip_bad=True)
    skipped = manifest.provenance["skipped"]
    assert skipped["count"] == 3
    token = "row 12 has a token outside the vocabulary of 500"
    found = ("00000_of_00003.hdf5: row 7 is empty", token, "00001_of_00003")
    assert all(words in line for words, line in zip(found, skipped["first"], strict=True)), skipped
    first = offsets_of(pack_counts(EACH, 0) if kind == "packed" else np.ones(EACH, int))
    bad = [sequence for row in (7, 12) for sequence in range(first[row], first[row + 1])]
    good = np.delete(np.arange(3 * EACH), [*bad, *range(EACH, 2 * EACH)])
    ours = ShardSet.open(tmp_path / "ours", verify=True)
    assert_same_rows(ours.gather(np.arange(len(ours))), rows.take(good))
    assert not list((tmp_path / "ours").glob("skipped-*"))


def test_other_input_and_a_wrong_vocabulary_are_refused(tmp_path, vocab, ours):
    write_kind("variable", shard_path(tmp_path / "theirs", 0), bert_rows(EACH + 1))
    with user_error("prepare.other-options", ours):
        import_store(tmp_path / "theirs", vocab, ours)
    ours = tmp_path / "again"
    entries = vocab.read_text().split("\n")
    other = tmp_path / "other.txt"
    for wrong in (entries[:100], ["extra", *entries]):
        other.write_text("\n".join(wrong))
        with user_error("data.row", shard_path(tmp_path / "theirs", 0)):
            import_store(tmp_path / "theirs", other, ours)
    with user_error("data.empty", tmp_path / "theirs"):
        import_store(tmp_path / "theirs", other, ours, skip_bad=True)
    # The rows of file 0.
    write_kind("fixed", shard_path(tmp_path / "theirs", 1), bert_rows(EACH + 1))
    with user_error("prepare.other-options", shard_path(tmp_path / "theirs", 1)):
        import_store(tmp_path / "theirs", vocab, ours)


def test_command_line(tmp_path, vocab, run_mlbert):
    write(tmp_path / "theirs", "fixed")
    shard_path(tmp_path / "theirs", 1).write_bytes(b"")
    status, out, err = run_mlbert(
        "prepare",
        "import",
        "--input",
        tmp_path / "theirs",
        "--vocab",
        vocab,
        "--out",
        tmp_path / "ours",
        "--workers",
        1,
        "--skip-bad",
    )
    assert (status, "60 sequences, " in out, "skipped: " in out + err) == (0, True, True), err
    status, _, err = run_mlbert(
        "prepare",
        "export-nvidia",
        "--input",
        tmp_path / "ours",
        "--out",
        tmp_path / "back",
        "--layout",
        "variable",
        "--workers",
        1,
    )
    assert (status, err) == (0, "")
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["part_00000_of_00001.hdf5"]


@pytest.fixture
def parts() -> list[Ragged]:
    return [bert_rows(50 + 10 * part, part, max_length=29) for part in range(3)]


@pytest.fixture
def folder(tmp_path: Path, parts: list[Ragged]) -> Path:
    return write_parts(tmp_path / "records", *parts)


def test_records_of_others_are_not_replaced(folder, parts, vocab, tmp_path):
    """Neither those of another number of files nor those of the same."""
    tfrecords_to_hdf5([folder], vocab, tmp_path / "set")
    for name in ("part-00000-of-00003.tfrecord", "part-00000-of-00500.tfrecord"):
        mine = tmp_path / name[:19] / name
        mine.parent.mkdir()
        mine.write_bytes(b"mine")
        with user_error("file.in-the-way", mine):
            hdf5_to_tfrecords(tmp_path / "set", mine.parent)
        assert [path.read_bytes() for path in mine.parent.iterdir()] == [b"mine"]


def test_there_and_back(folder, parts, vocab, tmp_path):
    manifest = tfrecords_to_hdf5([folder], vocab, tmp_path / "set", executor=Executor(workers=2))
    assert (manifest.num_sequences, manifest.max_seq_length, manifest.max_predictions) == (
        180,
        32,
        5,
    )
    assert (manifest.vocab_size, manifest.provenance["skipped"]) == (500, {})
    rows = ShardSet.open(tmp_path / "set", verify=True).gather(np.arange(180))
    assert_same_rows(rows, Ragged.concatenate(parts))

    made = hdf5_to_tfrecords(tmp_path / "set", tmp_path / "back", executor=Executor(workers=2))
    assert made.num_sequences == 180
    for part, file in enumerate(made.files):
        assert (tmp_path / "back" / file.file).read_bytes() == sorted(folder.iterdir())[
            part
        ].read_bytes()


def test_bad_and_other_records_are_refused(folder, vocab, tmp_path):
    files = sorted(folder.iterdir())
    out = tmp_path / "set"
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
    tfrecords_to_hdf5([folder], vocab, out)
    hdf5_to_tfrecords(out, tmp_path / "back")
    with user_error("prepare.other-options", out):
        tfrecords_to_hdf5(files[:2], vocab, out)
    tfrecords_to_hdf5(files[:2], vocab, tmp_path / "two")
    with user_error("prepare.other-options", tmp_path / "back"):
        hdf5_to_tfrecords(tmp_path / "two", tmp_path / "back")


def test_bad_records_are_skipped_on_request_and_listed_after_an_interruption_too(
    folder, vocab, tmp_path, run_mlbert
):
    files = sorted(folder.iterdir())
    flip(files[1], 200)
    flip(files[2], int(next(iter(ExampleReader(files[2]))).starts[30]) + 60)
    with user_error("data.damaged", folder / "part-00001-of-00003"):
        tfrecords_to_hdf5([folder], vocab, tmp_path / "set", executor=Executor(workers=2))
    with (
        mock.patch.object(ShardWriter, "finish", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        tfrecords_to_hdf5([folder], vocab, tmp_path / "set", skip_bad=True)
    kept = (tmp_path / "set" / "shard-00000-of-00003.h5").stat().st_mtime_ns
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
    assert (tmp_path / "set" / "shard-00000-of-00003.h5").stat().st_mtime_ns == kept
