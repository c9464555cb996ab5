"""Bins: each sequence in the bin of its length, shards of one bin equally long, damage noticed."""

import itertools
import shutil
from unittest import mock

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_batches import numbers
from mlbert.data.formats.base import BinInfo
from mlbert.data.formats.open import describe, open_store
from mlbert.data.formats.order import by_length
from mlbert.data.formats.prepared import ShardSet
from mlbert.data.formats.ragged import Ragged
from mlbert.data.loading.packed import PackedSource
from mlbert.data.prepare import export_nvidia, split_bins
from mlbert.data.prepare.jobs import Executor
from mlbert.data.prepare.shuffle import shuffle_set
from mlbert.data.prepare.split_bins import make_bins, make_hdf5_bins
from mlbert.host.errors import UserError
from nvidia_shards import PREDICTIONS, bert_rows, write_fixed, write_kind, write_variable
from stored_sets import flip, make_rows, names, random_lengths, same_sequences, tree, write_set
from user_errors import user_error

EDGES = (8, 16, 24, 32)
TWO = {"edges": EDGES, "num_shards": 2}


@given(count=st.integers(16, 200), shards=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=2)
def test_every_sequence_once_and_in_its_bin(tmp_path_factory, count, shards, seed):
    folder = tmp_path_factory.mktemp("bins")
    rows = make_rows(random_lengths(count, seed=seed), seed)
    source = write_set(folder / "source", rows)
    manifests = make_bins(source, folder / "out", edges=EDGES, num_shards=shards, seed=seed)
    names = ["bin-001-008", "bin-009-016", "bin-017-024", "bin-025-032"]
    assert [manifest.path.parent.name for manifest in manifests] == names
    parts = []
    for manifest, low, high in zip(manifests, (1, 9, 17, 25), EDGES, strict=True):
        counts = [shard.num_sequences for shard in manifest.shards]
        assert len(counts) == shards
        assert max(counts) - min(counts) <= 1
        parts += list(ShardSet.open(manifest.path.parent, verify=True))
        lengths = ShardSet.open(manifest.path.parent).lengths
        assert ((lengths >= low) & (lengths <= high)).all()
        assert manifest.max_seq_length == high
    assert same_sequences(Ragged.concatenate(parts), rows)
    store = open_store(folder / "out")
    assert len(store) == count
    assert same_sequences(store.gather(np.arange(count)), rows)


def test_more_shards_than_the_fullest_bin_has_sequences(tmp_path):
    source = write_set(tmp_path / "source", make_rows(np.asarray([6, 20, 20, 20])))
    with user_error("config.range", "--shards"):
        make_bins(source, tmp_path / "out", edges=(16, 32), num_shards=4)
    first, _ = make_bins(source, tmp_path / "out", edges=(16, 32), num_shards=3)
    assert [shard.num_sequences for shard in first.shards] == [0, 0, 1]


def test_edges_that_do_not_ascend_or_are_too_small_or_others(source, tmp_path):
    for edges in ((), (0, 5), (8, 8), (16, 8)):
        with user_error("config.value", "--edges"):
            make_bins(source, tmp_path / "out", edges=edges)
    with user_error("data.too-long", source):
        make_bins(source, tmp_path / "out", edges=(8, 24))
    make_bins(source, tmp_path / "out", **TWO)
    with user_error("prepare.other-options", tmp_path / "out"):
        make_bins(source, tmp_path / "out", edges=(16, 32), num_shards=2)


def test_a_damaged_shard_and_a_bin_of_another_folder_are_named(source, tmp_path):
    make_bins(source, tmp_path / "bins", **TWO)
    make_bins(source, tmp_path / "other", **TWO, seed=1)
    flip(tmp_path / "bins/bin-009-016/shard-00001-of-00002.h5", 0.9)
    for make in (shuffle_set, make_bins):
        with user_error("data.checksum", tmp_path / "bins/bin-009-016/shard-00001-of-00002.h5"):
            make(tmp_path / "bins", tmp_path / "new")
    bins = (tmp_path / "bins").rename(tmp_path / "out")
    shutil.copy(tmp_path / "other/bin-009-016/manifest.json", bins / "bin-009-016")
    with user_error("data.checksum", bins / "bin-009-016/manifest.json"):
        describe(bins)


def test_bad_index(source, tmp_path):
    make_bins(source, tmp_path / "out", **TWO)
    for content, code in (
        ("", "file.json"),
        ("{}", "data.format"),
        ('{"format": "mlbert-bins", "version": 1}', "file.json"),
        ("[]", "file.json"),
        ('{"format": "mlbert-bins", "version": 9}', "data.format"),
    ):
        (tmp_path / "out/bins.json").write_text(content)
        with user_error(code, tmp_path / "out/bins.json"):
            describe(tmp_path / "out")


HDF5_EDGES = (8, 16, 32)
PART = "part_00000_of_00001.hdf5"
pytestmark = pytest.mark.usefixtures("own_cache")


def lengths_in(path) -> np.ndarray:
    with h5py.File(path, "r") as file:
        if "input_mask" in file:
            return file["input_mask"][:].sum(axis=1)
        return np.asarray([len(row) for row in file["input_ids"]])


@given(count=st.integers(40, 200), seed=st.integers(0, 99), layout=st.sampled_from(["fixed", "variable"]))
@settings(max_examples=3)
def test_every_sequence_once_and_in_its_folder(tmp_path_factory, monkeypatch, count, seed, layout):
    monkeypatch.setattr(split_bins, "ROWS_A_FILE", 17)
    folder = tmp_path_factory.mktemp("bins")
    rows = make_rows(np.concatenate([random_lengths(count, seed=seed), [7, 12, 20]]), seed)
    source = write_set(folder / "source", rows)
    sizes = make_hdf5_bins(source, folder / "out", edges=HDF5_EDGES, layout=layout)
    assert list(sizes.items()) == [*zip(("8", "16", "32"), np.histogram(rows.lengths, [0, 9, 17, 33])[0], strict=True)]
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["16", "32", "8"]
    for low, high in ((1, 8), (9, 16), (17, 32)):
        files = sorted((folder / "out" / str(high)).iterdir())
        found = [lengths_in(path) for path in files]
        assert max(map(len, found)) - min(map(len, found)) <= 1
        assert all(((low <= lengths) & (lengths <= high)).all() for lengths in found)
        if layout == "fixed":
            with h5py.File(files[0], "r") as file:
                assert file["input_ids"].shape == (len(found[0]), high)
    store = open_store(folder / "out")
    assert same_sequences(store.gather(np.arange(len(store))), rows)
    in_order = rows.take(np.flatnonzero(rows.lengths <= 8))
    assert names(store.gather(np.arange(sizes["8"]))) == names(in_order)


@pytest.mark.parametrize("kind", ["fixed", "variable", "packed"])
def test_from_another_pipelines_shards(tmp_path, kind):
    rows = bert_rows(120, max_length=32)
    (tmp_path / "theirs").mkdir()
    write_kind(kind, tmp_path / "theirs" / PART, rows)
    workers = 2 if kind == "variable" else 1
    make_hdf5_bins(tmp_path / "theirs", tmp_path / "out", edges=HDF5_EDGES, executor=Executor(workers))
    store = open_store(tmp_path / "out")
    assert same_sequences(store.gather(np.arange(len(store))), rows)
    assert store.info.max_seq_length == describe(tmp_path / "out").max_seq_length == 32


def test_finished_folders_are_left_alone(source, tmp_path):
    make_hdf5_bins(source, tmp_path / "out", edges=HDF5_EDGES)
    before = tree(tmp_path / "out")
    assert make_hdf5_bins(source, tmp_path / "out", edges=HDF5_EDGES) == {
        name: len(lengths_in(next((tmp_path / "out" / name).iterdir()))) for name in ("8", "16", "32")
    }
    for options in ({"edges": (16, 32)}, {"edges": HDF5_EDGES, "layout": "variable"}):
        with user_error("file.in-the-way", tmp_path / "out"):
            make_hdf5_bins(source, tmp_path / "out", **options)
    assert tree(tmp_path / "out") == before


def test_an_interrupted_run_is_continued(source, tmp_path, monkeypatch):
    monkeypatch.setattr(split_bins, "ROWS_A_FILE", 17)
    make_hdf5_bins(source, tmp_path / "good", edges=HDF5_EDGES)
    effects = [mock.DEFAULT] * 4 + [UserError("file.unwritable", "disk", "is full", "Free some space")]
    with (
        mock.patch.object(export_nvidia, "write_hdf5", wraps=export_nvidia.write_hdf5, side_effect=effects),
        user_error("file.unwritable", "disk", wording=False),
    ):
        make_hdf5_bins(source, tmp_path / "out", edges=HDF5_EDGES)
    assert not (tmp_path / "out").exists()
    unfinished = tmp_path / "out.unfinished"
    kept = tree(unfinished)
    assert len(kept) == 4
    (unfinished / "64").mkdir()
    (unfinished / "64" / PART).write_text("of other edges")
    (unfinished / "8" / "part_00000_of_00001.hdf5.17.tmp").write_text("cut off")
    times = {name: (unfinished / name).stat().st_mtime_ns for name in kept}
    (tmp_path / "out").mkdir()
    make_hdf5_bins(source, tmp_path / "out", edges=HDF5_EDGES)
    assert tree(tmp_path / "out") == tree(tmp_path / "good")
    assert not unfinished.exists()
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in kept} == times
    assert not any(path.name == "64" for path in (tmp_path / "out").iterdir())


def test_other_peoples_files_are_not_removed(source, tmp_path):
    (tmp_path / "out.unfinished" / "8").mkdir(parents=True)
    (tmp_path / "out.unfinished" / "8" / "notes.txt").write_text("mine")
    with user_error("file.in-the-way", tmp_path / "out.unfinished/8/notes.txt"):
        make_hdf5_bins(source, tmp_path / "out", edges=HDF5_EDGES)
    assert (tmp_path / "out.unfinished" / "8" / "notes.txt").read_text() == "mine"


def test_options_and_outputs_that_do_not_fit(source, tmp_path):
    for options, code, subject in (
        ({"edges": (16, 8)}, "config.value", "--edges"),
        ({"edges": (8, 16)}, "data.too-long", "source"),
        ({"edges": (4, 32)}, "data.empty", "source"),
        ({"layout": "packed"}, "config.choice", "--layout"),
    ):
        with user_error(code, subject):
            make_hdf5_bins(source, tmp_path / "out", **{"edges": HDF5_EDGES, **options})
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["source"]
    for out in (source, source / "bins"):
        with user_error("file.in-input", out):
            make_hdf5_bins(source, out, edges=HDF5_EDGES)
    (tmp_path / "file").write_text("")
    with user_error("file.in-the-way", tmp_path / "file"):
        make_hdf5_bins(source, tmp_path / "file", edges=HDF5_EDGES)
    with user_error("file.unwritable", tmp_path / "file/bins.unfinished/8"):
        make_hdf5_bins(source, tmp_path / "file/bins", edges=HDF5_EDGES)


@pytest.mark.parametrize("kind", ["fixed", "narrow", "variable"])
@pytest.mark.parametrize("edges", [(128, 256, 384, 512), (64, 128, 1024)])
def test_numbered_folders_are_bins_in_the_order_of_their_numbers(tmp_path, kind, edges):
    for number, (low, edge) in enumerate(itertools.pairwise((4, *edges))):
        rows = bert_rows(20, number, max_length=min(edge, 512), min_length=low + 1)
        path = tmp_path / "bins" / str(edge) / PART
        path.parent.mkdir(parents=True)
        if kind == "variable":
            write_variable(path, rows)
        else:
            write_fixed(path, rows, width=edge if kind == "narrow" else edges[-1])
    info, store = describe(tmp_path / "bins"), open_store(tmp_path / "bins")
    assert info.bins == tuple(BinInfo(str(edge), None) for edge in edges)
    assert store.info.bins == tuple(BinInfo(str(edge), 20) for edge in edges)
    assert info.max_seq_length == store.info.max_seq_length == (512 if kind == "variable" else edges[-1])
    assert store.info.max_predictions == (76 if kind == "variable" else PREDICTIONS)
    assert info.identity == store.info.identity
    counts = [9 - len(edges)] + [1] * (len(edges) - 1)
    options = {"max_sequences_per_pack": 1, "seed": 1, "partition": by_length(1), "vocab_size": 500}
    source = PackedSource(tmp_path / "bins", packs_per_step=8, bin_counts=counts, **options)
    source.open()
    for step in range(2 * source.steps_per_epoch):
        (batch,) = source.batches_of(step)
        found = np.searchsorted(edges, np.diff(batch.cu_seqlens.numpy()))
        assert np.bincount(found, minlength=len(edges)).tolist() == counts
        assert len(set(numbers(batch))) > 1
        assert np.diff(batch.arrays()["first_rows"]).min() != 0


def test_bins_by_other_names_are_sorted_by_length(tmp_path):
    (tmp_path / "files").mkdir()
    for name, low, high in (("long", 20, 30), ("short", 5, 9)):
        (tmp_path / "bins" / name).mkdir(parents=True)
        write_fixed(tmp_path / "bins" / name / PART, bert_rows(10, max_length=high, min_length=low))
    for number in (2, 10):
        rows = bert_rows(10, max_length=6 * number, min_length=5 * number)
        write_variable(tmp_path / "files" / f"part_00000_bin{number}.hdf5", rows)
    assert [bin.name for bin in open_store(tmp_path / "bins").info.bins] == ["short", "long"]
    assert [bin.name for bin in describe(tmp_path / "files").bins] == ["bin2", "bin10"]
