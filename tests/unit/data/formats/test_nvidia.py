"""NVIDIA's shards: what h5py wrote is read as the same sequences, and an error names the damaged
file and row.
"""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbert.data.formats import nvidia, nvidia_index
from mlbert.data.formats.file_map import FileMap
from mlbert.data.formats.nvidia import NvidiaStore
from mlbert.data.formats.open import describe, open_store
from mlbert.data.formats.padded import Widths
from mlbert.data.formats.ragged import Ragged
from mlbert.data.prepare.export_nvidia import export_nvidia
from mlbert.host.errors import UserError
from nvidia_shards import (
    PREDICTIONS,
    WIDTH,
    bert_rows,
    pack_counts,
    write_fixed,
    write_kind,
    write_variable,
)
from stored_sets import assert_same_rows, make_rows, random_lengths, write_set
from user_errors import user_error

COUNT = 60
FILES = 3
pytestmark = pytest.mark.usefixtures("own_cache")
KINDS = ["fixed", "variable", "packed"]
LIMITS = Widths(WIDTH, PREDICTIONS)
PLAIN = {"chunks": True, "compression": "gzip"}
# The kind of a shard of 20 rows, a column, what it becomes (None: it is removed), and the error.
COLUMNS = [
    *((kind, "segment_ids", None, "data.format") for kind in KINDS),
    *((kind, "masked_lm_ids", None, "data.format") for kind in KINDS),
    *((kind, "next_sentence_labels", None, "data.format") for kind in KINDS),
    ("fixed", "masked_lm_ids", np.zeros((19, PREDICTIONS), np.int16), "data.damaged"),
    ("fixed", "segment_ids", np.zeros((20, WIDTH - 1), np.int8), "data.damaged"),
    ("fixed", "segment_ids", np.zeros(20, np.int8), "data.damaged"),
    ("fixed", "input_ids", np.zeros((20, WIDTH), np.int32), "data.format"),
    ("fixed", "input_ids", np.zeros((20, WIDTH), np.float16), "data.format"),
    ("fixed", "masked_lm_positions", np.zeros((20, PREDICTIONS + 1), np.int16), "data.damaged"),
]
ROW = 7


def write(
    folder: Path, kind: str, seed: int = 0, names: str = "part_{:05d}_of_{:05d}.hdf5", **options
) -> Ragged:
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for number in range(FILES):
        parts.append(
            bert_rows(COUNT // FILES, seed + number, WIDTH // 3 if kind == "packed" else WIDTH)
        )
        write_kind(kind, folder / names.format(number, FILES), parts[-1], seed + number, **options)
    return Ragged.concatenate(parts)


def open_all(folder: Path) -> NvidiaStore:
    store = nvidia.open_folder(folder, LIMITS)
    assert isinstance(store, NvidiaStore)
    return store


@pytest.mark.parametrize(
    "names", ["part_{:05d}_of_{:05d}", "part_{:05d}", "part-{:05d}-of-{:05d}.hdf", "x{:d}.h5"]
)
def test_file_names(tmp_path, names):
    expected = write(tmp_path / "set", "variable", names=names)
    for other in ("shard_list_00000.lst", "checksums.chk", "README"):
        (tmp_path / "set" / other).write_text("no shard")
    assert_same_rows(open_all(tmp_path / "set").gather(np.arange(COUNT)), expected)


def test_labels_as_a_column_and_other_integers(tmp_path):
    rows = bert_rows(9)
    path = write_fixed(tmp_path / "a.h5", rows)
    with h5py.File(path, "r+") as file:
        labels = file["next_sentence_labels"][:]
        del file["next_sentence_labels"]
        file["next_sentence_labels"] = labels.astype(np.uint8)[:, None]
    assert_same_rows(NvidiaStore(path).gather(np.arange(9)), rows)


@pytest.mark.parametrize(
    ("kind", "limits"), [("packed", (512, 76, 512)), ("fixed", (WIDTH, PREDICTIONS, None))]
)
def test_info_reads_no_sample(tmp_path, kind, limits):
    write(tmp_path / "set", kind)
    info = describe(tmp_path / "set")
    assert (info.max_seq_length, info.max_predictions, info.max_pack_tokens) == limits
    assert (info.kind, info.num_sequences, info.vocab_size) == (f"nvidia-{kind}", None, None)
    assert open_store(tmp_path / "set").info.num_sequences == COUNT


@pytest.mark.parametrize(
    ("layout", "packs", "limits"),
    [("variable", None, (32, 5, None)), ("packed", [*range(0, 61, 2)], (32, 5, 64))],
)
def test_our_exports_record_their_limits(tmp_path, layout, packs, limits):
    """Without them, a set of 32 tokens would count as one of 512,
    which a model of 32 positions cannot use.
    """
    rows = make_rows(random_lengths(COUNT))
    source = write_set(tmp_path / "source", rows, shards=1, packs=packs)
    (path,) = export_nvidia(source, tmp_path / "set", layout)
    for info in (describe(tmp_path / "set"), open_store(tmp_path / "set").info):
        assert (info.max_seq_length, info.max_predictions, info.max_pack_tokens) == limits
    assert_same_rows(open_store(tmp_path / "set").gather(np.arange(COUNT)), rows)
    with h5py.File(path, "r+") as file:
        file.attrs["mlbert_max_row_tokens"] = 31
        file.attrs["mlbert_max_seq_length"] = 31
    with user_error("data.damaged", path):
        open_store(tmp_path / "set")
    with h5py.File(path, "r+") as file:
        file.attrs["mlbert_max_seq_length"] = 32
    with user_error("data.damaged", path):
        describe(tmp_path / "set")


def test_bins_in_folders_and_in_names(tmp_path):
    short = bert_rows(20, 0, 12)
    long = bert_rows(30, 1, min_length=13)
    (tmp_path / "names").mkdir()
    for name, rows in (("bin_1", short), ("bin_2", long)):
        (tmp_path / "folders" / name).mkdir(parents=True)
        for number, half in enumerate(np.array_split(np.arange(len(rows)), 2)):
            for path in (
                f"folders/{name}/part_{number}_of_2.hdf5",
                f"names/{name}_part_{number}_of_2.hdf5",
            ):
                write_variable(tmp_path / path, rows.take(half))
    expected = Ragged.concatenate([short, long])
    order = np.random.default_rng(4).permutation(50)
    for folder in ("folders", "names"):
        store = open_store(tmp_path / folder)
        assert [len(one) for one in store.bins] == [20, 30]
        assert_same_rows(store.gather(order), expected.take(order))
        assert describe(tmp_path / folder).kind == "nvidia-variable"


def test_folders_side_by_side_that_are_no_bins(tmp_path):
    write(tmp_path / "hdf5" / "training", "variable")
    write(tmp_path / "hdf5" / "eval", "variable", seed=50)
    with user_error("data.mixed", tmp_path / "hdf5"):
        open_store(tmp_path / "hdf5")


def test_file_of_the_latest_format(tmp_path):
    expected = bert_rows(30)
    write_variable(tmp_path / "a.h5", expected)
    with (
        h5py.File(tmp_path / "a.h5") as old,
        h5py.File(tmp_path / "b.h5", "w", libver="latest") as new,
    ):
        for name in old:
            new.create_dataset(name, data=old[name][:], dtype=old[name].dtype)
    store = NvidiaStore(tmp_path / "b.h5")
    assert (store._index.offsets[:, 0] >= 0).all()
    assert_same_rows(store.gather(np.arange(30)), expected)


def test_row_with_many_items_of_other_columns(tmp_path):
    """Heap collections grow with their largest object; rows far apart in size share the file."""
    rows = [
        bert_rows(3, seed, max_length=length, min_length=length)
        for seed, length in enumerate((5, 9000, 6, 30000))
    ]
    expected = Ragged.concatenate(rows)
    path = write_variable(tmp_path / "a.h5", expected)
    store = NvidiaStore(path, limits=Widths(30_000, PREDICTIONS))
    assert_same_rows(store.gather(np.arange(12)), expected)
    with user_error("data.damaged", path):
        NvidiaStore(path, limits=Widths(512, PREDICTIONS))


def test_many_threads_read_at_once(tmp_path):
    expected = write(tmp_path / "set", "variable")
    rows = bert_rows(COUNT // FILES, 1)
    write_variable(tmp_path / "set" / f"part_00001_of_0000{FILES}.hdf5", rows, **PLAIN)
    store = open_all(tmp_path / "set")
    orders = [np.random.default_rng(seed).permutation(COUNT)[:50] for seed in range(12)]
    with ThreadPoolExecutor(6) as pool:
        for order, rows in zip(orders, pool.map(store.gather, orders), strict=True):
            assert_same_rows(rows, expected.take(order))


@settings(max_examples=25)
@given(
    count=st.integers(1, 40),
    seed=st.integers(0, 1000),
    kind=st.sampled_from(KINDS),
    plain=st.booleans(),
    order=st.lists(st.integers(0, 10**6), max_size=50),
)
def test_any_sequences_come_back(tmp_path_factory, count, seed, kind, plain, order):
    path = tmp_path_factory.mktemp("any") / "a.h5"
    options = PLAIN if plain else {}
    rows = bert_rows(count, seed, WIDTH // 3 if kind == "packed" else WIDTH)
    write_kind(kind, path, rows, seed, **options)
    store = NvidiaStore(path, limits=LIMITS, cached=False)
    chosen = np.asarray(order, np.int64) % count
    assert_same_rows(store.gather(chosen), rows.take(chosen))
    assert_same_rows(store.gather(chosen[:0]), rows.slice(0, 0))
    assert np.array_equal(store.lengths, rows.lengths)
    assert store.lengths.dtype == np.int32
    assert (store._index.offsets[:, 0] >= 0).all() != plain, "mapped unless compressed"
    if kind == "packed":
        packs = np.split(np.arange(count), np.cumsum(pack_counts(count, seed))[:-1])
        found, counts = store.gather_packs(chosen % len(packs))
        wanted = [packs[number] for number in chosen % len(packs)]
        assert_same_rows(found, rows.take(np.concatenate([chosen[:0], *wanted])))
        assert counts.tolist() == [len(pack) for pack in wanted]


def test_index_is_kept_and_follows_the_files(tmp_path):
    folder = tmp_path / "set"
    expected = write(folder, "variable")
    assert_same_rows(open_all(folder).gather(np.arange(COUNT)), expected)
    (kept,) = (tmp_path / "cache" / "mlbert" / "nvidia").iterdir()
    with mock.patch.object(
        nvidia_index, "build_index", side_effect=pytest.fail.Exception("not kept")
    ):
        assert_same_rows(open_all(folder).gather(np.arange(COUNT)), expected)
    expected = write(folder, "variable", seed=10)
    assert_same_rows(open_all(folder).gather(np.arange(COUNT)), expected)
    (new,) = (tmp_path / "cache" / "mlbert" / "nvidia").iterdir()
    assert new != kept
    assert sorted(path.suffix for path in folder.iterdir()) == [".hdf5"] * FILES


def test_file_map_has_the_content_of_all_files(tmp_path):
    paths = []
    for number, size in enumerate([0, 1, 65_536, 70_000]):
        paths.append(tmp_path / str(number))
        paths[-1].write_bytes(bytes([number + 1]) * size)
    content = FileMap(paths)
    for path, start, end in zip(paths, content.starts, content.ends, strict=True):
        assert content.bytes[start:end].tobytes() == path.read_bytes()
    pairs = content.view(np.dtype("<u2"))
    assert pairs[content.starts[3] + 1] == 0x0404
    with user_error("file.unreadable", tmp_path / "none"):
        FileMap([tmp_path / "none"])


def check_refused(code: str, subject: Path, folder: Path | None = None) -> str:
    with user_error(code, subject) as caught:
        store = open_all(folder or subject.parent)
        store.gather(np.arange(len(store)))
    return str(caught.value)


@pytest.mark.parametrize(("kind", "name", "values", "code"), COLUMNS)
def test_a_missing_column_and_wrong_row_counts_and_types(tmp_path, kind, name, values, code):
    write(tmp_path / name, kind)
    path = tmp_path / name / "part_00001_of_00003.hdf5"
    with h5py.File(path, "r+") as file:
        del file[name]
        if values is not None:
            file[name] = values
    check_refused(code, path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [0, 0.3, 0.9999])
def test_truncated_file(tmp_path, kind, kept):
    write(tmp_path / "set", kind, names="part_{:05d}_of_{:05d}")
    path = tmp_path / "set" / "part_00001_of_00003"
    os.truncate(path, int(kept * path.stat().st_size))
    check_refused("data.damaged", path)


def test_shard_numbers(tmp_path):
    folder = tmp_path / "set"
    write(folder, "variable")
    one = folder / "part_00001_of_00003.hdf5"
    shutil.copy(one, folder / "part_00001_of_00003.hdf")
    check_refused("data.duplicate", one)
    (folder / "part_00001_of_00003.hdf").rename(folder / "part_00004_of_00005.hdf")
    check_refused("data.mixed", folder / "part_00004_of_00005.hdf")
    (folder / "part_00004_of_00005.hdf").unlink()
    one.rename(tmp_path / "away.hdf5")
    check_refused("data.incomplete", folder, folder)
    shutil.copy(folder / "part_00000_of_00003.hdf5", one)
    check_refused("data.duplicate", one)


@pytest.mark.parametrize(
    ("kind", "name", "width"), [("variable", "set", WIDTH), ("fixed", "fixed", WIDTH + 1)]
)
def test_mixed_folders(tmp_path, kind, name, width):
    write(tmp_path / name, kind)
    check_refused(
        "data.mixed",
        write_fixed(tmp_path / name / "part_00001_of_00003.hdf5", bert_rows(20, 1), width),
    )


def test_folder_without_shards(tmp_path):
    for folder, code in ((tmp_path, "data.missing"), (tmp_path / "none", "file.unreadable")):
        with user_error(code, folder):
            NvidiaStore(folder)


def at(place: int, value: int):
    return lambda row: np.where(np.arange(len(row)) == place, value, row).astype(row.dtype)


@pytest.mark.parametrize("options", [{}, PLAIN], ids=["mapped", "compressed"])
@pytest.mark.parametrize(
    ("kind", "column", "change"),
    [
        ("variable", "input_ids", lambda v: np.resize(v, WIDTH + 1)),
        ("variable", "input_ids", lambda v: v[:0]),
        ("variable", "input_ids", lambda v: v[:-1]),
        ("variable", "input_ids", at(2, -1)),
        ("variable", "segment_ids", at(0, 1)),
        ("variable", "segment_ids", lambda v: np.ones_like(v)),
        ("variable", "masked_lm_ids", lambda v: np.zeros(len(v) + 1, np.int16)),
        ("variable", "next_sentence_labels", lambda v: np.int8(2)),
        ("fixed", "input_mask", at(1, 0)),
        ("fixed", "input_mask", np.zeros_like),
        ("fixed", "masked_lm_positions", lambda v: v * 0 + WIDTH),
        ("fixed", "masked_lm_positions", lambda v: v * 0 - 1),
        ("fixed", "masked_lm_positions", lambda v: v * 0 + 1),
        ("fixed", "masked_lm_positions", lambda v: v * 0 + np.eye(PREDICTIONS)[-1]),
        ("packed", "packed_input_len", at(0, 1)),
        ("packed", "packed_input_len", at(0, 0)),
        ("packed", "packed_masked_lm_len", at(0, 5)),
        ("packed", "packed_input_len", lambda v: v[:0]),
        ("packed", "next_sentence_labels", lambda v: np.resize(v, 5)),
    ],
)
def test_wrong_row_is_named(tmp_path, kind, column, change, options):
    write(tmp_path / "set", kind, **options)
    path = tmp_path / "set" / "part_00001_of_00003.hdf5"
    with h5py.File(path, "r+") as file:
        file[column][ROW] = change(np.array(file[column][ROW]))
    assert f"row {ROW} " in check_refused("data.damaged", path)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    flips=st.lists(st.tuples(st.floats(0, 0.999999), st.integers(1, 255)), min_size=1, max_size=8),
)
def test_flipped_bytes_give_sequences_or_one_line(tmp_path_factory, kind, flips):
    """Never a crash or a traceback of another kind; what is read has the form of sequences."""
    path = tmp_path_factory.mktemp("flip") / "a.h5"
    write_kind(kind, path, bert_rows(12, 0, WIDTH // 3))
    data = bytearray(path.read_bytes())
    for place, value in flips:
        data[int(place * len(data))] ^= value
    path.write_bytes(data)
    try:
        store = NvidiaStore(path, limits=LIMITS, cached=False)
        read = store.gather(np.arange(len(store)))
    except UserError as error:
        assert "a.h5" in str(error)  # noqa: PT017
    else:
        assert len(read) == len(store)
        assert read.offsets[-1] == len(read.tokens)


def test_heap_chain_that_is_broken(tmp_path):
    path = write_variable(tmp_path / "a.h5", bert_rows(12))
    data = bytearray(path.read_bytes())
    place = data.find(b"GCOL")
    # The first object claims a terabyte.
    data[place + 24 : place + 32] = (1 << 40).to_bytes(8, "little")
    path.write_bytes(data)
    with user_error("data.damaged", path):
        NvidiaStore(path)
