"""Files of an MDS set: verified against the index, decompressed, and fetched to a cache folder.

A cache folder has index.json and the uncompressed shards under the names of the set, so that it is itself a set.
Processes may share it: a file is renamed to its final name when it is complete and verified, and only one process at a
time makes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Protocol
from urllib.parse import quote, urlsplit

from mlbert.data.formats.manifest import make_folder, reading
from mlbert.data.formats.mds_index import INDEX, FileInfo, ShardInfo, new_hasher
from mlbert.host.errors import UserError
from mlbert.host.files import whole_file, write_atomically

ATTEMPTS = 2  # a file that arrives damaged is fetched once more
_PIECE = 1 << 20  # bytes read at a time
_TIMEOUT = 60.0  # seconds that an HTTP server may be silent
_EXTRA = "Install it: pip install 'mlbert[streaming]'"


class Readable(Protocol):
    """A source of bytes."""

    def read(self, size: int = -1, /) -> bytes: ...


class Damaged(Exception):
    """A file does not match the index; the message is phrased to follow the file's name."""


class Checked:
    """Reads from ``source`` and verifies size and checksums against the index entry ``file``. Skips algorithms that are
    not available. Both methods raise Damaged."""

    def __init__(self, source: Readable, file: FileInfo) -> None:
        self._source, self._file, self._count = source, file, 0
        found = {algorithm: new_hasher(algorithm) for algorithm in file.hashes}
        self._hashers = {algorithm: hasher for algorithm, hasher in found.items() if hasher is not None}

    def read(self, size: int = -1, /) -> bytes:
        piece = self._source.read(size if size >= 0 else _PIECE)
        self._count += len(piece)
        if self._count > self._file.num_bytes:
            raise Damaged(f"has more than the {self._file.num_bytes:,} bytes of the index")
        for hasher in self._hashers.values():
            hasher.update(piece)
        return piece

    def finish(self) -> None:
        """Read the rest and verify it."""
        while self.read():
            pass
        if self._count < self._file.num_bytes:
            raise Damaged(f"has {self._count:,} of the {self._file.num_bytes:,} bytes of the index")
        for algorithm, hasher in self._hashers.items():
            if hasher.hexdigest() != self._file.hashes[algorithm]:
                raise Damaged(f"has another {algorithm} than the index says")


def zstandard_module() -> ModuleType:
    """Return the module zstandard. Raises UserError if it is not installed."""
    try:
        import zstandard
    except ImportError:
        raise UserError(
            "package.missing", "zstandard", "is not installed, and the shards are compressed with it", _EXTRA
        ) from None
    return zstandard


def check_file(path: Path, file: FileInfo) -> None:
    """Verify a file against the index. Raises Damaged if it differs, UserError if it cannot be read."""
    with reading(path), path.open("rb") as source:
        Checked(source, file).finish()


def local_folder(remote: str) -> Path | None:
    """Return the folder of a path or ``file://`` URL, or None for other URLs."""
    parts = urlsplit(remote)
    if "://" not in remote:
        return Path(remote)
    return Path(urllib.request.url2pathname(parts.path)) if parts.scheme == "file" else None


def address(remote: str, name: str) -> str:
    """Return the path or URL of a file of a set."""
    folder = local_folder(remote)
    if folder is not None:
        return str(folder / name)
    return f"{remote.rstrip('/')}/{quote(name)}" if remote.startswith("http") else f"{remote.rstrip('/')}/{name}"


class _Remote:
    """An open file at a path or URL; converts errors to UserErrors that name it."""

    def __init__(self, url: str, file: BinaryIO) -> None:
        self._url, self._file = url, file

    def read(self, size: int = -1, /) -> bytes:
        with _fetching(self._url):
            return self._file.read(size)


@contextmanager
def _fetching(url: str) -> Iterator[None]:
    """Convert any other exception to a UserError, because each service has its own exception types."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        words = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        reason = f"cannot be fetched ({words or type(error).__name__})"
        raise UserError(
            "network.unreachable", url, reason, "Check the address, the network and the permissions"
        ) from None


@contextmanager
def open_remote(url: str) -> Iterator[Readable]:
    """Open a path or URL for reading. Raises UserError if opening, or later reading, fails."""
    with contextlib.ExitStack() as stack:
        with _fetching(url):
            file = stack.enter_context(_open(url))
        yield _Remote(url, file)


def _open(url: str) -> Any:
    if (path := local_folder(url)) is not None:
        return path.open("rb")
    if urlsplit(url).scheme in ("http", "https"):
        return urllib.request.urlopen(url, timeout=_TIMEOUT)
    try:
        import fsspec
    except ImportError:
        scheme = urlsplit(url).scheme
        raise UserError(
            "package.missing", url, f"needs fsspec to be read from {scheme}://", "Run: pip install fsspec"
        ) from None
    return fsspec.open(url, "rb").open()


def fetch_index(remote: str, cache: Path) -> bytes:
    """Return index.json of a set and store it in the cache folder. Raises UserError if it cannot be fetched, or if the
    folder has another set or cannot be written."""
    with open_remote(address(remote, INDEX)) as source:
        raw = source.read()
    make_folder(cache)
    path = cache / INDEX
    if not path.exists():
        with _locked(path):
            if not path.exists():  # another process may have written it in the meantime
                write_atomically(path, raw)
    with reading(path):
        if path.read_bytes() != raw:
            raise UserError(
                "data.mixed", cache, f"is the cache of another set than {remote}", "Choose another cache folder"
            )
    return raw


def cached_shard(remote: str, cache: Path, shard: ShardInfo) -> Path:
    """Return the path of a shard in the cache folder, fetching and decompressing it if it is missing or damaged. Raises
    UserError if it cannot be fetched or written, or is damaged after every attempt."""
    path = cache / shard.raw.name
    if _is_whole(path, shard.raw):
        return path
    make_folder(path.parent)
    url = address(remote, (shard.zipped or shard.raw).name)
    with _locked(path):
        if _is_whole(path, shard.raw):  # another process made it in the meantime
            return path
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with open_remote(url) as source, whole_file(path) as target:
                    _copy(source, shard, target)
                break
            except Damaged as damage:
                if attempt == ATTEMPTS:
                    reason = f"{damage}, fetched {ATTEMPTS} times"
                    raise UserError("data.damaged", url, reason, "Restore the file, or write the set again") from None
    return path


def _is_whole(path: Path, file: FileInfo) -> bool:
    with contextlib.suppress(Damaged):
        if path.exists():
            check_file(path, file)
            return True
    return False


def _copy(source: Readable, shard: ShardInfo, target: BinaryIO) -> None:
    """Copy a stored shard to its uncompressed form and verify both. Raises Damaged."""
    if shard.zipped is None:
        raw = Checked(source, shard.raw)
        shutil.copyfileobj(raw, target, _PIECE)
        raw.finish()
        return
    zstandard = zstandard_module()
    zipped = Checked(source, shard.zipped)
    raw = Checked(zstandard.ZstdDecompressor().stream_reader(zipped, read_across_frames=True), shard.raw)
    try:
        shutil.copyfileobj(raw, target, _PIECE)
    except zstandard.ZstdError as error:
        raise Damaged(f"cannot be decompressed ({error})") from None
    zipped.finish()
    raw.finish()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock out other threads and processes that make the same file. Raises UserError if the folder is not writable or
    does not support locks."""
    lock = path.with_name(f".{path.name}.lock")
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(lock.open("wb"))
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            reason = f"cannot be locked ({error.strerror})"
            raise UserError(
                "file.unwritable", path, reason, "Choose a cache folder that can be written, on a local disk"
            ) from None
        yield
