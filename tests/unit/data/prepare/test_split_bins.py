"""Shuffling, packing, bins: every sequence once, the same bytes whatever happens on the way,
honest about options.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbert.data.formats.nvidia import NvidiaStore
from mlbert.data.formats.open import describe, open_store
from mlbert.data.formats.prepared import ShardSet
from mlbert.data.formats.ragged import Ragged
from mlbert.data.prepare import export_nvidia, shuffle, split_bins
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.shuffle import Packing, make_eval_set, make_pieces, shuffle_set
from mlbert.data.prepare.split_bins import make_bins, make_hdf5_bins
from nvidia_shards import bert_rows, write_fixed
from programs import write_files
from stored_sets import (
    assert_same_rows,
    flip,
    make_rows,
    names,
    random_lengths,
    same_sequences,
    tree,
    write_set,
)
from user_errors import user_error

EDGES = (8, 16, 24, 32)
TWO = {"edges": EDGES, "num_shards": 2}
HDF5_EDGES = (8, 16, 32)
pytestmark = pytest.mark.usefixtures("own_cache")
OTHERS = [
    ("{}/part_00000.hdf5", ("64", "128", "1024")),
    ("{}/part_00000.hdf5", ("short", "middle", "long")),
]


@given(count=st.integers(16, 200), shards=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=2)
def test_every_sequence_once_and_in_its_bin(tmp_path_factory, count, shards, seed):
    folder = tmp_path_factory.mktemp("bins")
    rows = make_rows(random_lengths(count, seed=seed), seed)
    source = write_set(folder / "source", rows)
    manifests = make_bins(source, folder / "out", edges=EDGES, num_shards=shards, seed=seed)
    names = ["bin-001-008", "bin-009-016", "bin-017-024", "bin-025-032"]
    assert [manifest.path.parent.name for manifest in manifests] == names
    for manifest, low, high in zip(manifests, (1, 9, 17, 25), EDGES, strict=True):
        counts = [shard.num_sequences for shard in manifest.shards]
        assert len(counts) == shards
        assert max(counts) - min(counts) <= 1
        lengths = ShardSet.open(manifest.path.parent, verify=True).lengths
        assert ((lengths >= low) & (lengths <= high)).all()
        assert manifest.max_seq_length == high
    store = open_store(folder / "out")
    assert len(store) == count
    assert same_sequences(store.gather(np.arange(count)), rows)


def test_edges_and_numbers_of_shards_that_do_not_fit(source, tmp_path):
    for edges in ((), (0, 5), (8, 8), (16, 8)):
        with user_error("config.value", "--edges"):
            make_bins(source, tmp_path / "out", edges=edges)
    with user_error("data.too-long", source):
        make_bins(source, tmp_path / "out", edges=(8, 24))
    make_bins(source, tmp_path / "out", **TWO)
    with user_error("prepare.other-options", tmp_path / "out"):
        make_bins(source, tmp_path / "out", edges=(16, 32), num_shards=2)
    few = write_set(tmp_path / "few", make_rows(np.asarray([6, 20, 20, 20])))
    with user_error("config.range", "--shards"):
        make_bins(few, tmp_path / "bins", edges=(16, 32), num_shards=4)
    first, _ = make_bins(few, tmp_path / "bins", edges=(16, 32), num_shards=3)
    assert [shard.num_sequences for shard in first.shards] == [0, 0, 1]


def test_a_damaged_shard_a_bin_of_another_folder_and_a_bad_index_are_named(source, tmp_path):
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
    for content, code in (
        ("", "file.json"),
        ("{}", "data.format"),
        ('{"format": "mlbert-bins", "version": 1}', "file.json"),
        ('{"format": "mlbert-bins", "version": 9}', "data.format"),
    ):
        (bins / "bins.json").write_text(content)
        with user_error(code, bins / "bins.json"):
            describe(bins)


@given(
    count=st.integers(40, 200),
    seed=st.integers(0, 99),
    layout=st.sampled_from(["fixed", "variable"]),
)
@settings(max_examples=3)
def test_every_sequence_once_and_in_its_folder(tmp_path_factory, monkeypatch, count, seed, layout):
    monkeypatch.setattr(split_bins, "ROWS_A_FILE", 17)
    folder = tmp_path_factory.mktemp("bins")
    rows = make_rows(np.concatenate([random_lengths(count, seed=seed), [7, 12, 20]]), seed)
    source = write_set(folder / "source", rows)
    sizes = make_hdf5_bins(source, folder / "out", edges=HDF5_EDGES, layout=layout)
    assert list(sizes.items()) == [
        *zip(("8", "16", "32"), np.histogram(rows.lengths, [0, 9, 17, 33])[0], strict=True)
    ]
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["16", "32", "8"]
    for low, high in ((1, 8), (9, 16), (17, 32)):
        files = sorted((folder / "out" / str(high)).iterdir())
        found = [NvidiaStore(path).lengths for path in files]
        assert max(map(len, found)) - min(map(len, found)) <= 1
        assert all(((low <= lengths) & (lengths <= high)).all() for lengths in found)
        if layout == "fixed":
            with h5py.File(files[0], "r") as file:
                assert file["input_ids"].shape == (len(found[0]), high)
    store = open_store(folder / "out")
    assert same_sequences(store.gather(np.arange(len(store))), rows)
    in_order = rows.take(np.flatnonzero(rows.lengths <= 8))
    assert names(store.gather(np.arange(sizes["8"]))) == names(in_order)


def test_an_interrupted_run_is_continued_and_a_finished_one_is_left_alone(
    source, tmp_path, monkeypatch
):
    monkeypatch.setattr(split_bins, "ROWS_A_FILE", 17)
    sizes = make_hdf5_bins(source, tmp_path / "good", edges=HDF5_EDGES)
    broken = mock.Mock(
        wraps=export_nvidia.write_hdf5, side_effect=[mock.DEFAULT] * 4 + [KeyboardInterrupt]
    )
    with mock.patch.object(export_nvidia, "write_hdf5", broken), pytest.raises(KeyboardInterrupt):
        make_hdf5_bins(source, tmp_path / "out", edges=HDF5_EDGES)
    assert not (tmp_path / "out").exists()
    unfinished = tmp_path / "out.unfinished"
    kept = tree(unfinished)
    assert len(kept) == 4
    part = "part_00000_of_00001.hdf5"
    write_files(unfinished, {f"64/{part}": "of other edges", f"8/{part}.17.tmp": "cut off"})
    times = {name: (unfinished / name).stat().st_mtime_ns for name in kept}
    (tmp_path / "out").mkdir()
    make_hdf5_bins(source, tmp_path / "out", edges=HDF5_EDGES)
    assert tree(tmp_path / "out") == tree(tmp_path / "good")
    assert not unfinished.exists()
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in kept} == times
    assert make_hdf5_bins(source, tmp_path / "out", edges=HDF5_EDGES) == sizes
    for options in ({"edges": (16, 32)}, {"edges": HDF5_EDGES, "layout": "variable"}):
        with user_error("file.in-the-way", tmp_path / "out"):
            make_hdf5_bins(source, tmp_path / "out", **options)
    assert tree(tmp_path / "out") == tree(tmp_path / "good")


def test_options_and_outputs_that_do_not_fit(source, tmp_path):
    for options, code, subject in (
        ({"edges": (16, 8)}, "config.value", "--edges"),
        ({"edges": (8, 16)}, "data.too-long", "source"),
        ({"edges": (4, 32)}, "data.empty", "source"),
        ({"layout": "packed"}, "config.choice", "--layout"),
    ):
        with user_error(code, subject):
            make_hdf5_bins(source, tmp_path / "out", **({"edges": HDF5_EDGES} | options))
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["source"]
    write_files(tmp_path, {"out.unfinished/8/notes.txt": "mine"})
    with user_error("file.in-the-way", tmp_path / "out.unfinished/8/notes.txt"):
        make_hdf5_bins(source, tmp_path / "out", edges=HDF5_EDGES)
    assert (tmp_path / "out.unfinished" / "8" / "notes.txt").read_text() == "mine"
    for out in (source, source / "bins"):
        with user_error("file.in-input", out):
            make_hdf5_bins(source, out, edges=HDF5_EDGES)
    (tmp_path / "file").write_text("")
    with user_error("file.in-the-way", tmp_path / "file"):
        make_hdf5_bins(source, tmp_path / "file", edges=HDF5_EDGES)


@pytest.mark.parametrize(("path", "names"), [*OTHERS, ("part_00000_{}.hdf5", ("bin2", "bin10"))])
def test_bins_of_others_are_in_the_order_of_their_numbers_or_lengths(tmp_path, path, names):
    bins = tmp_path / "bins"
    for number, name in enumerate(names):
        place = bins / path.format(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_fixed(
            place, bert_rows(10, number, 20 * number + 20, 20 * number + 5), width=60 + number
        )
    info = describe(bins)
    store = open_store(bins)
    assert [(one.name, one.num_sequences) for one in store.info.bins] == [
        (name, 10) for name in names
    ]
    assert "short" in names or [one.name for one in info.bins] == [*names], (
        "numbers are known before lengths"
    )
    assert info.max_seq_length == store.info.max_seq_length == 59 + len(names)
    assert info.identity == store.info.identity


def everything(folder: Path) -> Ragged:
    return Ragged.concatenate(list(ShardSet.open(folder, verify=True)))


@given(
    count=st.integers(0, 150),
    shards=st.integers(1, 4),
    outputs=st.integers(1, 5),
    seed=st.integers(0, 99),
)
@settings(max_examples=4)
def test_every_sequence_once(tmp_path_factory, count, shards, outputs, seed):
    folder = tmp_path_factory.mktemp("shuffle")
    rows = make_rows(random_lengths(count, seed=seed), seed)
    source = write_set(folder / "source", rows, shards)
    outputs = min(outputs, max(1, count))
    plain = shuffle_set(source, folder / "plain", seed=seed, num_shards=outputs)
    packed = shuffle_set(
        source, folder / "packed", seed=seed, num_shards=outputs, packing=Packing(40, 3)
    )
    assert same_sequences(everything(folder / "plain"), rows)
    assert same_sequences(everything(folder / "packed"), rows)
    counts = [shard.num_sequences for shard in plain.shards]
    assert max(counts) - min(counts) <= 1
    store = ShardSet.open(folder / "packed")
    assert store.num_packs == packed.num_packs
    for shard in range(outputs):
        sizes = np.diff(store.shard(shard).pack_offsets)
        tokens = np.diff(store.shard(shard).rows.offsets[store.shard(shard).pack_offsets])
        assert ((sizes >= 1) & (sizes <= 3)).all()
        assert (tokens <= 40).all()


def test_the_order_is_random_by_seed(source, tmp_path):
    rows = names(everything(source))
    orders = []
    for number, seed in enumerate((1, 1, 2)):
        shuffle_set(source, tmp_path / f"out{number}", seed=seed, num_shards=2)
        orders.append(names(everything(tmp_path / f"out{number}")))
    assert orders[0] == orders[1]
    places = [np.asarray([rows.index(name) for name in order]) for order in (orders[0], orders[2])]
    for place in places:
        assert abs(np.corrcoef(place, np.arange(300))[0, 1]) < 5 / np.sqrt(300)
    assert abs(np.corrcoef(*places)[0, 1]) < 5 / np.sqrt(300)


def test_the_size_of_pieces_does_not_matter(source, tmp_path, monkeypatch):
    shuffle_set(source, tmp_path / "one", num_shards=3, packing=Packing())
    shards = [f"shard-0000{i}-of-00003.h5" for i in range(3)]
    assert sorted(tree(tmp_path / "one")) == ["checksums.xxh3", "manifest.json", *shards]
    monkeypatch.setattr(shuffle, "make_pieces", lambda store: make_pieces(store, 31))
    shuffle_set(source, tmp_path / "small", num_shards=3, packing=Packing())
    assert names(everything(tmp_path / "small")) == names(everything(tmp_path / "one"))
    store = ShardSet.open(source)
    assert max(len(shuffle.piece_rows(store, piece)) for piece in make_pieces(store, 31)) == 31


def test_the_manifest_states_the_fill_and_other_options_leave_a_finished_folder_alone(
    source, tmp_path
):
    out = tmp_path / "out"
    manifest = shuffle_set(source, out, packing=Packing())
    fill = pytest.approx(manifest.num_tokens / (32 * manifest.num_packs), abs=1e-6)
    packs = json.loads(manifest.path.read_text())["packs"]
    assert (packs["max_tokens"], packs["max_sequences"], packs["fill"]) == (32, 3, fill)
    assert describe(out).max_pack_tokens == 32
    assert manifest.provenance["input"] == {"options": {}}
    before = tree(out)
    for change in ({"seed": 1}, {"packing": None}, {"packing": Packing(64)}, {"num_shards": 2}):
        with user_error("prepare.other-options", out):
            shuffle_set(source, out, **({"packing": Packing()} | change))
    assert tree(out) == before


def test_packs_and_bins_are_split_and_reported(source, tmp_path, said):
    shuffle_set(source, tmp_path / "packed", packing=Packing(), executor=Executor(progress=said))
    make_bins(source, tmp_path / "bins", edges=(16, 32), executor=Executor(progress=said))
    assert said.lines == []
    for made, line in (
        ("packed", "contains packs: they are unpacked"),
        ("bins", "contains bins: their sequences are"),
    ):
        shuffle_set(
            tmp_path / made,
            tmp_path / f"{made}-again",
            packing=Packing(),
            executor=Executor(progress=said),
        )
        assert line in said.lines[-1]
        assert same_sequences(everything(tmp_path / f"{made}-again"), everything(source))
    make_bins(
        tmp_path / "packed",
        tmp_path / "bins-of-packs",
        edges=(16, 32),
        executor=Executor(progress=said),
    )
    assert len(said.lines) == 3
    assert "contains packs" in said.lines[-1]


def test_mistakes(source, tmp_path):
    with user_error("data.too-long", "--max-tokens"):
        shuffle_set(source, tmp_path / "out", packing=Packing(31))
    for path in (tmp_path / "absent", source / "manifest.json"):
        with user_error("file.missing", path):
            shuffle_set(path, tmp_path / "out")
    with user_error("vocabulary.mismatch", source):
        shuffle.known_vocabulary(replace(describe(source), vocab_size=None))
    few = write_set(tmp_path / "few", make_rows(random_lengths(3)))
    for packing in (None, Packing()):
        with user_error("config.range", "--shards"):
            shuffle_set(few, tmp_path / "out", num_shards=4, packing=packing)
    assert not (tmp_path / "out").exists()
    assert len(shuffle_set(few, tmp_path / "out", num_shards=3, packing=Packing()).shards) == 3


def test_output_over_input_through_links(source, tmp_path):
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "files").mkdir()
    for path in source.iterdir():
        (tmp_path / "files" / path.name).symlink_to(path)
    for name in ("source", "link", "files"):
        with user_error("file.in-input", source):
            shuffle_set(tmp_path / name, source)


@pytest.mark.parametrize(("count", "num"), [(103, 40), (20, 20)])
def test_evaluation_examples_are_evenly_picked_in_order(tmp_path, count, num):
    rows = make_rows(random_lengths(count))
    source = write_set(tmp_path / "source", rows)
    out = tmp_path / "out"
    assert make_eval_set(source, out, num=num).num_sequences == num
    assert_same_rows(everything(out), rows.take(np.arange(num) * count // num))
    before = tree(out)
    make_eval_set(source, out, num=num)
    assert tree(out) == before
    with user_error("prepare.other-options", out):
        make_eval_set(source, out, num=num - 1)
    if num == 20:
        with user_error("config.range", "--num"):
            make_eval_set(source, tmp_path / "more", num=21)
