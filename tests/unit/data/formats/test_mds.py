"""MDS sets: those that MosaicML Streaming wrote, round trips, and damage of many kinds."""

from __future__ import annotations

import json
import os
import sys
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from mlbert.data.formats.mds import MdsReader, MdsWriter
from user_errors import user_error

ASSETS = Path(__file__).parents[3] / "assets/mds"
ENWIKI = ASSETS / "enwiki_bytes_zstd"
COLUMNS = {"text": "str", "ids": "ndarray:uint16", "number": "int"}
NUMBER_DTYPES = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
NUMBER_DTYPES += ["float16", "float32", "float64"]


def as_listed(name: str, value: object) -> object:
    """A value as kitchen_sink_samples.json lists it."""
    if isinstance(value, np.ndarray):
        data = value.tobytes().hex() if name == "n_nd_u8_1x300" else value.tolist()
        return {"dtype": value.dtype.name, "shape": list(value.shape), "data": data}
    if isinstance(value, np.generic):
        return {"dtype": value.dtype.name, "value": value.item()}
    return {"hex": value.hex()} if isinstance(value, bytes) else value


def rewrite(folder: Path, target: Path, cache: Path | None) -> list[tuple[str, bool]]:
    """Write a set anew with its own settings: names of the files, and whether they are the same."""
    reader, first = MdsReader(folder, cache), json.loads((folder / "index.json").read_bytes())["shards"][0]
    chosen = {name: first[name] for name in ("size_limit", "compression", "hashes")}
    with MdsWriter(target, reader.columns, **chosen) as writer:
        for sample in reader:
            writer.write(sample)
    return [(path.name, path.read_bytes() == (target / path.name).read_bytes()) for path in sorted(folder.iterdir())]


def test_reads_every_encoding_of_streaming():
    reader = MdsReader(ASSETS / "kitchen_sink")
    expected = json.loads((ASSETS / "kitchen_sink_samples.json").read_bytes())
    assert len(reader) == len(expected) == 40
    assert reader.shard_sizes.tolist() == [15, 14, 11]
    for index in np.random.default_rng(0).permutation(40):
        assert {name: as_listed(name, value) for name, value in reader[index].items()} == expected[index]
    with pytest.raises(IndexError):
        reader[40]
    with pytest.raises(IndexError):
        reader[-1]


def test_reads_compressed_shards_of_streaming(tmp_path):
    pytest.importorskip("zstandard", reason="the streaming extra is not installed")
    reader, expected = MdsReader(ENWIKI, tmp_path), np.load(ASSETS / "enwiki_samples.npz")
    assert list(reader.columns) == sorted(expected.files)
    for name, rows in expected.items():
        found = np.stack([np.frombuffer(sample[name], rows.dtype) for sample in reader])
        np.testing.assert_array_equal(found, rows)
    # Decompressed shards are a set that needs no cache.
    assert list(MdsReader(tmp_path)) == list(reader)


def test_writes_the_bytes_of_streaming(tmp_path):
    files = rewrite(ASSETS / "kitchen_sink", tmp_path / "set", None)
    assert files == [(name, True) for name in ["index.json", *(f"shard.0000{n}.mds" for n in range(3))]]


def test_writes_the_index_of_streaming_for_compressed_shards(tmp_path):
    pytest.importorskip("zstandard", reason="the streaming extra is not installed")
    pytest.importorskip("xxhash", reason="xxhash is not installed")
    rewrite(ENWIKI, tmp_path / "set", tmp_path / "cache")
    expected, found = (
        json.loads((folder / "index.json").read_bytes())["shards"] for folder in (ENWIKI, tmp_path / "set")
    )
    assert [shard["raw_data"] for shard in found] == [shard["raw_data"] for shard in expected]
    assert [{*shard["zip_data"]["hashes"]} for shard in found] == [{"sha1", "xxh3_64"}] * 3


def numbers(dtype: str) -> st.SearchStrategy:
    return npst.from_dtype(np.dtype(dtype), allow_nan=False)


def arrays(dtype: str, shape: object = None) -> st.SearchStrategy:
    return npst.arrays(dtype, shape or npst.array_shapes(max_dims=4, max_side=5), elements=numbers(dtype))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | TEXT, lambda v: st.lists(v) | st.dictionaries(TEXT, v))
VALUES = {
    "str": TEXT,
    "bytes": st.binary(max_size=300),
    "int": st.integers(-(2**63), 2**63 - 1),
    "str_int": st.integers(-(10**30), 10**30),
    "str_float": st.floats(allow_nan=False),
    "str_decimal": st.decimals(allow_nan=False, allow_infinity=False).map(Decimal),
    "json": JSON,
    "ndarray": st.sampled_from(NUMBER_DTYPES).flatmap(arrays),
    **{dtype: numbers(dtype) for dtype in NUMBER_DTYPES},
    **{f"ndarray:{dtype}": arrays(dtype) for dtype in NUMBER_DTYPES},
    "ndarray:int32:3,2": arrays("int32", (3, 2)),
    "ndarray:uint8:300": arrays("uint8", (300,)),
}


@st.composite
def sets(draw: st.DrawFn) -> tuple[dict[str, str], list[dict[str, object]], int]:
    """Columns, samples and a size limit."""
    columns = draw(
        st.dictionaries(st.text("abcü ", min_size=1), st.sampled_from(sorted(VALUES)), min_size=1, max_size=5)
    )
    sample = st.fixed_dictionaries({name: VALUES[encoding] for name, encoding in columns.items()})
    return columns, draw(st.lists(sample, min_size=1, max_size=12)), draw(st.integers(1, 2000))


@settings(max_examples=60)
@given(sets())
def test_what_is_written_is_read(case):
    columns, samples, limit = case
    with TemporaryDirectory() as folder:
        with MdsWriter(folder, columns, size_limit=limit, hashes=["sha256", "md5"]) as writer:
            for sample in samples:
                writer.write(sample)
        reader = MdsReader(folder)
        assert reader.columns == dict(sorted(columns.items()))
        assert len(reader) == len(samples)
        sizes = [path.stat().st_size for path in sorted(Path(folder).glob("*.mds"))]
        assert all(size <= limit or count == 1 for size, count in zip(sizes, reader.shard_sizes, strict=True))
        for found, expected in zip(reader, samples, strict=True):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert type(found[name]) is type(value)
                assert found[name].tolist() == value.tolist() if hasattr(value, "tolist") else found[name] == value


def test_wide_and_big_endian_arrays(tmp_path):
    arrays = [np.arange(300, dtype=">i4"), np.ones((70_000, 1), np.uint8), np.arange(12, dtype=np.int16)[::-3]]
    with MdsWriter(tmp_path, {"array": "ndarray"}) as writer:
        for array in arrays:
            writer.write({"array": array})
    for found, expected in zip(MdsReader(tmp_path), arrays, strict=True):
        assert found["array"].dtype.name == expected.dtype.name
        np.testing.assert_array_equal(found["array"], expected)


@pytest.mark.parametrize("compression", [None, "zstd", "zstd:1"])
def test_compressed_or_not(tmp_path, compression):
    if compression:
        pytest.importorskip("zstandard", reason="the streaming extra is not installed")
    folder = write_set(tmp_path / "set", compression=compression, hashes=["sha1"])
    stored = sorted(path.suffix for path in folder.glob("shard*"))
    assert stored == [".zstd" if compression else ".mds"] * 3
    reader = MdsReader(folder, tmp_path / "cache" if compression else None)
    assert [sample["number"] for sample in reader] == list(range(60))


def write_set(folder: Path, **options: object) -> Path:
    """60 samples in three shards."""
    with MdsWriter(folder, COLUMNS, size_limit=1200, **options) as writer:
        for number in range(60):
            writer.write({"text": f"sample {number}", "ids": np.array([number] * 4, np.uint16), "number": number})
    assert len(list(folder.glob("shard*"))) == 3
    return folder


def change_index(change: object) -> object:
    """Damage of the index: ``change`` gets its document, or text to put in its place."""

    def damage(folder: Path) -> None:
        path = folder / "index.json"
        if isinstance(change, str):
            path.write_text(change)
            return
        document = json.loads(path.read_bytes())
        change(document["shards"])
        path.write_text(json.dumps(document))

    return damage


def change_shard(place: int, content: bytes) -> object:
    """Damage of the last shard: other bytes at ``place``."""

    def damage(folder: Path) -> None:
        path = folder / "shard.00002.mds"
        data = bytearray(path.read_bytes())
        first = int.from_bytes(data[4:8], "little")  # of its first sample
        start = place if place < 1000 else first + place - 1000
        data[start : start + len(content)] = content
        path.write_bytes(data)

    return damage


IN_SAMPLE = 1000
INDEX, SHARD = "index.json", "shard.00002.mds"
DAMAGES = {
    "no index": (lambda folder: (folder / INDEX).unlink(), INDEX, "file.unreadable"),
    "index no JSON": (change_index("{"), INDEX, "file.json"),
    "index no object": (change_index("[1]"), INDEX, "file.json"),
    "no shards": (change_index('{"shards": []}'), INDEX, "data.empty"),
    "missing key": (change_index(lambda s: s[1].pop("raw_data")), INDEX, "file.json"),
    "missing hashes": (change_index(lambda s: s[1]["raw_data"].pop("hashes")), INDEX, "file.json"),
    "other format": (change_index(lambda s: s[0].update(format="csv")), INDEX, "data.format"),
    "other version": (change_index(lambda s: s[0].update(version=3)), INDEX, "data.format"),
    "other columns": (change_index(lambda s: s[0]["column_names"].reverse()), INDEX, "data.mixed"),
    "unknown encoding": (
        change_index(lambda s: [shard["column_encodings"].__setitem__(2, "mp3") for shard in s]),
        INDEX,
        "data.unsupported",
    ),
    "pickles": (
        change_index(lambda s: [shard["column_encodings"].__setitem__(2, "pkl") for shard in s]),
        INDEX,
        "data.unsupported",
    ),
    "wrong column sizes": (
        change_index(lambda s: [shard["column_sizes"].__setitem__(1, 4) for shard in s]),
        INDEX,
        "data.damaged",
    ),
    "no samples": (change_index(lambda s: s[0].update(samples=0)), INDEX, "file.json"),
    "columns of unequal number": (
        change_index(lambda s: [shard["column_encodings"].pop() for shard in s]),
        INDEX,
        "data.damaged",
    ),
    "compression of nothing": (change_index(lambda s: s[0].update(compression="zstd")), INDEX, "data.damaged"),
    "a key twice": (change_index('{"shards": [], "shards": []}'), INDEX, "file.json"),
    "a shard twice": (change_index(lambda s: s.append(s[0])), INDEX, "data.damaged"),
    "path outside": (change_index(lambda s: s[0]["raw_data"].update(basename="../a")), INDEX, "file.json"),
    "unknown compression": (change_index(lambda s: s[0].update(compression="br")), INDEX, "file.json"),
    "unknown checksum": (change_index(lambda s: s[0]["raw_data"].update(hashes={"a": ""})), INDEX, "file.json"),
    "missing shard": (lambda folder: (folder / SHARD).unlink(), SHARD, "file.unreadable"),
    "cut shard": (lambda folder: os.truncate(folder / SHARD, 400), SHARD, "data.damaged"),
    "long shard": (lambda folder: os.truncate(folder / SHARD, 2000), SHARD, "data.damaged"),
    "one bit": (change_shard(IN_SAMPLE + 10, b"\xff"), SHARD, "data.damaged"),
}
# Found in shards without checksums.
UNCHECKED = {
    "wrong count": change_shard(0, b"\x03"),
    "offsets fall": change_shard(8, b"\x00\x00"),
    "offset beyond the end": change_shard(11, b"\xff"),
    "first offset in the head": change_shard(4, b"\x08\x00"),
    "long value": change_shard(IN_SAMPLE, b"\xff\xff"),
    "short value": change_shard(IN_SAMPLE + 4, b"\x01"),
    "no UTF-8": change_shard(IN_SAMPLE + 26, b"\xff"),
    "more axes": change_shard(IN_SAMPLE + 8, b"\xfc"),
}
DAMAGES |= {name: (hurt, SHARD, "data.damaged") for name, hurt in UNCHECKED.items()}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_line(tmp_path, damage):
    folder = write_set(tmp_path / "set", hashes=[] if damage in UNCHECKED else ["sha1"])
    hurt, name, code = DAMAGES[damage]
    hurt(folder)
    before = sorted(folder.iterdir())
    with user_error(code, folder / name):
        list(MdsReader(folder))
    assert sorted(folder.iterdir()) == before


def test_no_folder(tmp_path):
    with user_error("file.missing", tmp_path / "none"):
        MdsReader(tmp_path / "none")


WRONG_SETS = {
    "unknown encoding": ({"columns": {"a": "wav"}}, "data.unsupported", "set"),
    "pickles": ({"columns": {"a": "pkl"}}, "data.unsupported", "set"),
    "array of 0 extents": ({"columns": {"a": "ndarray:int8:3,0"}}, "data.unsupported", "set"),
    "array of text": ({"columns": {"a": "ndarray:str"}}, "data.unsupported", "set"),
    "no column": ({"columns": {}}, "config.missing", "set"),
    "unknown hash": ({"hashes": ["crc"]}, "config.choice", "hash 'crc'"),
    "unknown compression": ({"compression": "gz"}, "config.choice", "compression 'gz'"),
    "size limit": ({"size_limit": 1 << 32}, "config.range", "size_limit 4294967296"),
}


@pytest.mark.parametrize("case", WRONG_SETS)
def test_settings_that_cannot_be_written(tmp_path, case):
    options, code, subject = WRONG_SETS[case]
    with user_error(code, subject):
        MdsWriter(tmp_path / "set", **{"columns": COLUMNS, **options})
    assert not (tmp_path / "set").exists()


WRONG_VALUES = {
    "str": b"bytes",
    "int": 2**63,
    "uint8": 256,
    "int32": 1.5,
    "json": object(),
    "ndarray": np.zeros((2, 0)),
    "ndarray:float32": np.ones(2),
    "ndarray:int8:2": np.ones(3, np.int8),
}


@pytest.mark.parametrize("encoding", WRONG_VALUES)
def test_values_that_cannot_be_written(tmp_path, encoding):
    with user_error("data.row", "column 'a'"), MdsWriter(tmp_path / "set", {"a": encoding}) as writer:
        writer.write({"a": WRONG_VALUES[encoding]})
    assert not (tmp_path / "set" / "index.json").exists()


def test_samples_have_all_columns_and_there_is_one(tmp_path):
    with (
        user_error("data.columns", tmp_path),
        MdsWriter(tmp_path, {"a": "int", "b": "int"}) as w,
    ):
        w.write({"a": 1, "c": 2})
    with user_error("data.empty", tmp_path), MdsWriter(tmp_path, {"a": "int"}):
        pass
    write_set(tmp_path / "set")
    with user_error("file.exists", tmp_path / "set"):
        MdsWriter(tmp_path / "set", COLUMNS)


def test_without_the_packages(tmp_path, monkeypatch):
    for package in ("zstandard", "xxhash"):
        monkeypatch.setitem(sys.modules, package, None)
    with user_error("package.missing", "zstandard"):
        MdsReader(ENWIKI, tmp_path / "cache")[0]
    with user_error("package.missing", "zstandard"):
        MdsWriter(tmp_path / "set", COLUMNS, compression="zstd")
    with user_error("package.missing", "hash 'xxh64'"):
        MdsWriter(tmp_path / "set", COLUMNS, hashes=["xxh64"])
    # A checksum that cannot be computed is not compared.
    folder = write_set(tmp_path / "set")
    change_index(lambda shards: [shard["raw_data"].update(hashes={"xxh64": "0"}) for shard in shards])(folder)
    assert MdsReader(folder)[59]["number"] == 59
