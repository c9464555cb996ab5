"""Whether files are still those that were made: checksums beside the data, compared while a run goes on.

Two for each shard of a prepared set, for two questions. The SHA-256 in the manifest is identity: with it the manifest's
own SHA-256, which the log names, stands for every byte, and nobody can make other data of the same name. The XXH3 of
128 bits in ``checksums.xxh3`` (lines of ``xxhsum -H2``, so ``xxhsum -c checksums.xxh3`` checks it, too) is for damage:
as fast as memory, so that reading the file is all it costs beside training. It lies in a file of its own because the
manifest's bytes are the identity that logs of earlier runs name. Where it is missing or differs, SHA-256 decides.

`mlbert prepare verify` writes the list for sets of any kind that it finds good.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from mlbert.data.formats.manifest import REMAKE, SHARD_NAME, Manifest, file_sha256
from mlbert.host.errors import UserError
from mlbert.host.files import plain_size, read_plain, reading, write_atomically

CHECKSUMS = "checksums.xxh3"
_LINE = re.compile(r"([0-9a-f]{32})  ((?!.*\.\.)[^/\0-\x1f][^\0-\x1f]*)")
_PIECE = 1 << 20  # bytes read at a time: small enough for a processor's cache
_LOWEST_PRIORITY = 19
_NETWORK = re.compile(r"nfs4?|lustre|gpfs|ceph|cifs|smb3|beegfs|wekafs|glusterfs|orangefs|pvfs2|afs|9p|virtiofs|fuse.*")


def file_xxh3(path: Path) -> str:
    """XXH3 of 128 bits of a file, hexadecimal. Raises UserError: it cannot be read."""
    plain_size(path)
    found, buffer = xxhash.xxh3_128(), bytearray(_PIECE)
    with reading(path), path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            found.update(memoryview(buffer)[:count])
    return found.hexdigest()


def write_checksums(folder: Path, digests: Mapping[str, str]) -> None:
    """Write the list: XXH3 of each file by name. Raises UserError."""
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
    write_atomically(folder / CHECKSUMS, "".join(lines))


def read_checksums(folder: Path) -> dict[str, str]:
    """The list of a folder, empty where there is none. Raises UserError: it is damaged."""
    path = folder / CHECKSUMS
    if not path.exists():
        return {}
    lines = read_plain(path).decode("utf-8", "replace").splitlines()
    matches = [_LINE.fullmatch(line) for line in lines]
    found = {match[2]: match[1] for match in matches if match}
    if not found or len(found) != len(lines):
        raise UserError(
            "data.damaged", path, "is not a list of checksums", f"Restore or remove it: {remake_list(folder)}"
        )
    return found


def listed_sums(folder: Path) -> list[FileSum]:
    """What the list of a set of any kind says of its files. Raises UserError as `read_checksums`."""
    found = read_checksums(folder) if folder.is_dir() else {}
    return [FileSum(folder / name, xxh3, "") for name, xxh3 in sorted(found.items())]


def check_listed(path: Path, folder: Path) -> None:
    """Raises UserError where a file of ``folder`` is not the listed one; one without a list passes."""
    for file in listed_sums(folder):
        if file.path == path and (problem := file.problem()):
            raise problem


def check_complete(folder: Path, listed: Collection[str], names: Collection[str]) -> None:
    """Make sure that a list, where there is one, has just these files. Raises UserError."""
    if listed and set(listed) != set(names):
        wrong = min(set(listed) ^ set(names))
        what = "names" if wrong in listed else "does not name"
        raise UserError(
            "data.incomplete", folder / CHECKSUMS, f"{what} {wrong}", f"Restore or remove it: {remake_list(folder)}"
        )


def remake_list(folder: Path) -> str:
    """How a list is made again."""
    return f"`mlbert prepare verify {folder}` writes it again"


@dataclass(frozen=True)
class FileSum:
    """What a file must be; one of the two may be empty."""

    path: Path
    xxh3: str
    sha256: str

    def problem(self) -> UserError | None:
        """Reads the file; why it is not the one that was made, or None."""
        try:
            if self.xxh3 and file_xxh3(self.path) == self.xxh3:
                return None
            if self.sha256 and file_sha256(self.path) == self.sha256:
                return None
        except UserError as error:
            return error
        listed = "the manifest's" if self.sha256 else f"that in {CHECKSUMS}"
        return UserError("data.checksum", self.path, f"its checksum differs from {listed}", REMAKE)


class FileChecks:
    """Reads files again in the background, one after the other, and compares their checksums; a daemon thread of the
    lowest priority, while there are files to check.

    Args:
        part, parts: this process's among those that share the work: it checks every ``parts``-th file.
    """

    def __init__(self, part: int = 0, parts: int = 1) -> None:
        assert 0 <= part < parts
        self._part, self._parts = part, parts
        self._waiting: deque[FileSum] = deque()
        self._known: set[Path] = set()
        self._lock = threading.Lock()  # of the three below and of `_waiting`
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._problem: UserError | None = None

    def add(self, number: int, file: FileSum) -> None:
        """Have file ``number`` of a set checked, unless it is another process's or was added before."""
        if number % self._parts != self._part:
            return
        with self._lock:
            if file.path not in self._known:
                self._known.add(file.path)
                self._waiting.append(file)
        self._begin()

    def look(self) -> None:
        """Raises UserError, naming the file, where one was found that is not as it was made."""
        if self._problem is not None:
            raise self._problem

    def finish(self) -> None:
        """Waits until every file that was added is checked; raises as `look`."""
        while thread := self._begin():
            thread.join()
        self.look()

    def close(self) -> None:
        """Ends the thread, after the file it is at; `add` and `finish` go on with the others."""
        self._is_closing = True
        if (thread := self._thread) is not None:
            thread.join()
        self._is_closing = False

    def _begin(self) -> threading.Thread | None:
        """The thread that is at work, or None where there is none to do."""
        with self._lock:
            if self._thread is None and self._waiting and self._problem is None:
                self._thread = threading.Thread(target=self._run, name="checksums", daemon=True)
                self._thread.start()
            return self._thread

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # of this thread alone: Linux keeps one for each
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while True:
            with self._lock:
                if self._is_closing or self._problem is not None or not self._waiting:
                    self._thread = None
                    return
                file = self._waiting.popleft()
            try:
                self._problem = file.problem()
            except Exception as error:  # whatever it is, `finish` must not wait for a thread that is gone
                self._problem = UserError("file.unreadable", file.path, f"cannot be checked ({error!r})", REMAKE)


def sharers(folder: Path, rank: int, world_size: int, local_rank: int, local_world_size: int) -> tuple[int, int]:
    """(part, parts) for `FileChecks`: each machine checks its own copy of the data, all together one that lies on a
    network's file system."""
    return (rank, world_size) if _is_shared(folder) else (local_rank, local_world_size)


def _is_shared(folder: Path) -> bool:
    place, kind = "", ""
    with contextlib.suppress(OSError):
        target = str(folder.resolve()) + "/"
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
            _, mount, found, *_ = line.split(" ")
            mount = mount.encode().decode("unicode_escape").rstrip("/") + "/"
            if target.startswith(mount) and len(mount) >= len(place):
                place, kind = mount, found
    return bool(_NETWORK.fullmatch(kind))


def check_files(manifest: Manifest) -> None:
    """Make sure that the shards, and no others, lie beside their manifest, in the sizes that it says.
    Raises UserError."""
    folder = manifest.path.parent
    with reading(folder):
        sizes = {path.name: plain_size(path) for path in folder.iterdir() if SHARD_NAME.fullmatch(path.name)}
    for name in sorted(set(sizes) - {entry.file for entry in manifest.shards}):
        raise UserError(
            "data.mixed", folder / name, "is not in the manifest beside it", "Remove it or prepare the data again"
        )
    for entry in manifest.shards:
        path = folder / entry.file
        if path.name not in sizes:
            raise UserError("data.incomplete", path, "the shard is missing", REMAKE)
        if sizes[path.name] != entry.bytes:
            raise UserError(
                "data.damaged", path, f"has {sizes[path.name]} bytes, the manifest says {entry.bytes}", REMAKE
            )


def file_sums(manifest: Manifest) -> list[FileSum]:
    """Checksums of every shard. Raises UserError: their list is damaged."""
    folder = manifest.path.parent
    listed = read_checksums(folder)
    entries = [(entry.file, entry.sha256) for entry in manifest.shards]
    check_complete(folder, listed, [name for name, _ in entries])
    return [FileSum(folder / name, listed.get(name, ""), sha256) for name, sha256 in entries]
