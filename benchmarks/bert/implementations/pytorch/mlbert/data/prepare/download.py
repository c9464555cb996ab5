"""Fetch the benchmark's published files by a list of names, sizes,
MD5 sums and addresses (``benchmark_files.json``).

A file is written as ``<name>.partial``, resumed after an interruption, and renamed once size and
MD5 match. ``.verified`` in the output folder records size and time of verified files, so a second
run reads only files that have changed. The text archive is unpacked into ``text/`` and its files
are checked against the published sums.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
import urllib.parse
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

from pydantic import Field

from mlbert.data.formats.index_cache import state_of
from mlbert.data.formats.manifest import file_md5, make_folder, write_json
from mlbert.host.errors import UserError
from mlbert.host.files import (
    AddressError,
    local_path,
    read_pieces,
    read_plain,
    write_atomically,
    writing,
)
from mlbert.host.json_files import parse_json, read_json
from mlbert.host.progress import Progress
from mlbert.host.provenance import shipped
from mlbert.host.schema import Count, Document, parse_model

LIST = Path(__file__).with_name("benchmark_files.json")  # the benchmark's files
VERIFIED = ".verified"  # in the output folder: the record of verified files
CHUNK = 1 << 20  # bytes read at a time
_SUM_LINE = re.compile(r"([0-9a-f]{32})[ *]+(\S+)")  # MD5 and name, as md5sum writes them
_RESUME = "Run the same command again; it continues where it stopped"
_DAMAGED = (tarfile.TarError, EOFError, OSError, zlib.error)  # raised while an archive is read


class Entry(Document):
    """One file of the list."""

    name: str  # path below the output folder, and below a mirror
    size: Count | None = Field(default=None, alias="bytes")  # None if only the sum is published
    md5: str  # 32 hexadecimal digits
    group: str  # for ``--only``
    urls: list[str] = Field(default_factory=list)  # published addresses, tried in order
    unpack: str = ""  # folder for the files of an archive, or ""
    checksums: str = ""  # name of a list of sums for the archive's files, or ""
    # Known sums, name -> [bytes, md5].
    members: dict[str, list[Count | str]] = Field(default_factory=dict)


class FileList(Document):
    """A list of files, and the groups that are fetched if nothing is named; None for all."""

    files: list[Entry]
    default_groups: list[str] | None = None


def read_list(path: Path | None = None) -> FileList:
    """Return the benchmark's list, or another one in the same format.

    Raises UserError: the file cannot be read or has another format.
    """
    path = path or LIST
    document = read_json(path, "Check --manifest")
    found = parse_model(
        FileList, document, path, "See mlbert/data/prepare/benchmark_files.json for the form"
    )
    for entry in found.files:
        if Path(entry.name).is_absolute() or ".." in Path(entry.name).parts:
            reason = f"names a file outside the folder: {entry.name}"
            raise UserError("data.damaged", path, reason, "Use relative names")
    return found


def select(listed: FileList, wanted: Sequence[str]) -> list[Entry]:
    """Return the entries with these names, base names or groups; without any, the default entries.

    Raises UserError: a name is neither.
    """
    entries = listed.files
    wanted = wanted or listed.default_groups or [entry.group for entry in entries]
    for name in wanted:
        if not any(name in _names(entry) for entry in entries):
            groups = dict.fromkeys(entry.group for entry in entries)
            reason = f"{name} is neither a file of the list nor a group"
            raise UserError("config.choice", "--only", reason, "Name a group", groups)
    return [entry for entry in entries if set(wanted) & _names(entry)]


def _names(entry: Entry) -> set[str]:
    return {entry.name, Path(entry.name).name, entry.group}


def fetch_all(
    entries: Sequence[Entry], out: Path, mirror: str = "", *, progress: Progress = Progress()
) -> list[Path]:
    """Fetch the entries into ``out``; return all files, including those of archives.

    With ``mirror``, use ``<mirror>/<name>`` instead of the published addresses; a mirror folder may
    also hold the file directly. Raises UserError: no source has the file, the host cannot be
    reached, the content is wrong, or the disk is full.
    """
    make_folder(out)
    memory = _Memory(out)
    found = []
    for entry in entries:
        target = out / entry.name
        if not memory.knows(target, entry.md5):
            if not _is_right(target, entry):
                target.parent.mkdir(parents=True, exist_ok=True)
                _fetch(entry, target, mirror, progress)
            memory.remember({target: entry.md5})
        found.append(target)
    for entry in entries:
        if entry.unpack:
            found += _unpack(entry, out, memory, progress)
    return found


class _Memory:
    """Record of verified files: name -> [md5, bytes, modification time in ns]."""

    def __init__(self, out: Path) -> None:
        self.path = out / VERIFIED
        try:
            self.known: dict[str, list[Any]] = dict(parse_json(read_plain(self.path)))
        except (ValueError, TypeError):  # UserError too
            self.known = {}

    def knows(self, path: Path, md5: str) -> bool:
        if not path.is_file():
            return False
        name, state = self._entry(path, md5)
        return self.known.get(name) == state

    def remember(self, sums: Mapping[Path, str]) -> None:
        self.known |= dict(self._entry(path, md5) for path, md5 in sums.items())
        write_json(self.path, self.known)

    def _entry(self, path: Path, md5: str) -> tuple[str, list[Any]]:
        return path.relative_to(self.path.parent).as_posix(), [md5, *state_of(path)]


def _is_right(path: Path, entry: Entry) -> bool:
    if not path.is_file() or (entry.size is not None and path.stat().st_size != entry.size):
        return False
    return file_md5(path) == entry.md5


def _fetch(entry: Entry, target: Path, mirror: str, progress: Progress) -> None:
    if entry.name == "bert_config.json":  # its content is known, so it is written, not fetched
        shape = json.loads((shipped("configs") / "large.json").read_bytes())
        known = (json.dumps(shape, indent=2, sort_keys=True) + "\n").encode()
        if hashlib.md5(known, usedforsecurity=False).hexdigest() == entry.md5:
            write_atomically(target, known)
            return
    reasons = []
    sources = _mirrored(entry, mirror) if mirror else entry.urls
    for source in sources:
        try:
            _fetch_from(source, entry, target, progress)
            return
        except AddressError as error:
            reasons.append(f"{source}: {error.reason}")
            if not error.is_lasting and local_path(source) is None:
                break  # another source would not help if the network is down; received data is kept
    reason = "cannot be fetched (" + ("; ".join(reasons) or "it has no published address") + ")"
    size = "" if entry.size is None else f", {entry.size:,} bytes"
    by_hand = (
        f"Fetch it on another machine (MD5 {entry.md5}{size}), copy it here, "
        "and run the same command again"
    )
    raise UserError("network.unreachable", target, reason, by_hand)


def _mirrored(entry: Entry, mirror: str) -> list[str]:
    base = (mirror if "://" in mirror else Path(mirror).absolute().as_uri()).rstrip("/")
    if (folder := local_path(base)) is None:
        return [f"{base}/{urllib.parse.quote(entry.name)}"]
    if not folder.is_dir():
        remedy = "Give a folder or an address that begins with https://"
        raise UserError("file.missing", "--mirror", f"{mirror} is not a folder", remedy)
    return [
        f"{base}/{urllib.parse.quote(name)}"
        for name in dict.fromkeys([entry.name, Path(entry.name).name])
    ]


def _fetch_from(source: str, entry: Entry, target: Path, progress: Progress) -> None:
    """Fetch a file; a wrong sum after a resumed transfer allows one more attempt from the
    beginning.
    """
    partial = target.with_name(target.name + ".partial")
    while True:
        begun_at = partial.stat().st_size if partial.exists() else 0
        if entry.size is not None and begun_at > entry.size:
            partial.unlink()
            begun_at = 0
        md5 = _transfer(source, entry, partial, progress)
        size = partial.stat().st_size
        if md5 == entry.md5 and entry.size in (None, size):
            os.replace(partial, target)
            return
        partial.unlink()
        if not begun_at:
            published = (
                entry.md5 if entry.size is None else f"{entry.size:,} bytes with MD5 {entry.md5}"
            )
            reason = f"has {size:,} bytes with MD5 {md5}; the published file has {published}"
            raise UserError(
                "data.checksum",
                source,
                reason,
                "The file is different or damaged; use another --mirror",
            )


def _transfer(source: str, entry: Entry, partial: Path, progress: Progress) -> str:
    """Append the missing bytes to ``partial``; return the MD5 of the complete file."""
    state = hashlib.md5(usedforsecurity=False)
    target = Path(entry.name).name
    with _written(partial) as file, ExitStack() as stack:
        while piece := file.read(CHUNK):
            state.update(piece)
        if entry.size is not None and file.tell() == entry.size:
            return state.hexdigest()
        advance = None
        for offset, content, total, _ in read_pieces(source, file.tell()):
            if moved := offset - file.tell():
                file.seek(offset)
                file.truncate()
                state = hashlib.md5(usedforsecurity=False)
            if advance is None:
                advance = stack.enter_context(
                    progress.task(target, entry.size or total or 0, "bytes")
                )
                moved = offset
            file.write(content)
            state.update(content)
            advance(moved + len(content))
        return state.hexdigest()


@contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """Open a file to continue it; sync it to disk when the block ends."""
    with (
        writing(path, f"Free space. {_RESUME}"),
        path.open("r+b" if path.exists() else "w+b") as file,
    ):
        yield file
        file.flush()
        os.fsync(file.fileno())


def _unpack(entry: Entry, out: Path, memory: _Memory, progress: Progress) -> list[Path]:
    """Extract and verify the files of a tar archive, ignoring its folders."""
    archive = out / entry.name
    sums = {name: str(known[1]) for name, known in entry.members.items()}
    listed = out / entry.checksums
    if entry.checksums and listed.is_file():
        lines = listed.read_text("utf-8", "replace").splitlines()
        sums |= {Path(match[2]).name: match[1] for match in map(_SUM_LINE.match, lines) if match}
    folder = out / entry.unpack
    if sums and all(memory.knows(folder / name, md5) for name, md5 in sums.items()):
        return [folder / name for name in sums]
    folder.mkdir(exist_ok=True)
    made: dict[Path, str] = {}
    with progress.task(f"unpacking {entry.name}", archive.stat().st_size, "bytes") as advance:
        for path, md5 in _members(archive, folder, advance):
            if md5 != sums.get(path.name, md5):
                path.unlink()
                reason = f"has MD5 {md5}, but the published MD5 is {sums[path.name]}"
                raise UserError(
                    "data.damaged", path, reason, f"Remove {archive} and fetch it again"
                )
            made[path] = md5
    if missing := sorted(set(sums) - {path.name for path in made}):
        raise UserError(
            "data.incomplete",
            archive,
            f"lacks {missing[0]} and {len(missing) - 1} more",
            "Fetch it again",
        )
    memory.remember(made)
    return list(made)


def _members(
    archive: Path, folder: Path, advance: Callable[[int], None]
) -> Iterator[tuple[Path, str]]:
    done = 0
    try:
        with archive.open("rb") as raw, tarfile.open(fileobj=raw, mode="r|*") as tar:
            for member in filter(tarfile.TarInfo.isfile, tar):
                source = tar.extractfile(member)
                assert source is not None
                path = folder / Path(member.name).name
                temporary = path.with_name(path.name + ".partial")
                temporary.unlink(missing_ok=True)
                with _written(temporary) as target:
                    target.writelines(_pieces(source, archive))
                os.replace(temporary, path)
                advance(raw.tell() - done)
                done = raw.tell()
                yield path, file_md5(path)
    except _DAMAGED as error:
        raise _damaged(archive, error) from None


def _pieces(source: IO[bytes], archive: Path) -> Iterator[bytes]:
    try:
        while piece := source.read(CHUNK):
            yield piece
    except _DAMAGED as error:
        raise _damaged(archive, error) from None


def _damaged(archive: Path, error: Exception) -> UserError:
    return UserError(
        "data.damaged", archive, f"cannot be unpacked ({error})", "Remove it and fetch it again"
    )
