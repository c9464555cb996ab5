"""TFRecords as a store: any order, the kept index, files that change,
and DALI as a reader of the same.
"""

import os
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from host_batches import assert_same
from mlbert.data.formats import tfrecord, tfrecord_plain, tfrecord_store
from mlbert.data.formats.manifest import file_sha256
from mlbert.data.formats.open import open_store
from mlbert.data.formats.order import contiguous
from mlbert.data.formats.padded import NAMES, padded
from mlbert.data.formats.tfrecord import Widths, write_examples
from mlbert.data.formats.tfrecord_store import TFRecordStore, accepts, describe
from mlbert.data.loading import dali
from mlbert.data.loading.packed import PackedSource
from mlbert.data.prepare.tfrecords import tfrecords_to_hdf5
from mlbert.data.prepare.verify import verify
from nvidia_shards import write_vocabulary
from random_set import random_rows
from stored_sets import assert_same_rows, flip
from tfrecord_examples import records_of, write_list, write_parts
from user_errors import user_error

PARTS = [f"part-{number:05d}-of-00003" for number in range(3)]
BOTH = (describe, TFRecordStore)


@pytest.fixture(autouse=True)
def cache(own_cache: Path) -> Path:
    tfrecord.codec()  # compiled before: its library is in the cache, too
    return own_cache / "mlbert" / "tfrecord"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return 100 sequences in three files, and a file that is not a TFRecord."""
    rows = random_rows(100)
    folder = write_parts(
        tmp_path / "set", rows.slice(0, 30), rows.slice(30, 31), rows.slice(31, 100)
    )
    (folder / "part-00000-of-00003.md5").write_text("checksum")
    return folder


@pytest.mark.parametrize("form", ["plain", "compiled"])
def test_gathers_in_any_order(folder, monkeypatch, form):
    if form == "plain":
        monkeypatch.setattr(tfrecord, "codec", lambda: tfrecord_plain)
        monkeypatch.setattr(tfrecord_store, "codec", lambda: tfrecord_plain)
    store = TFRecordStore(folder)
    rows = random_rows(100)
    assert (len(store), store.lengths.dtype) == (100, np.int32)
    np.testing.assert_array_equal(store.lengths, rows.lengths)
    monkeypatch.setattr(TFRecordStore, "gathered", 16)
    for chosen in ([], [99], [30, 30, 29], np.random.default_rng(0).permutation(100)):
        assert_same_rows(
            store.gather(np.asarray(chosen, np.int64)), rows.take(np.asarray(chosen, np.int64))
        )


def test_index_is_kept_and_follows_the_files(folder, cache):
    TFRecordStore(folder)
    (kept,) = cache.iterdir()
    with mock.patch.object(
        tfrecord_store, "build_index", side_effect=pytest.fail.Exception("not kept")
    ):
        assert len(TFRecordStore(folder)) == 100
    write_examples(folder / "part-00001-of-00003", random_rows(2), 32, 5)
    assert len(TFRecordStore(folder)) == 101
    assert len(list(cache.iterdir())) == 1
    assert not kept.exists()


def test_damaged_index_is_made_again(folder, cache):
    TFRecordStore(folder)
    (starts,) = cache.glob("*/starts.npy")
    for damage in (
        lambda path: os.truncate(path, path.stat().st_size - 8),
        lambda path: os.truncate(path, 0),
        Path.unlink,
        lambda path: np.save(path, np.zeros(3, np.int64)),
    ):
        damage(starts)
        assert_same_rows(TFRecordStore(folder).gather(np.arange(100)), random_rows(100))
        assert len(np.load(starts)) == 100


@pytest.mark.parametrize("name", ["starts", "sizes", "lengths"])
def test_wrong_index_is_made_again(folder, cache, name):
    TFRecordStore(folder)
    (path,) = cache.glob(f"*/{name}.npy")
    values = np.load(path)
    values[40] = 1 << 14
    np.save(path, values)
    assert_same_rows(TFRecordStore(folder).gather(np.arange(100)), random_rows(100))
    assert np.load(path)[40] != 1 << 14


def test_record_that_changed_after_opening(folder):
    store = TFRecordStore(folder)
    path = folder / "part-00002-of-00003"
    flip(path, int(tfrecord_plain.scan(np.fromfile(path, np.uint8), 5)[4]) + 50)
    assert len(store.gather(np.array([34, 36]))) == 2
    with user_error("data.damaged", path):
        store.gather(np.array([36, 35]))


def test_describe_looks_at_the_first_record_alone(folder):
    before = describe(folder)
    assert (before.kind, before.max_seq_length, before.max_predictions) == ("tfrecord", 32, 5)
    assert before == TFRecordStore(folder).info
    path = folder / "part-00000-of-00003"
    content = path.read_bytes()
    second = int(tfrecord_plain.scan(np.frombuffer(content, np.uint8), 1)[1])
    path.write_bytes(content[:second] + bytes(len(content) - second))
    (folder / "part-00001-of-00003").write_bytes(
        bytes((folder / "part-00001-of-00003").stat().st_size)
    )
    assert describe(folder) == before
    path.write_bytes(content[:-1])
    assert describe(folder).identity != before.identity


@pytest.mark.parametrize(
    ("damage", "code", "name", "uses"),
    [
        (lambda folder: write_list(folder, PARTS[:1]), "data.mixed", PARTS[1], BOTH),
        (
            lambda folder: (folder / "part-00003-of-00003").touch(),
            "data.mixed",
            "part-00003-of-00003",
            BOTH,
        ),
        (lambda folder: (folder / PARTS[1]).unlink(), "data.incomplete", "", BOTH),
        (
            lambda folder: write_list(folder, PARTS) or (folder / PARTS[2]).unlink(),
            "data.incomplete",
            "",
            BOTH,
        ),
        (lambda folder: os.truncate(folder / PARTS[1], 200), "data.damaged", PARTS[1], BOTH[1:]),
        (
            lambda folder: write_examples(folder / PARTS[1], random_rows(3), 40, 5),
            "data.mixed",
            PARTS[1],
            BOTH[1:],
        ),
    ],
    ids=["not listed", "one too many", "missing", "listed and missing", "cut off", "wider"],
)
def test_files_that_do_not_belong_to_the_set(folder, damage, code, name, uses):
    damage(folder)
    for use in uses:
        with user_error(code, folder / name):
            use(folder)


def test_a_list_may_have_fewer_files_than_the_names_say(folder):
    (folder / PARTS[1]).unlink()
    write_list(folder, [PARTS[0], PARTS[2]])
    assert len(TFRecordStore(folder)) == 99


def test_recognized_among_other_data(folder, tmp_path):
    assert accepts(folder)
    assert isinstance(open_store(folder), TFRecordStore)
    assert not accepts(tmp_path)
    part = tmp_path / "part-00000-of-00001"
    other = tmp_path / "part_00000_of_00002"
    part.write_text("One sentence a line.\nTwo \u00e9.\n\nAnother document.\n")
    for look in (open_store, describe):
        with user_error("data.format", part):
            look(tmp_path)
    other.touch()
    part.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    assert not accepts(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "dropped", "doubled", "exchanged"])
def test_records_that_the_list_does_not_know(folder, tmp_path, damage):
    write_list(folder, PARTS)
    vocab = tmp_path / "vocab.txt"
    info = describe(folder)
    path = folder / PARTS[0]
    assert (info.num_sequences, info.vocab_size, info.vocabulary_sha256) == (
        len(TFRecordStore(folder)),
        500,
        "a" * 64,
    )
    records = records_of(path)
    kept = {
        "cut": records[:-7],
        "dropped": records[:3] + records[4:],
        "doubled": [*records, records[5]],
    }
    path.write_bytes(b"".join(kept.get(damage, records_of(folder / PARTS[2])[: len(records)])))
    with user_error("data.incomplete", path):
        TFRecordStore(folder)
    with user_error("data.incomplete", path):
        tfrecord_store.describe(folder, Widths(32, 5))  # what training looks at before it starts
    (report,) = verify([folder])
    assert report.problems
    reason = (
        " bytes, but instances.json says "
        if damage == "doubled"
        else "some are missing or duplicated"
    )
    assert damage == "exchanged" or reason in report.problems[-1]
    write_vocabulary(vocab)
    with user_error("vocabulary.mismatch", vocab):
        tfrecords_to_hdf5([folder], vocab, tmp_path / "out")
    names_vocabulary = (folder / "instances.json").read_text().replace("a" * 64, file_sha256(vocab))
    (folder / "instances.json").write_text(names_vocabulary)
    with user_error("data.incomplete", path):
        tfrecords_to_hdf5([path], vocab, tmp_path / "out")


def test_a_broken_list(folder):
    for content in ("", "{}", "[" * 100_000, '{"files": [{"file": "part-00000-of-00003"}]}'):
        (folder / "instances.json").write_text(content)
        for use in (*BOTH, lambda folder: verify([folder])):
            with user_error("file.json", folder / "instances.json"):
                use(folder)


@pytest.fixture
def with_dali() -> None:
    pytest.importorskip("nvidia.dali", reason="DALI is not installed (the nvidia-dali extra)")


@pytest.mark.usefixtures("with_dali")
def test_dali_gives_the_same_batches(folder, monkeypatch):
    monkeypatch.setattr(dali, "_BATCH", 16)
    options = {
        "packs_per_step": 2,
        "max_sequences_per_pack": 3,
        "seed": 3,
        "rank": 1,
        "world_size": 2,
    }
    options |= {"partition": contiguous}
    plain = PackedSource(folder, **options)
    other = dali.DaliSource(folder, **options)
    plain.open()
    other.open()
    other.load_state_dict({**plain.state_dict(), "step": 4})
    for expected, found in zip(plain.batches_of(4), other.next_step(), strict=True):
        assert_same(found.to("cpu"), expected.to("cpu"))
    other.close()


@pytest.mark.usefixtures("with_dali")
def test_dali_notices_a_record_that_changed_after_opening(folder):
    store = dali.DaliStore(folder)
    write_examples(folder / PARTS[2], random_rows(69, seed=5), 32, 5)
    with user_error("data.damaged", folder, wording=False):
        store.gather(np.arange(100))


def test_without_dali(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali.fn", None)
    with user_error("package.missing", "nvidia-dali"):
        dali.DaliStore(folder)


def test_dali_removes_padding_unless_a_value_is_not_allowed():
    lists = {name: padded(random_rows(20), name, Widths(32, 5)) for name in NAMES}
    lists = {
        name: values.astype(np.float32 if "weights" in name else np.int64)
        for name, values in lists.items()
    }
    assert_same_rows(dali._without_padding(lists), random_rows(20))
    lists["input_ids"][7, 0] = 65_536
    assert dali._without_padding(lists) is None
