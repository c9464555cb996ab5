"""MDS sets of masked samples as a store: Streaming's own files, every value,
padding that never counts, damage.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mds_samples import padded, write_columns, write_mds, write_samples
from mlbert.data.formats.mds import MdsReader
from mlbert.data.formats.mds_samples import COLUMNS, MdsSamples
from mlbert.data.formats.open import describe, open_store
from mlbert.data.formats.padded import MAX_ID
from mlbert.data.formats.ragged import Ragged
from stored_sets import flip, make_rows, names, random_lengths, tree
from text_sets import write_texts
from user_errors import user_error

pytestmark = pytest.mark.usefixtures("own_cache")
ASSETS = Path(__file__).resolve().parents[3] / "assets/mds"
WRONG = {  # values that a column cannot have
    "input_mask": (0, 2),
    "input_ids": (-1, 65_536),
    "masked_lm_ids": (65_536,),
    "segment_ids": (1, -1),
    "masked_lm_positions": (40, -3),
    "masked_lm_weights": (0.5,),
    "next_sentence_labels": (2,),
}
PREDICTED = [name for name in COLUMNS if name.startswith("masked")]


@pytest.fixture
def rows() -> Ragged:
    return make_rows(random_lengths(300))


def test_reads_streamings_own_compressed_set(tmp_path):
    pytest.importorskip("zstandard", reason="the streaming extra is not installed")
    folder = Path(shutil.copytree(ASSETS / "enwiki_bytes_zstd", tmp_path / "set"))
    info = describe(folder)
    assert (info.kind, info.max_seq_length, info.max_predictions, info.num_sequences) == (
        "mds",
        64,
        5,
        220,
    )
    assert not list(folder.glob("*.mds")), "describing unpacks nothing"
    store = open_store(folder)
    expected = np.load(ASSETS / "enwiki_samples.npz")
    found = store.gather(np.arange(220))
    assert store.lengths.tolist() == expected["input_mask"].sum(axis=1).tolist()
    again = padded(found, 64, 5)
    np.testing.assert_equal({name: again[name] for name in expected.files}, dict(expected))
    assert not list(folder.glob("*.mds")), "reading unpacks in the cache"
    assert describe(folder) == info == store.info


@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_any_order_gives_what_was_written(tmp_path, rows, compression):
    if compression:
        pytest.importorskip("zstandard", reason="the streaming extra is not installed")
    folder = write_mds(tmp_path / "set", rows, compression=compression)
    store = open_store(folder)
    assert len(list(folder.glob("*.mds*"))) > 2
    assert (len(store), store.num_packs) == (300, 0)
    for order in (
        np.arange(300),
        np.random.default_rng(1).permutation(300),
        np.array([7, 7, 0]),
        np.array([], int),
    ):
        assert names(store.gather(order)) == names(rows.take(order))
        assert store.lengths_of(order).tolist() == rows.lengths[order].tolist()
    assert np.array_equal(store.lengths, rows.lengths)


def test_the_second_opening_reads_lengths_from_the_cache(tmp_path, own_cache, monkeypatch, rows):
    folder = write_mds(tmp_path / "set", rows)
    lengths = open_store(folder).lengths
    before = tree(folder)
    with monkeypatch.context() as patch:
        patch.setattr(MdsSamples, "_lengths_of_shard", pytest.fail)
        assert np.array_equal(open_store(folder).lengths, lengths)
    (kept,) = own_cache.rglob("lengths.npy")
    for other in (299, 300, 301):
        np.save(kept, np.full(other, 9, np.uint16))
        assert np.array_equal(open_store(folder).lengths, lengths)
    assert tree(folder) == before


def test_predictions_out_of_order_are_sorted(tmp_path, rows):
    columns = padded(rows, 32, 5)
    for index, count in enumerate(np.diff(rows.masked_offsets)):
        for name in ("masked_lm_positions", "masked_lm_ids"):
            columns[name][index, :count] = columns[name][index, :count][::-1].copy()
    assert names(
        open_store(write_columns(tmp_path / "set", columns)).gather(np.arange(300))
    ) == names(rows)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_wrong_sample_is_named_when_it_is_read(tmp_path, rows, name, value):
    columns = padded(rows, 32, 5)
    columns[name][7, int(name == "input_ids")] = value
    store = open_store(write_columns(tmp_path / "set", columns))
    assert names(store.gather(np.arange(8, 300))) == names(rows.slice(8, 300))
    with user_error("data.damaged", tmp_path / "set/shard.00000.mds") as failure:
        store.gather(np.arange(300))
    assert "sample 7 " in str(failure.value)


def test_a_wrong_sample_of_a_later_shard_is_named_by_its_place_there(tmp_path, rows):
    columns = padded(rows, 32, 5)
    columns["next_sentence_labels"][[290, 297]] = 2
    folder = write_columns(tmp_path / "set", columns)
    first = int(np.cumsum(MdsReader(folder).shard_sizes)[1])
    assert first < 290
    with user_error("data.damaged", folder / "shard.00002.mds", wording=False) as failure:
        open_store(folder).gather(np.arange(300))
    assert f"sample {290 - first} " in str(failure.value)


def sizes_in(folder: Path, shard: str, sample: int, sizes: dict[str, int]) -> Path:
    """Change the sizes of columns, in bytes, in front of a sample, and drop the checksums."""
    data = bytearray((folder / shard).read_bytes())
    start = int.from_bytes(data[4 + 4 * sample :][:4], "little")
    for name, size in sizes.items():
        place = start + 4 * COLUMNS.index(name)
        data[place : place + 4] = size.to_bytes(4, "little")
    (folder / shard).write_bytes(data)
    index = json.loads((folder / "index.json").read_bytes())
    for one in index["shards"]:
        one["raw_data"]["hashes"] = {}
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def test_sizes_that_do_not_fit_each_other(tmp_path, rows):
    folder = write_mds(tmp_path / "set", rows.slice(0, 9))
    shard = folder / "shard.00000.mds"
    content = shard.read_bytes()
    for sizes in (
        *({name: 24} for name in COLUMNS),
        {name: 0 for name in COLUMNS if name != "next_sentence_labels"},
        dict.fromkeys(PREDICTED, 0),
        dict.fromkeys(PREDICTED, 33 * 4),
        {name: 4 * (MAX_ID + 1) for name in COLUMNS if name.startswith(("input", "segment"))},
    ):
        shard.write_bytes(content)
        with user_error("data.damaged", shard):
            describe(sizes_in(folder, shard.name, 0, sizes))


def test_smallest_and_largest_widths(tmp_path, rows):
    few = rows.take(np.flatnonzero(np.diff(rows.masked_offsets) == 1)[:2])
    for widths in ((32, 32), (32, 1), (MAX_ID, 5)):
        info = describe(write_mds(tmp_path / "x".join(map(str, widths)), few, *widths))
        assert (info.max_seq_length, info.max_predictions) == widths


def test_a_sample_with_other_columns_of_the_same_total_is_named(tmp_path, rows):
    other = {"masked_lm_ids": 16, "masked_lm_positions": 24}
    folder = write_mds(tmp_path / "set", rows.slice(0, 9))
    for sample in (4, 6):
        sizes_in(folder, "shard.00000.mds", sample, other)
    with user_error("data.mixed", folder / "shard.00000.mds", wording=False) as failure:
        open_store(folder)
    assert "sample 4 has columns of other sizes" in str(failure.value)


def test_damaged_sets_are_one_line(tmp_path, rows):  # test_mds.py has more damage
    folder = write_mds(tmp_path / "set", rows)
    for number, damage, look in (
        (1, flip, open_store),
        (0, Path.unlink, describe),
        (0, Path.touch, describe),
    ):
        path = folder / f"shard.0000{number}.mds"
        damage(path)
        with user_error("file.unreadable" if damage is Path.unlink else "data.damaged", path):
            look(folder)


def test_other_columns_and_other_widths_are_one_line(tmp_path, rows):
    write_texts(tmp_path / "text", ["words"])
    with user_error("data.columns", tmp_path / "text/index.json"):
        describe(tmp_path / "text")
    samples = [
        {n: c[index].tobytes() for n, c in padded(rows, 32, 5).items()} for index in range(300)
    ]
    samples[299] = {
        name: content[:-4] if len(content) == 4 * 32 else content
        for name, content in samples[299].items()
    }
    write_samples(tmp_path / "mixed", dict.fromkeys(COLUMNS, "bytes"), samples, size_limit=1 << 16)
    with user_error("data.mixed", tmp_path / "mixed/shard.00002.mds"):
        open_store(tmp_path / "mixed")
