"""Shuffling and packing: every sequence once, the same bytes whatever happens on the way, honest about its options."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbert.data.formats.open import describe
from mlbert.data.formats.prepared import ShardSet
from mlbert.data.formats.ragged import Ragged
from mlbert.data.prepare import shuffle
from mlbert.data.prepare.jobs import Executor
from mlbert.data.prepare.shuffle import Packing, make_eval_set, make_pieces, shuffle_set
from mlbert.data.prepare.split_bins import make_bins
from stored_sets import assert_same_rows, make_rows, names, random_lengths, same_sequences, tree, write_set
from user_errors import user_error


def everything(folder: Path) -> Ragged:
    return Ragged.concatenate(list(ShardSet.open(folder, verify=True)))


@given(count=st.integers(0, 150), shards=st.integers(1, 4), outputs=st.integers(1, 5), seed=st.integers(0, 99))
@settings(max_examples=4)
def test_every_sequence_once(tmp_path_factory, count, shards, outputs, seed):
    folder = tmp_path_factory.mktemp("shuffle")
    rows = make_rows(random_lengths(count, seed=seed), seed)
    source = write_set(folder / "source", rows, shards)
    outputs = min(outputs, max(1, count))
    plain = shuffle_set(source, folder / "plain", seed=seed, num_shards=outputs)
    packed = shuffle_set(source, folder / "packed", seed=seed, num_shards=outputs, packing=Packing(40, 3))
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


def test_workers_and_the_size_of_pieces_do_not_matter(source, tmp_path, monkeypatch):
    shuffle_set(source, tmp_path / "one", num_shards=3, packing=Packing())
    shuffle_set(source, tmp_path / "two", num_shards=3, packing=Packing(), executor=Executor(workers=2))
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    shards = [f"shard-0000{i}-of-00003.h5" for i in range(3)]
    assert sorted(tree(tmp_path / "one")) == ["checksums.xxh3", "manifest.json", *shards]
    monkeypatch.setattr(shuffle, "make_pieces", lambda store: make_pieces(store, 31))
    shuffle_set(source, tmp_path / "small", num_shards=3, packing=Packing())
    assert names(everything(tmp_path / "small")) == names(everything(tmp_path / "one"))


def test_pieces_cover_the_input(source):
    store = ShardSet.open(source)
    for most in (7, 10_000):
        rows = [shuffle.piece_rows(store, piece) for piece in make_pieces(store, most)]
        assert_same_rows(Ragged.concatenate(rows), everything(source))
        assert max(map(len, rows)) <= most


def test_the_manifest_states_the_fill(source, tmp_path):
    manifest = shuffle_set(source, tmp_path / "out", packing=Packing())
    fill = pytest.approx(manifest.num_tokens / (32 * manifest.num_packs), abs=1e-6)
    packs = json.loads(manifest.path.read_text())["packs"]
    assert (packs["max_tokens"], packs["max_sequences"], packs["fill"]) == (32, 3, fill)
    assert describe(tmp_path / "out").max_pack_tokens == 32
    assert manifest.provenance["input"] == {"options": {}}


def test_packs_and_bins_are_split_and_reported(source, tmp_path, said):
    shuffle_set(source, tmp_path / "packed", packing=Packing(), executor=Executor(progress=said))
    make_bins(source, tmp_path / "bins", edges=(16, 32), executor=Executor(progress=said))
    assert said.lines == []
    for made, line in (("packed", "holds packs: they are unpacked"), ("bins", "holds bins: their sequences are")):
        shuffle_set(tmp_path / made, tmp_path / f"{made}-again", packing=Packing(), executor=Executor(progress=said))
        assert line in said.lines[-1]
        assert same_sequences(everything(tmp_path / f"{made}-again"), everything(source))
    make_bins(tmp_path / "packed", tmp_path / "bins-of-packs", edges=(16, 32), executor=Executor(progress=said))
    assert len(said.lines) == 3
    assert "holds packs" in said.lines[-1]


def test_other_options_leave_a_finished_folder_alone(source, tmp_path):
    out = tmp_path / "out"
    shuffle_set(source, out, packing=Packing())
    before = tree(out)
    for change in ({"seed": 1}, {"packing": None}, {"packing": Packing(64)}, {"num_shards": 2}):
        with user_error("prepare.other-options", out):
            shuffle_set(source, out, **{"packing": Packing(), **change})
    assert tree(out) == before


def test_a_set_with_a_shard_of_another_or_unfinished(source, tmp_path):
    other = write_set(tmp_path / "other", make_rows(random_lengths(300), seed=9))
    shutil.copy(other / "shard-00002-of-00003.h5", source)
    with user_error("data.checksum", source / "shard-00002-of-00003.h5"):
        shuffle_set(source, tmp_path / "out")
    with user_error("data.damaged", source):
        ShardSet.open(source, verify=False).gather(np.arange(300))
    (source / "manifest.json").unlink()
    with user_error("data.format", source):
        shuffle_set(source, tmp_path / "out")


def test_more_shards_than_sequences(tmp_path):
    source = write_set(tmp_path / "source", make_rows(random_lengths(3)))
    for packing in (None, Packing()):
        with user_error("config.range", "--shards"):
            shuffle_set(source, tmp_path / "out", num_shards=4, packing=packing)
    assert not (tmp_path / "out").exists()
    assert len(shuffle_set(source, tmp_path / "out", num_shards=3, packing=Packing()).shards) == 3


def test_mistakes(source, tmp_path):
    with user_error("data.too-long", "--max-tokens"):
        shuffle_set(source, tmp_path / "out", packing=Packing(31))
    for path in (tmp_path / "absent", source / "manifest.json"):
        with user_error("file.missing", path):
            shuffle_set(path, tmp_path / "out")
    with user_error("vocabulary.mismatch", source):
        shuffle.known_vocabulary(replace(describe(source), vocab_size=None))
    (tmp_path / "file").write_text("")
    with user_error("file.unwritable", tmp_path / "file/out"):
        shuffle_set(source, tmp_path / "file" / "out")


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
    source, out = write_set(tmp_path / "source", rows), tmp_path / "out"
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
