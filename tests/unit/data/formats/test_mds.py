"""MDS sets: those that MosaicML Streaming wrote, round trips, and damage of many kinds."""

import hashlib
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from damaged_mds import COLUMNS, change_index, change_shard, write_set
from mds_samples import write_samples
from mlbert.data.formats import mds_index
from mlbert.data.formats.mds import MdsReader, MdsWriter, compression_level
from mlbert.data.formats.mds_index import open_index
from programs import run_checked
from user_errors import user_error

ASSETS = Path(__file__).parents[3] / "assets/mds"
ENWIKI = ASSETS / "enwiki_bytes_zstd"
VALUES = {
    "str": st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    "bytes": st.binary(max_size=300),
}
IN_SAMPLE = 1000
INDEX = "index.json"
# In a process without threads of other tests, whose memory would count too.
PEAK_OF_INDEX = """
import sys
import tracemalloc
from pathlib import Path
from mlbert.data.formats.mds_index import open_index
tracemalloc.start()
index = open_index(Path(sys.argv[1]))
print(tracemalloc.get_traced_memory()[1])
"""
SHARD = "shard.00002.mds"
NO_COLUMNS = {"column_names": [], "column_encodings": [], "column_sizes": []}
DAMAGES = {
    "no index": (lambda folder: (folder / INDEX).unlink(), INDEX, "file.unreadable"),
    "index no JSON": (change_index("{"), INDEX, "file.json"),
    "index no object": (change_index("[1]"), INDEX, "file.json"),
    "no shards": (change_index('{"shards": []}'), INDEX, "data.empty"),
    "missing key": (change_index(lambda s: s[1].pop("raw_data")), INDEX, "file.json"),
    "missing hashes": (change_index(lambda s: s[1]["raw_data"].pop("hashes")), INDEX, "file.json"),
    "other format": (change_index(lambda s: s[0].update(format="csv")), INDEX, "data.format"),
    "every shard of another version": (
        change_index(lambda s: [x.update(version=1) for x in s]),
        INDEX,
        "data.format",
    ),
    "no columns": (
        change_index(lambda s: [x.update(NO_COLUMNS) for x in s]),
        INDEX,
        "data.damaged",
    ),
    "other version": (change_index(lambda s: s[0].update(version=3)), INDEX, "data.format"),
    "other columns": (change_index(lambda s: s[0]["column_names"].reverse()), INDEX, "data.mixed"),
    "wrong column sizes": (
        change_index(lambda s: [x["column_sizes"].__setitem__(1, 4) for x in s]),
        "shard.00000.mds",
        "data.damaged",
    ),
    "no samples": (change_index(lambda s: s[0].update(samples=0)), INDEX, "file.json"),
    "too few encodings": (
        change_index(lambda s: [x["column_encodings"].pop() for x in s]),
        INDEX,
        "data.damaged",
    ),
    "compression of nothing": (
        change_index(lambda s: s[0].update(compression="zstd")),
        INDEX,
        "data.damaged",
    ),
    "a key twice": (change_index('{"shards": [], "shards": []}'), INDEX, "file.json"),
    "a shard twice": (change_index(lambda s: s.append(s[0])), INDEX, "data.damaged"),
    "path outside": (
        change_index(lambda s: s[0]["raw_data"].update(basename="../a")),
        INDEX,
        "file.json",
    ),
    "unknown compression": (
        change_index(lambda s: s[0].update(compression="br:11")),
        INDEX,
        "data.format",
    ),
    "unknown checksum": (
        change_index(lambda s: s[0]["raw_data"].update(hashes={"a": ""})),
        INDEX,
        "file.json",
    ),
    "missing shard": (lambda folder: (folder / SHARD).unlink(), SHARD, "file.unreadable"),
    "cut shard": (lambda folder: os.truncate(folder / SHARD, 400), SHARD, "data.damaged"),
    "long shard": (lambda folder: os.truncate(folder / SHARD, 2000), SHARD, "data.damaged"),
    "more samples than bytes": (
        change_index(lambda s: s[2].update(samples=1000)),
        SHARD,
        "data.damaged",
    ),
    "one bit": (change_shard(IN_SAMPLE + 10, b"\xff"), SHARD, "data.damaged"),
}
# Found in shards without checksums, and a part of what is said.
UNCHECKED = {
    "wrong count": (change_shard(0, b"\x03"), "does not contain"),
    "offsets fall": (change_shard(8, b"\x00\x00"), "has offsets that"),
    "offset beyond the end": (change_shard(11, b"\xff"), "has offsets that"),
    "last offset before the end": (change_shard(4 * 18, b"\x00"), "has offsets that"),
    "first offset in the head": (change_shard(4, b"\x08\x00"), "has offsets that"),
    "long value": (change_shard(IN_SAMPLE, b"\xff\xff"), "sample 0 is damaged (column 'ids' ends"),
    "short value": (change_shard(IN_SAMPLE + 4, b"\x01"), "are left over"),
    "no UTF-8": (change_shard(IN_SAMPLE + 26, b"\xff"), "utf-8"),
}
DAMAGES |= {name: (hurt, SHARD, "data.damaged") for name, (hurt, _) in UNCHECKED.items()}


def test_reads_text_and_bytes_next_to_every_encoding_of_streaming():
    reader = MdsReader(ASSETS / "kitchen_sink")
    expected = json.loads((ASSETS / "kitchen_sink_samples.json").read_bytes())
    assert len(reader) == len(expected) == 40
    assert reader.shard_sizes.tolist() == [15, 14, 11]
    for index in np.random.default_rng(0).permutation(40):
        sample = reader[index]
        listed = expected[index]
        assert list(sample) == list(listed)
        assert sample["h_str"] == listed["h_str"]
        assert sample["g_bytes"].hex() == listed["g_bytes"]["hex"]
        assert int.from_bytes(sample["a_int"], "little", signed=True) == listed["a_int"]
        assert sample["n_nd_u8_1x300"].hex() == listed["n_nd_u8_1x300"]["data"]
    with pytest.raises(IndexError):
        reader[40]
    with pytest.raises(IndexError):
        reader[-1]


def test_writes_the_index_of_streaming_for_compressed_shards(tmp_path):
    pytest.importorskip("zstandard", reason="the streaming extra is not installed")
    pytest.importorskip("xxhash", reason="xxhash is not installed")
    expected = json.loads((ENWIKI / "index.json").read_bytes())["shards"]
    settings = {name: expected[0][name] for name in ("size_limit", "compression", "hashes")}
    reader = MdsReader(ENWIKI, tmp_path / "cache")
    written = write_samples(tmp_path / "set", reader.columns, reader, **settings)
    # raw_data: hashes of uncompressed shards.
    found = json.loads((written / "index.json").read_bytes())["shards"]
    assert [shard["raw_data"] for shard in found] == [shard["raw_data"] for shard in expected]
    assert [{*shard["zip_data"]["hashes"]} for shard in found] == [{"sha1", "xxh3_64"}] * 3


@st.composite
def sets(draw: st.DrawFn) -> tuple[dict[str, str], list[dict[str, object]], int]:
    columns = draw(
        st.dictionaries(
            st.text("abcü ", min_size=1), st.sampled_from(sorted(VALUES)), min_size=1, max_size=5
        )
    )
    sample = st.fixed_dictionaries({name: VALUES[encoding] for name, encoding in columns.items()})
    return columns, draw(st.lists(sample, min_size=1, max_size=12)), draw(st.integers(1, 2000))


@settings(max_examples=30)
@given(sets())
def test_written_files_are_read_back(case):
    columns, samples, limit = case
    with TemporaryDirectory() as folder:
        write_samples(folder, columns, samples, size_limit=limit, hashes=["sha256", "md5"])
        reader = MdsReader(folder)
        assert reader.columns == dict(sorted(columns.items()))
        assert list(reader) == [dict(sorted(sample.items())) for sample in samples]
        sizes = [path.stat().st_size for path in sorted(Path(folder).glob("*.mds"))]
        assert all(
            size <= limit or count == 1
            for size, count in zip(sizes, reader.shard_sizes, strict=True)
        )


def test_files_stay_the_same_between_versions(tmp_path):
    """Names, order of keys, defaults and offsets."""
    write_samples(
        tmp_path / "set",
        COLUMNS,
        ({"text": f"sample {n}", "ids": bytes(n), "number": "x"} for n in range(3)),
    )
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in (tmp_path / "set").iterdir()
    }
    assert found == {"index.json": "96d1497a5c59e48b", "shard.00000.mds": "bc8f13e9a5419e84"}


@pytest.mark.parametrize(("limit", "expected"), [(587, [4]), (586, [3, 1])])
def test_a_shard_is_as_large_as_the_limit_and_no_larger(tmp_path, limit, expected):
    write_samples(
        tmp_path / "set", {"a": "bytes"}, [{"a": bytes(96)}] * 4, size_limit=limit, hashes=[]
    )
    assert MdsReader(tmp_path / "set").shard_sizes.tolist() == expected
    largest = max(path.stat().st_size for path in (tmp_path / "set").glob("*.mds"))
    assert largest == (limit if expected == [4] else limit - 99 - 4)
    assert (
        MdsWriter(tmp_path / "other", {"a": "bytes"}, size_limit=limit, hashes=[]).room
        == limit - 587 + 4 * 104
    )


def test_all_bytes_of_a_shard_at_once(tmp_path):
    samples = [{"a": bytes(number % 7) + b"x"} for number in range(300)]
    reader = MdsReader(write_samples(tmp_path / "set", {"a": "bytes"}, samples))
    data, starts = reader.shard_bytes(0)
    sizes = [4 + len(sample["a"]) for sample in samples]
    assert starts.tolist() == [0, *np.cumsum(sizes)]
    assert data.tobytes() == b"".join(len(s["a"]).to_bytes(4, "little") + s["a"] for s in samples)


def test_the_state_of_a_shard_is_that_of_its_file_in_the_set(tmp_path):
    pytest.importorskip("zstandard", reason="the streaming extra is not installed")
    folder = write_set(tmp_path / "set")
    zipped = write_set(tmp_path / "zipped", compression="zstd")
    for path in (folder / SHARD, zipped / f"{SHARD}.zstd"):
        assert MdsReader(path.parent).state_of(2) == [path.stat().st_size, path.stat().st_mtime_ns]
    (zipped / SHARD).write_bytes((folder / SHARD).read_bytes())
    assert MdsReader(zipped).state_of(2)[0] == (folder / SHARD).stat().st_size, (
        "the one that is read"
    )
    (folder / SHARD).unlink()
    assert MdsReader(folder).state_of(2) == []
    assert MdsReader(zipped, tmp_path / "cache").state_of(2) == [], "a copy is what the index says"


def test_a_sample_of_four_gigabytes_is_refused(tmp_path):
    """Offsets have 32 bits.

    A shard has the number of samples, two offsets, the settings, and the sizes of columns. A range
    has a length, but no bytes to store.
    """
    writer = MdsWriter(tmp_path / "set", {"a": "bytes", "b": "bytes"})
    most = 2**32 - 1 - 4 * 3 - len(writer._head) - 4 * 2
    with user_error("data.too-long", tmp_path / "set"):
        writer.write({"a": range(most - 9), "b": bytes(10)})
    with pytest.raises(TypeError):  # is stored, if it can be
        writer.write({"a": range(most - 10), "b": bytes(10)})


def long_index(folder: Path, num_shards: int) -> Path:
    """Write an index with many entries, of shards that do not exist."""
    index = json.loads((folder / "index.json").read_bytes())
    entry = json.dumps(index["shards"][0])
    with (folder / "index.json").open("w") as file:
        file.write('{"version": 2, "shards": [')
        for number in range(num_shards):
            file.write("," * bool(number) + entry.replace("shard.00000", f"shard.{number:05d}"))
        file.write("]}")
    return folder / "index.json"


def test_entries_of_an_index_stay_in_the_file(tmp_path):
    folder = write_samples(tmp_path / "set", {"text": "str"}, [{"text": "one"}])
    path = long_index(folder, 20_000)
    peak = int(run_checked(sys.executable, "-c", PEAK_OF_INDEX, path).stdout)
    assert peak < 10e6, "each entry would take some kilobytes"
    index = open_index(path)
    assert len(index.shards) == 20_000
    assert [shard.raw.name for shard in index.shards] == [
        f"shard.{number:05d}.mds" for number in range(20_000)
    ]
    assert index.num_samples.tolist() == [1] * 20_000
    assert index.shards.has_name("shard.19999.mds")
    assert not index.shards.has_name("shard.20000.mds")
    assert index.identity == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_checks_of_a_large_index_are_kept(tmp_path, own_cache, monkeypatch):
    monkeypatch.setattr(mds_index, "_CACHED_BYTES", 1)
    folder = write_samples(
        tmp_path / "set", {"text": "str"}, [{"text": "one"}], vocabulary_sha256="0" * 64
    )
    path = folder / "index.json"
    first = open_index(path)
    monkeypatch.setattr(mds_index, "parse_long_object", None)  # a second reading would fail
    again = open_index(path)
    assert again.columns == first.columns
    assert again.identity == first.identity
    assert again.vocabulary_sha256 == first.vocabulary_sha256 == "0" * 64
    assert list(again.shards) == list(first.shards)
    monkeypatch.undo()
    path.write_text(path.read_text().replace("shard.00000", "shard.00001"))
    assert open_index(path).shards[0].raw.name == "shard.00001.mds"


def test_two_shards_have_the_same_name(tmp_path):
    folder = write_samples(tmp_path / "set", {"text": "str"}, [{"text": "one"}])
    path = long_index(folder, 200)
    path.write_text(path.read_text().replace("shard.00150", "shard.00020"))
    with user_error("data.damaged", path):
        open_index(path)


def test_an_index_may_be_larger_than_other_files(tmp_path):
    """Millions of small shards have an index of more than 256 MiB."""
    folder = write_samples(tmp_path / "set", {"text": "str"}, [{"text": "one"}])
    with (folder / "index.json").open("ab") as file:
        file.write(b" " * (257 << 20))
    assert MdsReader(folder)[0] == {"text": "one"}


def test_levels_of_compression(tmp_path):
    pytest.importorskip("zstandard", reason="the streaming extra is not installed")
    write_set(tmp_path / "most", compression="zstd:22")
    assert compression_level("zstd") == 3, "as in Streaming"
    for level, code in (
        ("zstd:0", "config.range"),
        ("zstd:23", "config.range"),
        ("gz", "config.choice"),
    ):
        with user_error(code, f"compression '{level}'"):
            MdsWriter(tmp_path / "set", COLUMNS, compression=level)
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_line(tmp_path, damage):
    folder = write_set(tmp_path / "set", hashes=[] if damage in UNCHECKED else ["sha1"])
    hurt, name, code = DAMAGES[damage]
    hurt(folder)
    before = sorted(folder.iterdir())
    with user_error(code, folder / name) as failure:
        list(MdsReader(folder))
    assert UNCHECKED.get(damage, (None, ""))[1] in str(failure.value)
    assert sorted(folder.iterdir()) == before


def test_the_first_checksum_that_differs_is_named(tmp_path):
    folder = write_set(tmp_path / "set", hashes=["md5", "sha1"])
    DAMAGES["one bit"][0](folder)
    with user_error("data.damaged", folder / SHARD) as failure:
        list(MdsReader(folder))
    assert "has a different md5 from" in str(failure.value)


def test_there_is_a_sample_and_no_set_before(tmp_path):
    with user_error("data.empty", tmp_path), MdsWriter(tmp_path, {"a": "str"}):
        pass
    write_set(tmp_path / "set")
    with user_error("file.exists", tmp_path / "set"):
        MdsWriter(tmp_path / "set", COLUMNS)


def test_without_zstandard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with user_error("package.missing", "compression zstd"):
        MdsReader(ENWIKI, tmp_path / "cache")[0]
    with user_error("package.missing", "compression zstd"):
        MdsWriter(tmp_path / "set", COLUMNS, compression="zstd")
