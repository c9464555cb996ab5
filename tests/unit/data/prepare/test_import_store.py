"""Import gives the same sequences as the shards, export what the pipeline's readers expect; both can be resumed."""

from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import pytest

from mlbert.data.formats.nvidia import NvidiaStore
from mlbert.data.formats.prepared import ShardSet
from mlbert.data.formats.ragged import Ragged, offsets_of
from mlbert.data.prepare import import_store as importing
from mlbert.data.prepare.export_nvidia import export_nvidia
from mlbert.data.prepare.import_store import import_store
from mlbert.data.prepare.jobs import Executor
from nvidia_shards import PREDICTIONS, VOCAB_SIZE, WIDTH, bert_rows, pack_counts, write_kind, write_vocabulary
from stored_sets import assert_same_rows, tree
from user_errors import user_error

EACH, FILES = 30, 3
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def vocab(tmp_path) -> Path:
    return write_vocabulary(tmp_path / "vocab.txt")


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"part_{number:05d}_of_{FILES:05d}.hdf5"


def write(folder: Path, kind: str) -> Ragged:
    folder.mkdir()
    parts = [bert_rows(EACH, number, WIDTH // 3 if kind == "packed" else WIDTH) for number in range(FILES)]
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
    export_nvidia(tmp_path / "ours", tmp_path / "back", kind, num_files=FILES)
    back = NvidiaStore(tmp_path / "back")
    assert back.info.kind == f"nvidia-{kind}"
    assert_same_rows(back.gather(np.arange(len(back))), expected)
    if kind == "packed":
        rows, found = back.gather_packs(np.arange(back.num_packs))
        assert np.array_equal(found, counts)
        assert np.array_equal(back.pack_lengths(np.arange(back.num_packs)), np.diff(rows.offsets[offsets_of(found)]))


def test_exported_columns_are_those_that_h5py_readers_expect(tmp_path, vocab):
    for kind in ("fixed", "variable", "packed"):
        write(tmp_path / kind, kind)
        import_store(tmp_path / kind, vocab, tmp_path / f"{kind}-ours")
        (path,) = export_nvidia(tmp_path / f"{kind}-ours", tmp_path / f"{kind}-back", kind, num_files=1)
        expected: dict[str, list[np.ndarray]] = {}
        for number in range(FILES):
            with h5py.File(shard_path(tmp_path / kind, number)) as file:
                for name in file:
                    expected.setdefault(name, []).extend(file[name][:])
        with h5py.File(path) as file, h5py.File(shard_path(tmp_path / kind, 0)) as first:
            assert set(file) == set(expected)
            for name, rows in expected.items():
                assert file[name].dtype == first[name].dtype
                assert h5py.check_vlen_dtype(file[name].dtype) == h5py.check_vlen_dtype(first[name].dtype)
                assert len(file[name]) == len(rows)
                assert all(np.array_equal(one, other) for one, other in zip(file[name][:], rows, strict=True))


def test_export_refuses_what_the_layout_cannot_store(tmp_path, ours):
    for layout, files, code, subject in (
        ("packed", 1, "data.format", ours),
        ("odd", 1, "config.choice", "--layout"),
        ("fixed", 91, "config.range", "--files"),
    ):
        with user_error(code, subject):
            export_nvidia(tmp_path / "ours", tmp_path / "out", layout, num_files=files)
    export_nvidia(tmp_path / "ours", tmp_path / "out", "variable", num_files=2)
    with user_error("prepare.other-options", tmp_path / "out/part_00000_of_00002.hdf5"):
        export_nvidia(tmp_path / "ours", tmp_path / "out", "variable", num_files=3)


def test_export_keeps_existing_files(tmp_path, ours):
    paths = export_nvidia(ours, tmp_path / "out", "variable", num_files=3)
    before, times = tree(tmp_path / "out"), [path.stat().st_mtime_ns for path in paths]
    paths[1].unlink()
    paths[2].write_bytes(paths[2].read_bytes()[:-5])
    (tmp_path / "out" / "part_00001_of_00003.hdf5.tmp").write_bytes(b"x")
    export_nvidia(tmp_path / "ours", tmp_path / "out", "variable", num_files=3)
    assert tree(tmp_path / "out") == before
    assert paths[0].stat().st_mtime_ns == times[0]


def test_bins_become_one_set(tmp_path, vocab):
    short, long = bert_rows(20, 0, 12), bert_rows(30, 1, min_length=13)
    for name, rows in (("a", short), ("b", long)):
        (tmp_path / "bins" / name).mkdir(parents=True)
        write_kind("variable", tmp_path / "bins" / name / "part_00000.hdf5", rows)
    manifest = import_store(tmp_path / "bins", vocab, tmp_path / "ours")
    assert [source["file"] for source in manifest.provenance["sources"]] == ["a/part_00000.hdf5", "b/part_00000.hdf5"]
    ours = ShardSet.open(tmp_path / "ours")
    assert_same_rows(ours.gather(np.arange(50)), Ragged.concatenate([short, long]))
    write_kind("variable", tmp_path / "bins" / "b" / "part_00000.hdf5", bert_rows(30, 1, min_length=12))
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


def damage(folder: Path) -> None:
    """Damage two rows of file 0 and truncate file 1."""
    with h5py.File(shard_path(folder, 0), "r+") as file:
        file["input_ids"][7] = np.zeros(0, np.int16)
        tokens = file["input_ids"][12]
        tokens[2] = VOCAB_SIZE
        file["input_ids"][12] = tokens
    shard_path(folder, 1).write_bytes(shard_path(folder, 1).read_bytes()[:-100])


@pytest.mark.parametrize("kind", ["variable", "packed"])
def test_bad_rows_are_named_or_left_out(tmp_path, vocab, kind):
    rows = write(tmp_path / "theirs", kind)
    damage(tmp_path / "theirs")
    with user_error("data.damaged", tmp_path / "theirs/part_00000_of_00003.hdf5"):
        import_store(tmp_path / "theirs", vocab, tmp_path / "ours")
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


def test_the_list_of_skipped_rows_survives_an_interruption(tmp_path, vocab):
    write(tmp_path / "theirs", "variable")
    damage(tmp_path / "theirs")
    import_store(tmp_path / "theirs", vocab, tmp_path / "straight", skip_bad=True)
    with mock.patch.object(importing, "_finish", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        import_store(tmp_path / "theirs", vocab, tmp_path / "again", skip_bad=True)
    import_store(tmp_path / "theirs", vocab, tmp_path / "again", skip_bad=True)
    assert tree(tmp_path / "again") == tree(tmp_path / "straight")


def test_wrong_vocabulary(tmp_path, vocab):
    write(tmp_path / "theirs", "variable")
    entries = vocab.read_text().split("\n")
    other = tmp_path / "other.txt"
    for wrong in (entries[:100], ["extra", *entries]):
        other.write_text("\n".join(wrong))
        with user_error("data.row", shard_path(tmp_path / "theirs", 0)):
            import_store(tmp_path / "theirs", other, tmp_path / "ours")
    with user_error("data.empty", tmp_path / "theirs"):
        import_store(tmp_path / "theirs", other, tmp_path / "ours", skip_bad=True)


def test_the_same_sequences_twice(tmp_path, vocab):
    (tmp_path / "theirs").mkdir()
    write_kind("variable", tmp_path / "theirs" / "part_00000.hdf5", bert_rows(20))
    write_kind("fixed", tmp_path / "theirs" / "part_00001.hdf5", bert_rows(20))
    with user_error("prepare.other-options", tmp_path / "theirs/part_00001.hdf5"):
        import_store(tmp_path / "theirs", vocab, tmp_path / "ours")


def test_finished_with_other_input(tmp_path, vocab, ours):
    write_kind("variable", shard_path(tmp_path / "theirs", 0), bert_rows(EACH + 1))
    with user_error("prepare.other-options", ours):
        import_store(tmp_path / "theirs", vocab, ours)


def test_command_line(tmp_path, vocab, run_mlbert):
    def invoke(*words: object) -> str:
        status, out, err = run_mlbert("prepare", *words)
        assert status == 0, err
        return out + err

    rows = write(tmp_path / "theirs", "fixed")
    words = ("--input", tmp_path / "theirs", "--vocab", vocab, "--out", tmp_path / "ours", "--workers", 1)
    assert f"90 sequences, {len(rows.tokens):,} tokens" in invoke("import", *words)
    export = ("--input", tmp_path / "ours", "--out", tmp_path / "back", "--layout", "variable", "--workers", 1)
    assert "1 file\n" in invoke("export-nvidia", *export)
    with h5py.File(tmp_path / "back" / "part_00000_of_00001.hdf5") as file:
        assert np.array_equal(file["input_ids"][5], rows.tokens[slice(*rows.offsets[5:7])])
    shard_path(tmp_path / "theirs", 1).write_bytes(b"")
    words = ("--skip-bad", "--input", tmp_path / "theirs", "--vocab", vocab, "--out", tmp_path / "skipped")
    assert "skipped: " in invoke("import", *words)
