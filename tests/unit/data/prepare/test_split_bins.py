"""Bins: each sequence in the bin of its length, shards of one bin equally long, damage noticed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbert.data.formats.open import describe, open_store
from mlbert.data.formats.prepared import ShardSet
from mlbert.data.formats.ragged import Ragged
from mlbert.data.prepare.shuffle import shuffle_set
from mlbert.data.prepare.split_bins import make_bins
from stored_sets import flip, make_rows, random_lengths, same_sequences, tree, write_set
from user_errors import user_error

EDGES = (8, 16, 24, 32)


@given(count=st.integers(16, 200), shards=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=4)
def test_every_sequence_once_and_in_its_bin(tmp_path_factory, count, shards, seed):
    folder = tmp_path_factory.mktemp("bins")
    rows = make_rows(random_lengths(count, seed=seed), seed)
    source = write_set(folder / "source", rows)
    manifests = make_bins(source, folder / "out", edges=EDGES, num_shards=shards, seed=seed)
    assert [manifest.path.parent.name for manifest in manifests] == [
        "bin-001-008",
        "bin-009-016",
        "bin-017-024",
        "bin-025-032",
    ]
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


@pytest.fixture
def source(tmp_path):
    return write_set(tmp_path / "source", make_rows(random_lengths(300)))


def test_a_finished_folder_is_left_alone(source, tmp_path):
    out = tmp_path / "out"
    first = make_bins(source, out, edges=EDGES, num_shards=2)
    assert make_bins(source, out, edges=EDGES, num_shards=2) == first
    with user_error("prepare.other-options", out):
        make_bins(source, out, edges=(16, 32), num_shards=2)


def test_an_unfinished_folder_is_finished(source, tmp_path):
    make_bins(source, tmp_path / "good", edges=EDGES, num_shards=2)
    make_bins(source, tmp_path / "out", edges=EDGES, num_shards=2)
    (tmp_path / "out" / "bins.json").unlink()
    (tmp_path / "out" / "bin-009-016" / "shard-00001-of-00002.h5").unlink()
    make_bins(source, tmp_path / "out", edges=EDGES, num_shards=2)
    assert tree(tmp_path / "out") == tree(tmp_path / "good")


def test_more_shards_than_the_fullest_bin_has_sequences(tmp_path):
    source = write_set(tmp_path / "source", make_rows(np.asarray([6, 20, 20, 20])))
    with user_error("config.range", "--shards"):
        make_bins(source, tmp_path / "out", edges=(16, 32), num_shards=4)
    first, _ = make_bins(source, tmp_path / "out", edges=(16, 32), num_shards=3)
    assert [shard.num_sequences for shard in first.shards] == [0, 0, 1]


@pytest.mark.parametrize("edges", [(), (0, 5), (8, 8), (16, 8)])
def test_edges_that_do_not_ascend(source, tmp_path, edges):
    with user_error("config.value", "--edges"):
        make_bins(source, tmp_path / "out", edges=edges)


def test_sequences_longer_than_the_last_edge(source, tmp_path):
    with user_error("data.too-long", source):
        make_bins(source, tmp_path / "out", edges=(8, 24))


def test_a_bin_of_another_folder_is_named(source, tmp_path):
    make_bins(source, tmp_path / "out", edges=EDGES, num_shards=2)
    make_bins(source, tmp_path / "other", edges=EDGES, num_shards=2, seed=1)
    name = "bin-009-016/manifest.json"
    (tmp_path / "out" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with user_error("data.checksum", tmp_path / "out/bin-009-016/manifest.json"):
        describe(tmp_path / "out")


def test_a_damaged_shard_of_a_bin_is_named(source, tmp_path):
    make_bins(source, tmp_path / "bins", edges=EDGES, num_shards=2)
    flip(tmp_path / "bins" / "bin-009-016" / "shard-00001-of-00002.h5", 0.9)
    for make in (shuffle_set, make_bins):
        with user_error("data.checksum", tmp_path / "bins/bin-009-016/shard-00001-of-00002.h5"):
            make(tmp_path / "bins", tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "file.json"),
        (b"{}", "data.format"),
        (b'{"format": "mlbert-bins", "version": 1}', "file.json"),
        (b"[]", "file.json"),
        (json.dumps({"format": "mlbert-bins", "version": 9}).encode(), "data.format"),
    ],
)
def test_bad_index(source, tmp_path, content, code):
    make_bins(source, tmp_path / "out", edges=EDGES, num_shards=2)
    (tmp_path / "out" / "bins.json").write_bytes(content)
    with user_error(code, tmp_path / "out/bins.json"):
        describe(tmp_path / "out")
