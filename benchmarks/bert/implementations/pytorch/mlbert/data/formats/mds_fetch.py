"""Files of an MDS set: checked against the index, unpacked, and fetched from elsewhere to a cache folder.

A cache folder holds index.json and shards as they are read, under the names of the set, so that it is itself a set.
Processes and ranks may share it: a file gets its name when it is whole and checked, and one process at a time makes it.
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
    """What bytes come from."""

    def read(self, size: int = -1, /) -> bytes: ...


class Damaged(Exception):
    """A file's bytes are not those that the index names; the message follows the file's name."""


class Checked:
    """Passes the bytes of ``source`` on, no more than ``file`` may have, and compares them with what the index says.
    Algorithms that are not to be had are left out. Both methods raise Damaged."""

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
        """Read what is left, and compare."""
        while self.read():
            pass
        if self._count < self._file.num_bytes:
            raise Damaged(f"has {self._count:,} of the {self._file.num_bytes:,} bytes of the index")
        for algorithm, hasher in self._hashers.items():
            if hasher.hexdigest() != self._file.hashes[algorithm]:
                raise Damaged(f"has another {algorithm} than the index says")


def zstandard_module() -> ModuleType:
    """Raises UserError: it is not installed."""
    try:
        import zstandard
    except ImportError:
        raise UserError(
            "package.missing", "zstandard", "is not installed, and the shards are compressed with it", _EXTRA
        ) from None
    return zstandard


def check_file(path: Path, file: FileInfo) -> None:
    """Compare a file with the index. Raises Damaged, and UserError: it cannot be read."""
    with reading(path), path.open("rb") as source:
        Checked(source, file).finish()


def local_folder(remote: str) -> Path | None:
    """The folder that a path or a ``file://`` address names; None for addresses of other machines."""
    parts = urlsplit(remote)
    if "://" not in remote:
        return Path(remote)
    return Path(urllib.request.url2pathname(parts.path)) if parts.scheme == "file" else None


def address(remote: str, name: str) -> str:
    """Where a file of a set lies, as a path or URL."""
    folder = local_folder(remote)
    if folder is not None:
        return str(folder / name)
    return f"{remote.rstrip('/')}/{quote(name)}" if remote.startswith("http") else f"{remote.rstrip('/')}/{name}"


class _Remote:
    """A file of any machine, whose errors are UserErrors that name it. ``file`` is what was opened."""

    def __init__(self, url: str, file: BinaryIO) -> None:
        self._url, self._file = url, file

    def read(self, size: int = -1, /) -> bytes:
        with _fetching(self._url):
            return self._file.read(size)


@contextmanager
def _fetching(url: str) -> Iterator[None]:
    """Makes a UserError of any error but a UserError: each service has its own kinds."""
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
    """Open a path or URL to read. Raises UserError: it cannot be had; also while it is read."""
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
    """index.json of a set, put into its cache folder, too. Raises UserError: it cannot be fetched, the folder holds
    another set, or cannot be written."""
    with open_remote(address(remote, INDEX)) as source:
        raw = source.read()
    make_folder(cache)
    path = cache / INDEX
    if not path.exists():
        with _locked(path):
            if not path.exists():  # nor did another process make it meanwhile
                write_atomically(path, raw)
    with reading(path):
        if path.read_bytes() != raw:
            raise UserError(
                "data.mixed", cache, f"is the cache of another set than {remote}", "Choose another cache folder"
            )
    return raw


def cached_shard(remote: str, cache: Path, shard: ShardInfo) -> Path:
    """A shard's file in the cache folder, checked; fetched and unpacked where it is not there or damaged.
    Raises UserError: it cannot be fetched or written, or is damaged however often it is fetched."""
    path = cache / shard.raw.name
    if _is_whole(path, shard.raw):
        return path
    make_folder(path.parent)
    url = address(remote, (shard.zipped or shard.raw).name)
    with _locked(path):
        if _is_whole(path, shard.raw):  # another process made it meanwhile
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
    """Copy a shard as it is stored to the form in which it is read, and check both. Raises Damaged."""
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
    """Holds other threads and processes back that make the same file. Raises UserError: the folder cannot be written or
    has no locks."""
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
