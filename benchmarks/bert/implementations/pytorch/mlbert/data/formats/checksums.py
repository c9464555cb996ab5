"""Checksums stored with the data and verified in the background during a run.

Each shard of a prepared set has two. The SHA-256 in the manifest establishes identity: the
manifest's own SHA-256, which is logged, covers every byte of the set. The 128-bit XXH3 in
``checksums.xxh3`` (in the format of ``xxhsum -H2``, so ``xxhsum -c checksums.xxh3`` also works)
detects damage. It is as fast as memory, so that verification costs little more than reading the
file. It is in a separate file because logs of earlier runs identify sets by the bytes of the
manifest. If it is missing or differs, SHA-256 decides.

`mlbert prepare verify` writes the list for intact sets of any format.
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

from mlbert.data.formats.manifest import REMAKE, SHARD_NAME, ListedFile, Manifest, file_sha256
from mlbert.host.errors import UserError
from mlbert.host.files import is_leftover, plain_size, read_plain, reading, write_atomically

CHECKSUMS = "checksums.xxh3"
_LINE = re.compile(r"([0-9a-f]{32})  ((?!.*\.\.)[^/\0-\x1f][^\0-\x1f]*)")
_PIECE = 1 << 20  # bytes read at a time: small enough for a processor's cache
_LOWEST_PRIORITY = 19
_NETWORK = re.compile(
    r"nfs4?|lustre|gpfs|ceph|cifs|smb3|beegfs|wekafs|glusterfs|orangefs|pvfs2|afs|9p|virtiofs|fuse.*"
)


def file_xxh3(path: Path) -> str:
    """Return the 128-bit XXH3 of a file in hexadecimal. Raises UserError if it cannot be read."""
    plain_size(path)
    found = xxhash.xxh3_128()
    buffer = bytearray(_PIECE)
    with reading(path), path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            found.update(memoryview(buffer)[:count])
    return found.hexdigest()


def write_checksums(folder: Path, digests: Mapping[str, str]) -> None:
    """Write the list of XXH3 checksums by file name. Raises UserError if it cannot be written."""
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
    write_atomically(folder / CHECKSUMS, "".join(lines))


def read_checksums(folder: Path) -> dict[str, str]:
    """Return the list of a folder, empty if it has none.

    Raises UserError if the list is damaged.
    """
    path = folder / CHECKSUMS
    if not path.exists():
        return {}
    lines = read_plain(path).decode("utf-8", "replace").splitlines()
    matches = [_LINE.fullmatch(line) for line in lines]
    found = {match[2]: match[1] for match in matches if match}
    if not found or len(found) != len(lines):
        reason = "is not a list of checksums"
        raise UserError(
            "data.damaged", path, reason, f"Restore or remove it: {remake_list(folder)}"
        )
    return found


def remove_unfinished(folder: Path, listing: str, numbered: re.Pattern[str], count: int) -> None:
    """Remove what an earlier run left: the ``listing`` that completes a set and its checksums,
    temporary files, and files whose names (``numbered``, with a group "count") have another count.
    """
    for path in folder.iterdir():
        match = numbered.fullmatch(path.name)
        if (
            path.name in (listing, CHECKSUMS)
            or (match and int(match["count"]) != count)
            or is_leftover(path)
        ):
            path.unlink()


def listed_sums(folder: Path) -> list[FileSum]:
    """Return the checksums in the list of a set of any format.

    Raises UserError as `read_checksums`.
    """
    found = read_checksums(folder) if folder.is_dir() else {}
    return [FileSum(folder / name, xxh3, "") for name, xxh3 in sorted(found.items())]


def check_listed(path: Path, folder: Path) -> None:
    """Raise UserError if a file of ``folder`` differs from its listed checksum;
    unlisted files pass.
    """
    for file in listed_sums(folder):
        if file.path == path and (problem := file.problem()):
            raise problem


def check_complete(folder: Path, listed: Collection[str], names: Collection[str]) -> None:
    """Check that the list, if there is one, has exactly these files. Raises UserError otherwise."""
    if listed and set(listed) != set(names):
        wrong = min(set(listed) ^ set(names))
        what = "names" if wrong in listed else "does not name"
        reason = f"{what} {wrong}"
        raise UserError(
            "data.incomplete",
            folder / CHECKSUMS,
            reason,
            f"Restore or remove it: {remake_list(folder)}",
        )


def remake_list(folder: Path) -> str:
    """Return the advice on how to recreate a list."""
    return f"`mlbert prepare verify {folder}` writes it again"


@dataclass(frozen=True)
class FileSum:
    """The expected checksums of a file; one of the two may be empty."""

    path: Path
    xxh3: str
    sha256: str

    def problem(self) -> UserError | None:
        """Read the file and compare it.

        Return the error if it differs or cannot be read, otherwise None.
        """
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
    """Verifies checksums of files in the background, one file at a time,
    in a daemon thread of the lowest priority.

    Args:
        part, parts: this process's share of the work: it checks file ``part`` of every ``parts``.
    """

    def __init__(self, part: int = 0, parts: int = 1) -> None:
        assert 0 <= part < parts
        self.share = part, parts
        self._waiting: deque[FileSum] = deque()
        self._known: set[Path] = set()
        self._lock = threading.Lock()  # guards the three below and `_waiting`
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._problem: UserError | None = None

    def add(self, number: int, file: FileSum) -> None:
        """Queue file ``number`` of a set, unless it is another process's share
        or was added before.
        """
        part, parts = self.share
        if number % parts != part:
            return
        with self._lock:
            if file.path not in self._known:
                self._known.add(file.path)
                self._waiting.append(file)
        self._begin()

    def look(self) -> None:
        """Raise UserError naming the file if a checksum did not match."""
        if self._problem is not None:
            raise self._problem

    def finish(self) -> None:
        """Wait until all added files are checked; raises as `look`."""
        while thread := self._begin():
            thread.join()
        self.look()

    def close(self) -> None:
        """Stop the thread after its current file; `add` and `finish` continue with the others."""
        self._is_closing = True
        if (thread := self._thread) is not None:
            thread.join()
        self._is_closing = False

    def _begin(self) -> threading.Thread | None:
        """Return the running thread, started if there are files to check, or None."""
        with self._lock:
            if self._thread is None and self._waiting and self._problem is None:
                self._thread = threading.Thread(target=self._run, name="checksums", daemon=True)
                self._thread.start()
            return self._thread

    def _run(self) -> None:
        with contextlib.suppress(
            OSError
        ):  # affects only this thread: Linux has a priority per thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while True:
            with self._lock:
                if self._is_closing or self._problem is not None or not self._waiting:
                    self._thread = None
                    return
                file = self._waiting.popleft()
            try:
                self._problem = file.problem()
            except Exception as error:  # of any kind: `finish` must not wait for a dead thread
                self._problem = UserError(
                    "file.unreadable", file.path, f"cannot be checked ({error!r})", REMAKE
                )


def sharers(
    folder: Path, rank: int, world_size: int, local_rank: int, local_world_size: int
) -> tuple[int, int]:
    """Return (part, parts) for `FileChecks`.

    Data on a network file system is shared among all ranks;
    otherwise each machine checks its own copy.
    """
    return (rank, world_size) if _is_shared(folder) else (local_rank, local_world_size)


def _is_shared(folder: Path) -> bool:
    place = ""
    kind = ""
    with contextlib.suppress(OSError):
        target = str(folder.resolve()) + "/"
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
            _, mount, found, *_ = line.split(" ")
            mount = mount.encode().decode("unicode_escape").rstrip("/") + "/"
            if target.startswith(mount) and len(mount) >= len(place):
                place = mount
                kind = found
    return bool(_NETWORK.fullmatch(kind))


def check_files(manifest: Manifest, part: int = 0, parts: int = 1) -> None:
    """Check that the manifest's folder has exactly the listed shards, with the listed sizes.

    Of ``parts`` processes, the first lists the folder, and each looks at one of every ``parts``
    shards. Raises UserError otherwise.
    """
    folder = manifest.path.parent
    with reading(folder):
        found = (
            {path.name for path in folder.iterdir() if SHARD_NAME.fullmatch(path.name)}
            if part == 0
            else set()
        )
    for name in sorted(found - {entry.file for entry in manifest.shards}):
        reason = "is not listed in the manifest"
        raise UserError("data.mixed", folder / name, reason, "Remove it or prepare the data again")
    for entry in manifest.shards[part::parts]:
        path = folder / entry.file
        if not path.exists():
            raise UserError("data.incomplete", path, "the shard is missing", REMAKE)
        check_size(path, entry)


def check_size(path: Path, entry: ListedFile) -> None:
    """Raise UserError if a file does not have the size in the manifest."""
    if problem := entry.size_problem(path, "the manifest"):
        raise UserError("data.damaged", path, problem, REMAKE)


def file_sums(manifest: Manifest) -> list[FileSum]:
    """Return the checksums of every shard. Raises UserError if their list is damaged."""
    folder = manifest.path.parent
    listed = read_checksums(folder)
    entries = [(entry.file, entry.sha256) for entry in manifest.shards]
    check_complete(folder, listed, [name for name, _ in entries])
    return [FileSum(folder / name, listed.get(name, ""), sha256) for name, sha256 in entries]
