"""MDS sets that lie elsewhere: addresses, the cache, processes that share it,
and remotes and disks that fail.
"""

import json
import multiprocessing
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from file_limits import largest_file
from mds_samples import write_samples
from mlbert.data.formats import mds_files
from mlbert.data.formats.mds import MdsReader
from mlbert.data.formats.mds_files import decompressed, locked
from mlbert.host import files
from stored_sets import flip
from user_errors import user_error

FIRST = "shard.00000.mds"
ONCE = {f"shard.0000{number}.mds": 1 for number in range(3)}


def write_set(folder: Path, compression: str | None = None) -> Path:
    samples = ({"number": f"{number:04}", "bytes": bytes(20)} for number in range(60))
    write_samples(
        folder,
        {"number": "str", "bytes": "bytes"},
        samples,
        size_limit=1000,
        compression=compression,
    )
    assert len(list(folder.glob("shard*"))) == 3
    return folder


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PAUSES_SECONDS", (0.01, 0.01, 0.01))


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return write_set(tmp_path / "remote")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


class Handler(SimpleHTTPRequestHandler):
    """Counts requests; ``wrong`` is how many wrong answers a file gets first."""

    def do_GET(self) -> None:
        name = Path(self.path).name
        self.server.requests[name] += 1
        if self.server.wrong[name] > 0:
            self.server.wrong[name] -= 1
            body = Path(self.translate_path(self.path)).read_bytes()[:-1] + b"!"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        else:
            super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(remote: Path) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(remote.parent)))
    server.requests = Counter()
    server.wrong = Counter()
    server.url = f"http://127.0.0.1:{server.server_port}/remote"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def numbers(reader: MdsReader) -> list[int]:
    return [int(sample["number"]) for sample in reader]


def in_cache(cache: Path) -> list[str]:
    assert all(path.stat().st_size == 0 for path in cache.glob(".*.lock"))
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("kind", ["path", "file", "http", "fsspec"])
def test_any_address(remote, cache, server, kind, compression):
    if compression:
        pytest.importorskip("zstandard", reason="the streaming extra is not installed")
        shutil.rmtree(remote)
        write_set(remote, compression)
    address = {
        "path": remote,
        "file": remote.as_uri(),
        "http": f"{server.url}/",
        "fsspec": f"memory://{remote}",
    }[kind]
    if kind == "fsspec":
        fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
        fsspec.filesystem("memory").put(str(remote), str(remote), recursive=True)
    reader = MdsReader(address, cache)
    assert in_cache(cache) == ["index.json"]
    assert reader[59]["number"] == "0059"
    assert in_cache(cache) == ["index.json", "shard.00002.mds"]
    assert numbers(reader) == list(range(60))
    assert in_cache(cache) == ["index.json", *ONCE]
    assert numbers(MdsReader(cache)) == list(range(60))


def test_names_in_folders_and_with_spaces(remote, cache, server):
    path = remote / "index.json"
    document = json.loads(path.read_bytes())
    (remote / "a b/c").mkdir(parents=True)
    (remote / FIRST).rename(remote / "a b/c" / FIRST)
    document["shards"][0]["raw_data"]["basename"] = f"a b/c/{FIRST}"
    path.write_text(json.dumps(document))
    assert numbers(MdsReader(server.url, cache)) == list(range(60))
    assert (cache / "a b/c" / FIRST).exists()


@pytest.mark.parametrize("is_cached", [False, True])
def test_fetches_a_damaged_shard_once_more(server, cache, is_cached):
    if is_cached:
        numbers(MdsReader(server.url, cache))
        flip(cache / FIRST, 0.99)
    else:
        server.wrong[FIRST] = 1
    assert numbers(MdsReader(server.url, cache)) == list(range(60))
    assert server.requests[FIRST] == 2


def test_names_a_shard_that_stays_damaged(server, cache):
    server.wrong[FIRST] = 10
    with user_error("data.damaged", f"{server.url}/{FIRST}"):
        MdsReader(server.url, cache)[0]
    assert server.requests[FIRST] == 2
    assert in_cache(cache) == ["index.json"]


def test_a_shard_that_is_longer_than_the_index_says_is_damaged(remote, server, cache):
    with (remote / FIRST).open("ab") as file:
        file.write(b"!")
    with user_error("data.damaged", f"{server.url}/{FIRST}"):
        MdsReader(server.url, cache)[0]


def test_a_lock_has_one_holder(tmp_path):
    for _ in range(2):
        with (
            locked(tmp_path / "file") as is_mine,
            locked(tmp_path / "file", wait=False) as is_also_mine,
        ):
            assert (is_mine, is_also_mine) == (True, False)


def test_content_of_several_zstandard_frames():
    zstandard = pytest.importorskip("zstandard", reason="the streaming extra is not installed")
    frames = [zstandard.ZstdCompressor().compress(part) for part in (b"one", b"two", b"three")]
    assert decompressed(b"".join(frames), "frames", 100) == b"onetwothree"
    assert decompressed(b"".join(frames), "frames", 5) == b"onetw"


@pytest.mark.parametrize("damage", ["cut", "flipped", "bomb"])
def test_damaged_compressed_shard(tmp_path, cache, damage):
    zstandard = pytest.importorskip("zstandard", reason="the streaming extra is not installed")
    folder = write_set(tmp_path / "zipped", "zstd")
    path = folder / f"{FIRST}.zstd"
    index = folder / "index.json"
    document = json.loads(index.read_bytes())
    good = path.read_bytes()
    data = {
        "cut": good[:-20],
        "flipped": b"none" + good[4:],
        "bomb": zstandard.compress(bytes(1 << 24)),
    }[damage]
    path.write_bytes(data)
    # Or the checksum would tell.
    document["shards"][0]["zip_data"].update(bytes=len(data), hashes={})
    index.write_text(json.dumps(document))
    with user_error("data.damaged", path, wording=damage != "flipped"):  # zstandard's own words
        MdsReader(folder, cache)[0]
    assert in_cache(cache) == ["index.json"]


def numbers_at(url: str, cache: Path) -> list[int]:
    return numbers(MdsReader(url, cache))


def test_processes_share_a_cache(server, cache):
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert (
            pool.starmap(numbers_at, [(server.url, cache)] * 3, chunksize=1)
            == [list(range(60))] * 3
        )
    assert server.requests == {"index.json": 3, **ONCE}
    assert not list(cache.glob("*.tmp"))


def test_a_long_index_is_fetched_and_compared_in_pieces(server, remote, cache, monkeypatch):
    monkeypatch.setattr(mds_files, "_INDEX_AT_ONCE", 100)
    assert numbers(MdsReader(server.url, cache)) == list(range(60))
    assert (cache / "index.json").read_bytes() == (remote / "index.json").read_bytes()
    assert numbers(MdsReader(server.url, cache)) == list(range(60))
    with (remote / "index.json").open("ab") as file:
        file.write(b" ")
    with user_error("data.mixed", cache):
        MdsReader(server.url, cache)


def test_threads_share_a_reader(server, cache):
    reader = MdsReader(server.url, cache)
    orders = [np.random.default_rng(seed).permutation(60).tolist() for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda order: [int(reader[index]["number"]) for index in order], orders)
        assert list(found) == orders
    assert server.requests == {"index.json": 1, **ONCE}


def test_remote_that_disappears(remote, cache, server):
    reader = MdsReader(remote, cache)
    assert reader[0]["number"] == "0000"
    shutil.rmtree(remote)
    assert reader[1]["number"] == "0001"
    with user_error("network.unreachable", remote / "shard.00002.mds"):
        reader[59]
    with user_error("file.missing", remote):
        MdsReader(remote, cache)
    with user_error("network.unreachable", f"{server.url}/index.json"):
        MdsReader(server.url, cache)


def test_addresses_that_lead_nowhere(cache, monkeypatch):
    with user_error("network.unreachable", "http://127.0.0.1:9/set/index.json"):
        MdsReader("http://127.0.0.1:9/set", cache)
    assert not cache.exists()
    with user_error("config.conflict", "s3://bucket/set"):
        MdsReader("s3://bucket/set")
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    with user_error("network.unreachable", "nowhere://bucket/index.json", wording=False):
        MdsReader("nowhere://bucket", cache)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with user_error("package.missing", "s3://bucket/set/index.json"):
        MdsReader("s3://bucket/set", cache)


def test_a_full_disk_and_a_cache_that_cannot_be_made_or_written(remote, cache, tmp_path):
    (tmp_path / "file").write_text("")
    with user_error("file.unwritable", tmp_path / "file/cache"):
        MdsReader(remote, tmp_path / "file/cache")
    reader = MdsReader(remote, cache)
    lock = cache / f".{FIRST}.lock"
    lock.mkdir()
    with user_error("file.unwritable", cache / FIRST):
        reader[0]
    lock.rmdir()
    with user_error("file.unwritable", cache / FIRST), largest_file(500):
        reader[0]
    assert in_cache(cache) == ["index.json"]
    assert reader[0]["number"] == "0000"


def test_cache_of_another_set(remote, cache, tmp_path):
    MdsReader(write_samples(tmp_path / "other", {"number": "str"}, [{"number": "1"}]), cache)
    with user_error("data.mixed", cache):
        MdsReader(remote, cache)
