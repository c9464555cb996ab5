"""Bins as HDF5 folders: every sequence once and in its bin, whole or not there, and trained from like our own."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_batches import numbers
from mlbert.data.formats.base import BinInfo
from mlbert.data.formats.open import describe, open_store
from mlbert.data.formats.order import by_length
from mlbert.data.loading.packed import PackedSource
from mlbert.data.prepare import export_nvidia, split_bins
from mlbert.data.prepare.jobs import Executor
from mlbert.data.prepare.split_bins import make_hdf5_bins
from mlbert.host.errors import UserError
from nvidia_shards import PREDICTIONS, bert_rows, write_fixed, write_kind, write_variable
from stored_sets import make_rows, names, random_lengths, same_sequences, tree, write_set
from user_errors import user_error

EDGES = (8, 16, 32)
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def source(tmp_path):
    return write_set(tmp_path / "source", make_rows(random_lengths(300)))


def lengths_in(path) -> np.ndarray:
    with h5py.File(path, "r") as file:
        if "input_mask" in file:
            return file["input_mask"][:].sum(axis=1)
        return np.asarray([len(row) for row in file["input_ids"]])


@given(count=st.integers(40, 200), seed=st.integers(0, 99), layout=st.sampled_from(["fixed", "variable"]))
@settings(max_examples=5)
def test_every_sequence_once_and_in_its_bin(tmp_path_factory, monkeypatch, count, seed, layout):
    monkeypatch.setattr(split_bins, "ROWS_A_FILE", 17)
    folder = tmp_path_factory.mktemp("bins")
    rows = make_rows(np.concatenate([random_lengths(count, seed=seed), [7, 12, 20]]), seed)
    source = write_set(folder / "source", rows)
    sizes = make_hdf5_bins(source, folder / "out", edges=EDGES, layout=layout)
    assert sizes == {"8": (rows.lengths <= 8).sum(), "16": ((rows.lengths > 8) & (rows.lengths <= 16)).sum()} | {
        "32": (rows.lengths > 16).sum()
    }
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
    write_kind(kind, tmp_path / "theirs" / "part_00000_of_00001.hdf5", rows)
    make_hdf5_bins(tmp_path / "theirs", tmp_path / "out", edges=EDGES, executor=Executor(workers=2))
    store = open_store(tmp_path / "out")
    assert same_sequences(store.gather(np.arange(len(store))), rows)
    assert store.info.max_seq_length == describe(tmp_path / "out").max_seq_length == 32


def test_a_finished_folder_is_left_alone(source, tmp_path):
    make_hdf5_bins(source, tmp_path / "out", edges=EDGES)
    before = tree(tmp_path / "out")
    assert make_hdf5_bins(source, tmp_path / "out", edges=EDGES) == {
        name: len(lengths_in(next((tmp_path / "out" / name).iterdir()))) for name in ("8", "16", "32")
    }
    for options in ({"edges": (16, 32)}, {"edges": EDGES, "layout": "variable"}):
        with user_error("file.in-the-way", tmp_path / "out"):
            make_hdf5_bins(source, tmp_path / "out", **options)
    assert tree(tmp_path / "out") == before


def test_an_interrupted_run_is_continued(source, tmp_path, monkeypatch):
    monkeypatch.setattr(split_bins, "ROWS_A_FILE", 17)
    make_hdf5_bins(source, tmp_path / "good", edges=EDGES)
    real, left = export_nvidia.write_hdf5, 4

    def write(*words):
        nonlocal left
        left -= 1
        if left < 0:
            raise UserError("file.unwritable", "disk", "is full", "Free some space")
        real(*words)

    with monkeypatch.context() as patch:
        patch.setattr(export_nvidia, "write_hdf5", write)
        with user_error("file.unwritable", "disk", wording=False):
            make_hdf5_bins(source, tmp_path / "out", edges=EDGES)
    assert not (tmp_path / "out").exists()
    unfinished = tmp_path / "out.unfinished"
    kept = tree(unfinished)
    assert len(kept) == 4
    (unfinished / "64").mkdir()
    (unfinished / "64" / "part_00000_of_00001.hdf5").write_text("of other edges")
    (unfinished / "8" / "part_00000_of_00001.hdf5.17.tmp").write_text("cut off")
    times = {name: (unfinished / name).stat().st_mtime_ns for name in kept}
    (tmp_path / "out").mkdir()
    make_hdf5_bins(source, tmp_path / "out", edges=EDGES)
    assert tree(tmp_path / "out") == tree(tmp_path / "good")
    assert not unfinished.exists()
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in kept} == times
    assert not any(path.name == "64" for path in (tmp_path / "out").iterdir())


def test_other_peoples_files_are_not_removed(source, tmp_path):
    (tmp_path / "out.unfinished" / "8").mkdir(parents=True)
    (tmp_path / "out.unfinished" / "8" / "notes.txt").write_text("mine")
    with user_error("file.in-the-way", tmp_path / "out.unfinished/8/notes.txt"):
        make_hdf5_bins(source, tmp_path / "out", edges=EDGES)
    assert (tmp_path / "out.unfinished" / "8" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "code", "subject"),
    [
        ({"edges": (16, 8)}, "config.value", "--edges"),
        ({"edges": (8, 16)}, "data.too-long", "source"),
        ({"edges": (4, 32)}, "data.empty", "source"),
        ({"layout": "packed"}, "config.choice", "--layout"),
    ],
)
def test_options_that_do_not_fit(source, tmp_path, options, code, subject):
    with user_error(code, subject):
        make_hdf5_bins(source, tmp_path / "out", **{"edges": EDGES, **options})
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["source"]


def test_output_that_is_the_input_or_a_file(source, tmp_path):
    for out in (source, source / "bins"):
        with user_error("file.in-input", out):
            make_hdf5_bins(source, out, edges=EDGES)
    (tmp_path / "file").write_text("")
    with user_error("file.in-the-way", tmp_path / "file"):
        make_hdf5_bins(source, tmp_path / "file", edges=EDGES)
    with user_error("file.unwritable", tmp_path / "file/bins.unfinished/8"):
        make_hdf5_bins(source, tmp_path / "file/bins", edges=EDGES)


# Folders of bins that others made, as they are


@pytest.mark.parametrize("kind", ["fixed", "narrow", "variable"])
@pytest.mark.parametrize("edges", [(128, 256, 384, 512), (64, 128, 1024)])
def test_numbered_folders_are_bins_in_the_order_of_their_numbers(tmp_path, kind, edges):
    low = 4
    for number, edge in enumerate(edges):
        rows = bert_rows(20, number, max_length=min(edge, 512), min_length=low + 1)
        (tmp_path / "bins" / str(edge)).mkdir(parents=True)
        path = tmp_path / "bins" / str(edge) / "part_00000_of_00001.hdf5"
        if kind == "variable":
            write_variable(path, rows)
        else:
            write_fixed(path, rows, width=edge if kind == "narrow" else edges[-1])
        low = edge
    info, store = describe(tmp_path / "bins"), open_store(tmp_path / "bins")
    assert info.bins == tuple(BinInfo(str(edge), None) for edge in edges)
    assert store.info.bins == tuple(BinInfo(str(edge), 20) for edge in edges)
    assert info.max_seq_length == store.info.max_seq_length == (512 if kind == "variable" else edges[-1])
    assert store.info.max_predictions == (76 if kind == "variable" else PREDICTIONS)
    assert info.identity == store.info.identity
    source = PackedSource(
        tmp_path / "bins",
        packs_per_step=8,
        max_sequences_per_pack=1,
        bin_counts=[8 - len(edges) + 1] + [1] * (len(edges) - 1),
        seed=1,
        partition=by_length(1),
        vocab_size=500,
    )
    source.open()
    for step in range(2 * source.steps_per_epoch):
        (batch,) = source.batches_of(step)
        found = np.searchsorted(edges, np.diff(batch.cu_seqlens.numpy()))
        assert np.bincount(found, minlength=len(edges)).tolist() == [8 - len(edges) + 1] + [1] * (len(edges) - 1)
        assert len(set(numbers(batch))) > 1
        assert np.diff(batch.arrays()["first_rows"]).min() != 0


def test_bins_by_other_names_are_sorted_by_length(tmp_path):
    for name, low, high in (("long", 20, 30), ("short", 5, 9)):
        (tmp_path / "bins" / name).mkdir(parents=True)
        rows = bert_rows(10, max_length=high, min_length=low)
        write_fixed(tmp_path / "bins" / name / "part_00000_of_00001.hdf5", rows)
    for number in (2, 10):
        rows = bert_rows(10, max_length=6 * number, min_length=5 * number)
        (tmp_path / "files").mkdir(exist_ok=True)
        write_variable(tmp_path / "files" / f"part_00000_bin{number}.hdf5", rows)
    assert [bin.name for bin in open_store(tmp_path / "bins").info.bins] == ["short", "long"]
    assert [bin.name for bin in describe(tmp_path / "files").bins] == ["bin2", "bin10"]
