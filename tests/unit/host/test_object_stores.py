"""Data sets and weights at addresses: a real S3 server, behind a proxy that drops,
refuses and cuts answers.
"""

import hashlib
import http.client
import random
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlbert.config.bert_config import BertConfig
from mlbert.host import files
from mlbert.host.files import AddressError, fetch_file, read_address
from mlbert.models.bert import BertForMaskedLM
from mlbert.models.weights.export import write_weights
from mlbert.runs.starting_weights import local_copy, name_weights, weights_file
from mosaic_texts import BASE, SHAPE, make_texts
from mosaic_yaml.common_yaml import CONFIGS
from programs import run_checked
from user_errors import user_error

s3fs = pytest.importorskip("s3fs", reason="the s3 extra is not installed")
moto_server = pytest.importorskip("moto.server", reason="moto is not installed")
KEY = "AKIAMADEUPFORTESTS"
SECRET = "made/up+secret/for/tests"
ADDRESS = "s3://bucket/model.safetensors"
CONTENT = random.Random(0).randbytes(20_000_000)


class Proxy(ThreadingHTTPServer):
    """Passes requests on to ``port``; the next reads of objects fail as ``faults`` says,
    then all work.
    """

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.port = port
        self.faults = list[str]()
        self.requests = 0
        self.reads = 0
        self.sent = 0
        self.always = ""
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """Stay silent: clients close connections."""


class Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        is_read = self.command == "GET" and "." in self.path.partition("?")[0]
        self.server.requests += 1
        self.server.reads += is_read
        fault = (
            self.server.always or (self.server.faults.pop(0) if self.server.faults else "")
            if is_read
            else ""
        )
        if fault == "503":
            self.answer(
                503,
                {},
                b"<Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>",
                None,
            )
        elif fault != "drop":
            server = http.client.HTTPConnection("127.0.0.1", self.server.port)
            server.request(self.command, self.path, body, dict(self.headers))
            answer = server.getresponse()
            content = answer.read()
            self.answer(
                answer.status,
                dict(answer.headers),
                content,
                len(content) // 2 if fault == "cut" else None,
            )
        self.close_connection = self.close_connection or bool(fault)

    do_GET = do_HEAD = do_PUT = do_POST = pass_on

    def answer(self, status: int, headers: dict[str, str], content: bytes, end: int | None) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        self.wfile.write(content[:end])
        self.server.sent += len(content[:end])

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    proxy = Proxy(server.get_host_and_port()[1])
    thread = threading.Thread(target=proxy.serve_forever, args=(0.02,))
    thread.start()
    environ = {"ENDPOINT_URL": proxy.url, "ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environ | {"DEFAULT_REGION": "us-east-1"}).items():
            patch.setenv(f"AWS_{name}", value)
        patch.setattr(files, "PAUSES_SECONDS", (0.01, 0.02, 0.03))
        s3fs.S3FileSystem().mkdir("bucket")
        yield proxy
    proxy.shutdown()
    proxy.server_close()
    thread.join()
    server.stop()


@pytest.fixture(autouse=True)
def _new_store(proxy: Proxy, own_cache: Path) -> Iterator[None]:
    replace_content(CONTENT)
    proxy.reads = proxy.sent = 0
    yield
    proxy.faults = []
    proxy.always = ""


def address(kind: str) -> str:
    """Return the address of the weights in the store, or a signed one that any program can read."""
    return ADDRESS if kind == "s3" else s3fs.S3FileSystem().sign(ADDRESS)


def replace_content(content: bytes) -> None:
    """Replace the weights in the store; the process forgets its copies."""
    s3fs.S3FileSystem().pipe(ADDRESS, content)
    local_copy.cache_clear()


@pytest.mark.parametrize("kind", ["s3", "http"])
@pytest.mark.parametrize("seed", range(3))
def test_content_is_right_whatever_fails(proxy, kind, seed, tmp_path):
    draw = random.Random(seed)
    proxy.faults = [draw.choice(["drop", "503", "cut"]) for _ in range(3)]
    fetch_file(address(kind), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert not proxy.faults
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_interrupted_transfer_is_continued(proxy):
    proxy.faults = ["cut"]
    assert read_address(address("http")) == CONTENT
    assert (proxy.reads, proxy.sent) == (2, len(CONTENT))


def test_an_object_of_known_size_takes_one_request(proxy: Proxy) -> None:
    before = proxy.requests
    assert read_address(ADDRESS, len(CONTENT) + 1) == CONTENT
    assert proxy.requests - before == 1
    assert len(read_address(ADDRESS, 100)) == 100
    proxy.faults = ["drop", "503", "cut"]
    assert read_address(ADDRESS, len(CONTENT) + 1) == CONTENT
    assert not proxy.faults


@pytest.mark.parametrize("kind", ["s3", "http"])
@pytest.mark.parametrize("fault", ["drop", "503"])
def test_attempts_are_limited_and_secrets_masked(proxy, kind, fault):
    proxy.always = fault
    with pytest.raises(AddressError) as failed:
        read_address(address(kind))
    assert not failed.value.is_lasting
    assert SECRET not in str(failed.value)
    assert KEY not in str(failed.value)
    assert ("Signature=***" in str(failed.value)) == (kind == "http")
    assert 4 <= proxy.reads <= 8  # the libraries repeat a request once


def test_what_will_not_change_is_not_tried_again(proxy, monkeypatch):
    for wrong in ("s3://bucket/x.pt", "s3://no-such-bucket/x.pt", f"{proxy.url}/bucket/x.pt"):
        proxy.reads = 0
        with pytest.raises(AddressError) as failed:
            read_address(wrong)
        assert failed.value.is_lasting
        assert proxy.reads <= 1
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with user_error("package.missing", "s3a://other/x.pt", wording=False):
        read_address("s3a://other/x.pt")


def test_weights_are_fetched_once_with_what_belongs_to_them(proxy, tmp_path):
    store = s3fs.S3FileSystem()
    store.pipe("bucket/vocab.txt", b"[PAD]")
    proxy.faults = ["503", "cut", "drop"]
    digest = hashlib.sha256(CONTENT).hexdigest()
    for source, name in (
        ("s3://bucket", ""),
        (ADDRESS, "model.safetensors"),
        (ADDRESS, "model.safetensors"),
    ):
        assert name_weights(source) == (name, digest)
    file = weights_file(ADDRESS)
    assert file.read_bytes() == CONTENT
    assert file.with_name("vocab.txt").read_bytes() == b"[PAD]"
    assert tmp_path / "cache" in file.parents
    before = proxy.sent
    local_copy.cache_clear()
    assert weights_file(ADDRESS) == file
    assert proxy.sent - before < 1000
    replace_content(CONTENT[:1000])
    assert weights_file(ADDRESS).read_bytes() == CONTENT[:1000]


def test_a_copy_is_not_made_without_what_belongs_to_it(proxy):
    s3fs.S3FileSystem().pipe("bucket/vocab.txt", b"[PAD]")
    source = address("http")
    proxy.faults = ["", *["503"] * 4]
    with pytest.raises(AddressError, match=r"bert_config\.json"):
        local_copy(source)
    assert local_copy(source).with_name("vocab.txt").read_bytes() == b"[PAD]"


def change_headers(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, str]], dict[str, str]]
) -> None:
    answer = Handler.answer

    def changed(self, status, headers, content, end):
        return answer(self, status, change(headers), content, end)

    monkeypatch.setattr(Handler, "answer", changed)


def test_a_transfer_that_only_begins_again_is_given_up(proxy, monkeypatch):
    change_headers(monkeypatch, lambda headers: headers | {"ETag": str(proxy.reads)})
    proxy.always = "cut"
    with pytest.raises(AddressError):
        read_address(address("http"))
    assert 4 <= proxy.reads <= 8


def test_files_without_a_version_are_distinguished_by_query_and_content(monkeypatch):
    """Other weights at the same address are never mistaken for the ones in the cache."""
    source = address("http")
    version = ("etag", "last-modified")
    change_headers(
        monkeypatch,
        lambda found: {name: found[name] for name in found if name.lower() not in version},
    )
    assert len({local_copy(f"{source}&number={number}") for number in range(2)}) == 2
    first = local_copy(source)
    replace_content(CONTENT[::-1])
    assert local_copy(source).read_bytes() == CONTENT[::-1]
    replace_content(CONTENT)
    assert local_copy(source) == first


@pytest.mark.slow
def test_main_trains_from_a_store_and_logs_no_secret(proxy, tmp_path, tree_root):
    make_texts(tmp_path, tree_root)
    options = (
        f"{SHAPE.replace(': ', '=').replace(',', '')} vocab_size=15 hidden_act=gelu_erf "
        "gated_mlp=true"
    )
    options += " position_embedding_type=alibi attention_probs_dropout_prob=0"
    shape = BertConfig.from_json(CONFIGS / "tiny.json").with_options(options)
    model = BertForMaskedLM(shape)
    model.initialize(1)
    write_weights(model, tmp_path / "start", {}, None)
    store = s3fs.S3FileSystem()
    for name in ("data", "start"):
        store.put(str(tmp_path / name), f"bucket/{name}", recursive=True)
    proxy.faults = ["503", "drop", "cut", "", "cut"]
    start = "s3://bucket/start/weights/model.safetensors"
    command = [
        sys.executable,
        str(tree_root / "benchmarks/mosaic_bert/main.py"),
        "main.yaml",
        *BASE,
    ]
    command += ["max_duration=2ba", "model.name=mosaic_bert", "run_name=second"]
    command += ["data_local=copy", "data_remote=s3://bucket/data", f"load_path={start}"]
    done = run_checked(*command, cwd=tmp_path, timeout=280)
    printed = done.stdout + done.stderr
    assert not proxy.faults
    written = [
        path.read_bytes() for path in (tmp_path / "runs/second").rglob("*") if path.is_file()
    ]
    assert any(start.encode() in content for content in written)
    assert not any(
        secret.encode() in content
        for secret in (KEY, SECRET)
        for content in [printed.encode(), *written]
    )
    assert any(start.encode() in content for content in written)
    assert {path.name for path in (tmp_path / "copy/val").iterdir()} >= {"index.json"}
