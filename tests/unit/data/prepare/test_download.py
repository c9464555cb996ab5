"""Fetching files: from folders and a real HTTP server,
with everything that goes wrong on the way.
"""

import contextlib
import gc
import hashlib
import http.server
import io
import json
import os
import random
import shutil
import socket
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from file_limits import largest_file
from mlbert.data.prepare import download
from mlbert.data.prepare.download import fetch_all, read_list, select
from mlbert.host import files
from mlbert.host.progress import Progress
from user_errors import user_error

CONTENT = random.Random(0).randbytes(3_000_000)


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def open_connections(port: int) -> list[socket.socket]:
    """Return the sockets of this process that are connected to a port."""
    gc.collect()
    found = []
    for candidate in gc.get_objects():
        if issubclass(type(candidate), socket.socket) and candidate.fileno() != -1:
            with contextlib.suppress(OSError):
                if candidate.getpeername()[1] == port:
                    found.append(candidate)
    return found


def listed(folder: Path, **changes: object) -> Path:
    item = {
        "name": "sub/data.bin",
        "bytes": len(CONTENT),
        "md5": md5(CONTENT),
        "group": "config",
        "urls": [],
    }
    (folder / "list.json").write_text(json.dumps({"files": [item | changes]}))
    return folder / "list.json"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PAUSES_SECONDS", (0.01, 0.01, 0.01))


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append(wanted)
        if "missing" in self.path or self.server.errors:
            self.server.errors = max(0, self.server.errors - 1)
            self.send_error(404 if "missing" in self.path else 503)
            return
        content = self.server.content
        start = (
            int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.ranges else 0
        )
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = len(content)
        if self.server.breaks:
            self.server.breaks -= 1
            end = start + (end - start) // 3
        self.wfile.write(content[start:end])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(params=[True, False], ids=["ranges", "no_ranges"])
def server(request: pytest.FixtureRequest) -> Iterator[http.server.ThreadingHTTPServer]:
    """Serve CONTENT at every path; ``breaks`` transfers stop after a third of what was asked
    for.
    """
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.url = f"http://127.0.0.1:{running.server_port}/files"
        running.content = CONTENT
        running.ranges = request.param
        running.breaks = 0
        running.errors = 0
        running.asked = []
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_the_shipped_list_is_whole_and_a_list_of_another_form_is_refused(tmp_path):
    entries = read_list()
    assert {entry.group for entry in select(entries, [])} == {
        "config",
        "vocabulary",
        "checkpoint",
        "text",
    }
    assert all(len(entry.md5) == 32 and entry.urls for entry in entries.files)
    (vocabulary,) = select(entries, ["vocab.txt"])
    assert (vocabulary.size, vocabulary.md5) == (231_508, "64800d5d8528ce344256daf115d4965e")
    assert len(select(entries, ["checkpoint"])) == 3
    with user_error("config.choice", "--only"):
        select(entries, ["vocabulry"])
    (made_here,) = fetch_all(select(entries, ["config"]), tmp_path)
    assert md5(made_here.read_bytes()) == "7f59165e21b7d566db610ff6756c926b"
    path = tmp_path / "list.json"
    for text in ("{", '{"files": [{"name": "a"}]}', "[]"):
        path.write_text(text)
        with user_error("file.json", path):
            read_list(path)
    with user_error("data.damaged", path):
        read_list(listed(tmp_path, name="../up.bin"))


@pytest.mark.parametrize(("place", "address"), [("sub/data.bin", Path.as_uri), ("data.bin", str)])
def test_a_folder_as_mirror(tmp_path, place, address):
    mirror = tmp_path / "mirror with blank"
    out = tmp_path / "out"
    (mirror / place).parent.mkdir(parents=True)
    (mirror / place).write_bytes(CONTENT)
    fetch_all(read_list(listed(tmp_path)).files, out, address(mirror))
    assert (out / "sub/data.bin").read_bytes() == CONTENT
    assert sorted(path.name for path in out.rglob("*") if path.is_file()) == [
        ".verified",
        "data.bin",
    ]


def fetch(
    folder: Path, mirror: str = "", *, progress: Progress = Progress(), **changes: object
) -> bytes:
    fetch_all(read_list(listed(folder, **changes)).files, folder, mirror, progress=progress)
    return (folder / "sub/data.bin").read_bytes()


def test_a_connection_dropped_in_the_middle_is_continued(tmp_path, server, said):
    server.breaks = 2
    server.errors = 1
    assert (
        fetch(tmp_path, urls=[f"{server.url}/missing", f"{server.url}/data.bin"], progress=said)
        == CONTENT
    )
    assert "bytes=1000000-" in server.asked
    assert said.done == {"data.bin": [len(CONTENT), len(CONTENT)]}


@pytest.mark.parametrize("server", [False], indirect=True, ids=["no_ranges"])
def test_a_dropped_connection_keeps_what_was_received(tmp_path, server):
    server.breaks = 1000
    with user_error("network.unreachable", tmp_path / "sub/data.bin"):
        fetch(tmp_path, server.url)
    assert (tmp_path / "sub/data.bin.partial").stat().st_size == 1_000_000
    server.breaks = 0
    assert fetch(tmp_path, server.url) == CONTENT


def test_a_partial_file(tmp_path, server):
    partials = {
        "other": (b"x" * 1_000_000, len(CONTENT)),
        "whole": (CONTENT, None),
        "too long": (CONTENT + b"x", None),
    }
    for name, (partial, size) in partials.items():
        path = tmp_path / name / "sub/data.bin.partial"
        path.parent.mkdir(parents=True)
        path.write_bytes(partial)
        assert fetch(tmp_path / name, server.url, bytes=size) == CONTENT, name


@pytest.mark.parametrize("size", [len(CONTENT), None])
def test_wrong_content_is_never_accepted(tmp_path, server, size):
    server.content = bytes(len(CONTENT))
    with user_error("data.checksum", "files/sub/data.bin"):
        fetch(tmp_path, server.url, bytes=size)
    assert not any(path.is_file() for path in (tmp_path / "sub").rglob("*"))


def test_an_unreachable_host_lists_what_to_fetch_by_hand(tmp_path):
    with user_error("network.unreachable", tmp_path / "sub/data.bin") as error:
        fetch(tmp_path, urls=["http://127.0.0.1:9/data.bin"])
    assert "http://127.0.0.1:9/data.bin" in error.value.problem
    assert f"(MD5 {md5(CONTENT)}, 3,000,000 bytes)" in error.value.remedy


def test_files_placed_by_hand_are_accepted_and_recorded(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub/data.bin"
    path.write_bytes(CONTENT)
    fetch(tmp_path)
    read: list[Path] = []
    monkeypatch.setattr(
        download, "file_md5", lambda path: read.append(path) or md5(path.read_bytes())
    )
    fetch(tmp_path)
    assert not read
    os.utime(path, ns=(1, 1))
    fetch(tmp_path)
    assert read == [path]
    path.write_bytes(bytes(len(CONTENT)))
    with user_error("network.unreachable", path):
        fetch(tmp_path)


def test_a_full_disk_keeps_what_was_received(tmp_path, assert_fails, run_mlbert):
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror/data.bin").write_bytes(CONTENT)
    words = (
        f"prepare download --out {tmp_path}/out --manifest {listed(tmp_path)} --mirror "
        f"{tmp_path}/mirror"
    ).split()
    with largest_file(2_000_000):
        assert_fails(words, "file.unwritable", tmp_path / "out/sub/data.bin.partial")
    assert not (tmp_path / "out/sub/data.bin").exists()
    assert run_mlbert(*words)[0] == 0
    assert (tmp_path / "out/sub/data.bin").read_bytes() == CONTENT


def archive(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def text_list(mirror: Path, data: bytes, sums: bytes) -> Path:
    (mirror / "text.tar.gz").write_bytes(data)
    (mirror / "sums.txt").write_bytes(sums)
    common = {"bytes": None, "group": "text", "urls": []}
    files = [
        common | {"name": "sums.txt", "md5": md5(sums)},
        common
        | {"name": "text.tar.gz", "md5": md5(data), "unpack": "text", "checksums": "sums.txt"},
    ]
    path = mirror / "list.json"
    path.write_text(json.dumps({"files": files}))
    return path


def test_the_text_archive_is_unpacked_and_checked_by_the_published_sums(tmp_path):
    data = archive({"results4/part-0": b"one\n", "../../eval.txt": b"two\n"})
    sums = (
        f"{md5(b'one' + bytes([10]))}  ./results4/part-0\n{md5(b'two' + bytes([10]))}  eval.txt\n"
    ).encode()
    entries = read_list(text_list(tmp_path, data, sums)).files
    found = fetch_all(entries, tmp_path / "out", str(tmp_path))
    assert [path.name for path in found] == ["sums.txt", "text.tar.gz", "part-0", "eval.txt"]
    assert (tmp_path / "out/text/eval.txt").read_bytes() == b"two\n"
    (tmp_path / "out/text/part-0").write_bytes(b"changed\n")
    fetch_all(entries, tmp_path / "out", str(tmp_path))
    assert (tmp_path / "out/text/part-0").read_bytes() == b"one\n"


def test_an_archive_with_other_files_or_cut_off_is_refused(tmp_path):
    one = archive({"part-0": b"one\n"})
    random_bytes = archive({"part-0": random.Random(1).randbytes(1000)})
    for data, sums, code, subject in (
        (one, f"{md5(b'two')}  part-0\n", "data.damaged", "text/part-0"),
        (one, f"{md5(b'x')}  part-1\n", "data.incomplete", "text.tar.gz"),
        (random_bytes[:-200], "\n", "data.damaged", "text.tar.gz"),
        (random_bytes[:-900], "\n", "data.damaged", "text.tar.gz"),
    ):
        entries = read_list(text_list(tmp_path, data, sums.encode())).files
        with user_error(code, tmp_path / "out" / subject):
            fetch_all(entries, tmp_path / "out", str(tmp_path))
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("errors", [0, 10], ids=["not_found", "unavailable"])
def test_an_answer_that_is_an_error_leaves_no_connection_open(server, errors):
    server.errors = errors
    name = "data.bin" if errors else "missing"
    with pytest.raises(files.AddressError) as refused:
        files.read_address(f"{server.url}/{name}")
    assert open_connections(server.server_port) == []
    assert refused.value.reason == f"HTTP {503 if errors else 404}"
