"""The benchmark's TFRecords: read into ragged sequences, written from them.

    for rows, starts, ends in ExampleReader("part-00000-of-00500"):
        ...

Every checksum is checked and every value is looked at; padding is removed. What is wrong is told with the file, the
number of the record (from 0) and its first byte. The work is done by `mlbert.data.formats.tfrecord_native` where it can
be compiled, by `mlbert.data.formats.tfrecord_plain` (which also says what a record looks like) elsewhere.

Legend: R records, S sequences.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Collection, Iterator, Sequence
from io import FileIO
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from mlbert.data.formats import tfrecord_native, tfrecord_plain
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tfrecord_list import read_list
from mlbert.data.formats.tfrecord_plain import (
    BAD_LENGTH,
    FOOTER_BYTES,
    FULL,
    HEADER_BYTES,
    MAX_ID,
    BadExample,
    Scan,
    Widths,
    parse_example,
)
from mlbert.host import native
from mlbert.host.errors import UserError
from mlbert.host.files import plain_size, reading, whole_file

BATCH = 4096  # records
RESTORE = "Restore the file"
_BUFFER_BYTES = 16 << 20
_RECORD_BYTES = 8192  # more than one of the benchmark's has
_LOOKED_AT = 65_536
_NAME = re.compile(r"part-[^.]+|eval_10k|[^.].*\.tfrecords?(-\d+-of-\d+)?")
_NUMBERED = re.compile(r"(?P<stem>.*-)(?P<index>\d{5})-of-(?P<count>\d{5})(?P<rest>.*)")
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
}


@functools.cache
def codec() -> ModuleType:
    """The module with the compiled ``scan``, ``check``, ``parse`` and ``encode``, or the one with the same functions in
    Python where there is no compiler (`slowness` tells)."""
    try:
        tfrecord_native.library()
    except native.NativeUnavailable:
        return tfrecord_plain
    return tfrecord_native


def slowness() -> str | None:
    """Why TFRecords are read slowly here; None where they are not."""
    return None if codec() is tfrecord_native else f"TFRecords are read and written slowly here ({native.status()})"


def find_files(path: Path | str) -> list[Path]:
    """The TFRecord files of a folder, by name: ``part-*``, ``*.tfrecord``, ``*.tfrecords`` and ``eval_10k``, no
    checksums or other files beside them. A path that is no folder stands for itself.

    Raises UserError: the folder cannot be read, has none, or not just those that its ``instances.json`` lists (or that
    is damaged), or else that the ``-of-00500`` in their names speaks of.
    """
    path = Path(path)
    if not path.is_dir():
        return [path]
    if not (files := named_files(path)):
        raise UserError(
            "data.missing", path, "has no TFRecord files (part-*, *.tfrecord, *.tfrecords)", "Give another folder"
        )
    names = {file.name for file in files}
    listed = read_list(path)
    expected = _whole_set(names) if listed is None else set(listed.by_name)
    if extra := sorted(names - expected):
        raise UserError("data.mixed", path / extra[0], "is not one of the set's files", "Remove it")
    if missing := sorted(expected - names):
        raise UserError(
            "data.incomplete", path, missing_text(missing), "Restore what is missing, or name the files that you want"
        )
    return files


def named_files(folder: Path) -> list[Path]:
    """The files of a folder that have such a name. Raises UserError: it cannot be read."""
    with reading(folder):
        return sorted(file for file in folder.iterdir() if _NAME.fullmatch(file.name) and file.is_file())


def _whole_set(names: Collection[str]) -> set[str]:
    """All of ``part-00000-of-00500`` and so on that some of the names speak of, and the names without numbers."""
    matches = {name: _NUMBERED.fullmatch(name) for name in names}
    sets = {match.group("stem", "count", "rest") for match in matches.values() if match}
    expected = {f"{stem}{index:05d}-of-{count}{rest}" for stem, count, rest in sets for index in range(int(count))}
    return expected | {name for name, match in matches.items() if not match}


def missing_numbers(names: Collection[str]) -> list[str]:
    """The names that are not there of ``part-00000-of-00500`` and so on, as far as others speak of them."""
    return sorted(_whole_set(names) - {*names})


def missing_text(missing: Sequence[str]) -> str:
    """Why a folder is refused in which these are missing."""
    first = "there is no" if len(missing) == 1 else f"{len(missing)} files are missing, the first is"
    return f"{first} {missing[0]}"


def is_text(head: bytes) -> bool:
    """Whether a file with these first bytes is text in UTF-8; they may end within a character."""
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:
            return False
    return b"\0" not in head and bool(head.strip())


class BadRecord(NamedTuple):
    """A record that was left out: number in its file from 0, its first byte, and why."""

    number: int
    offset: int
    reason: str

    def __str__(self) -> str:
        return f"record {self.number} (byte {self.offset}) {self.reason}"


class RecordPart(NamedTuple):
    """Some sequences of a file and where their records lie: int64 [S], first byte and the byte after the last."""

    rows: Ragged
    starts: np.ndarray
    ends: np.ndarray


class ExampleReader:
    """Reads one TFRecord file from its start.

    Args:
        batch: most records of one `RecordPart`.
        widths: what every record must have; None: what the first good record has.
        vocab_size: ids must be smaller; None: 16 bits.
        skip_bad: leave bad records out and list them in ``bad``. After a record whose length is damaged or that the
            file's end cuts off, the rest of the file is lost.
        remedy: what messages about bad records recommend.

    Attributes:
        widths: of the records, known after the first part.
        num_records: records seen so far, bad ones too.
        bad: what was left out.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        batch: int = BATCH,
        widths: Widths | None = None,
        vocab_size: int | None = None,
        skip_bad: bool = False,
        remedy: str = RESTORE,
    ) -> None:
        assert batch > 0, "a batch has records"
        self.path = Path(path)
        self.widths = widths
        self.num_records = 0
        self.bad: list[BadRecord] = []
        self._batch = batch
        self._vocab_size = vocab_size or MAX_ID + 1
        self._skip_bad = skip_bad
        self._remedy = remedy

    def __iter__(self) -> Iterator[RecordPart]:
        """The file's sequences, in order. Raises UserError: unreadable, not TFRecords, without any (good) record; a bad
        record unless it is to be skipped."""
        any_good = False
        plain_size(self.path)
        with reading(self.path), self.path.open("rb", buffering=0) as file:
            for data, offset, found in self._scans(file, os.fstat(file.fileno()).st_size):
                part = self._read(data, offset, found)
                self.num_records += len(found.intact)
                if len(part.rows):
                    any_good = True
                    yield part
        if not any_good:
            raise UserError(
                "data.empty", self.path, "holds no good record" if self.bad else "holds no records", self._remedy
            )

    def _scans(self, file: FileIO, size: int) -> Iterator[tuple[np.ndarray, int, Scan]]:
        """(bytes, their place in the file, records in them) until the end of the file or of what can be found."""
        buffer: np.ndarray = np.empty(min(_BUFFER_BYTES, self._batch * _RECORD_BYTES), np.uint8)
        at = end = offset = 0  # buffer[at:end] lies at `offset`
        while True:
            found = codec().scan(buffer[at:end], self._batch)
            if len(found.intact):
                yield buffer[at:end], offset, found
                at += int(found.starts[-1])
                offset += int(found.starts[-1])
            if found.stopped == FULL:
                continue
            rest = buffer[at:end]
            if found.stopped == BAD_LENGTH:
                self._refuse_length(offset, rest)
                return
            needed = self._bytes_of_next(rest)
            if size - offset < needed:
                if rest_of_file := size - offset:
                    self._refuse_end(offset, rest_of_file, needed, rest)
                return
            previous, buffer = buffer, buffer if needed <= len(buffer) else np.empty(needed, np.uint8)
            buffer[: len(rest)] = previous[at:end].copy()
            at, end = 0, len(rest)
            while end < needed:
                count = file.readinto(buffer[end:].data)
                if not count:
                    self._refuse_end(offset, end, needed, buffer[:end])
                    return
                end += count

    @staticmethod
    def _bytes_of_next(rest: np.ndarray) -> int:
        """How many bytes it takes to get on: a header, or the record whose (intact) header is there."""
        if len(rest) < HEADER_BYTES:
            return HEADER_BYTES
        return int(rest[:8].copy().view("<u8")[0]) + HEADER_BYTES + FOOTER_BYTES

    def _read(self, data: np.ndarray, offset: int, found: Scan) -> RecordPart:
        starts, ends = found.starts[:-1], found.starts[1:]
        if self.widths is None:
            self.widths = self._find_widths(data, found)
        if self.widths is None:
            rows, good = Ragged.from_rows([]), np.zeros(len(starts), bool)
        else:
            rows, good = codec().parse(data, starts, ends, found.intact, self.widths, self._vocab_size)
        for index in np.flatnonzero(~good).tolist():
            reason = "has damaged data: its checksum is wrong"
            if found.intact[index]:
                reason = self._what_is_wrong(data[starts[index] : ends[index]])
            self._refuse(BadRecord(self.num_records + index, offset + int(starts[index]), reason))
        return RecordPart(rows, starts[good] + offset, ends[good] + offset)

    def _find_widths(self, data: np.ndarray, found: Scan) -> Widths | None:
        for index in np.flatnonzero(found.intact).tolist():
            record = data[found.starts[index] : found.starts[index + 1]]
            try:
                return parse_example(_content(record), None, self._vocab_size)[1]
            except BadExample:
                continue
        return None

    def _what_is_wrong(self, record: np.ndarray) -> str:
        try:
            parse_example(_content(record), self.widths, self._vocab_size)
        except BadExample as error:
            return str(error)
        raise AssertionError("the plain form takes a record that the compiled one refuses")

    def _refuse(self, record: BadRecord) -> None:
        if not self._skip_bad:
            raise UserError("data.damaged", self.path, str(record), self._remedy)
        self.bad.append(record)

    def _refuse_length(self, offset: int, rest: np.ndarray) -> None:
        if offset == 0:
            start = rest[:8].tobytes()
            packer = next((name for magic, name in _COMPRESSED.items() if start.startswith(magic)), None)
            if packer:
                raise UserError("data.encoding", self.path, f"is compressed ({packer})", "Unpack it first")
            if is_text(rest[:_LOOKED_AT].tobytes()):
                raise UserError(
                    "data.format",
                    self.path,
                    "is text, not TFRecords",
                    "Make instances of it: `mlbert prepare instances`",
                )
            raise UserError(
                "data.damaged", self.path, "is not a TFRecord file, or is damaged in record 0 (byte 0)", RESTORE
            )
        reason = "has a damaged length: no record after it can be found"
        self._refuse(BadRecord(self.num_records, offset, reason))

    def _refuse_end(self, offset: int, available: int, needed: int, rest: np.ndarray) -> None:
        of = f"its {needed} bytes" if len(rest) >= HEADER_BYTES else f"the {HEADER_BYTES} bytes of its header"
        reason = f"is cut off: the file ends after {available} of {of}"
        self._refuse(BadRecord(self.num_records, offset, reason))


def _content(record: np.ndarray) -> bytes:
    return record[HEADER_BYTES:-FOOTER_BYTES].tobytes()


def read_widths(
    path: Path | str, *, vocab_size: int | None = None, skip_bad: bool = False, remedy: str = RESTORE
) -> Widths:
    """Widths of a file's first good record; reads no further. Arguments and errors as of `ExampleReader`."""
    reader = ExampleReader(path, batch=1, vocab_size=vocab_size, skip_bad=skip_bad, remedy=remedy)
    for _ in reader:
        break
    assert reader.widths is not None
    return reader.widths


def write_examples(path: Path | str, rows: Ragged, max_seq_length: int, max_predictions: int) -> None:
    """Write sequences as a TFRecord file, as a whole or not at all.

    The same sequences give the bytes that the benchmark's generator writes for them.

    Raises UserError: a sequence is too long or has too many masked tokens, or the file cannot be written.
    """
    path, widths = Path(path), Widths(max_seq_length, max_predictions)
    _check_fits(path, rows, widths)
    with whole_file(path) as file:
        for first in range(0, len(rows), BATCH):
            file.write(codec().encode(rows.slice(first, min(first + BATCH, len(rows))), widths))


def _check_fits(path: Path, rows: Ragged, widths: Widths) -> None:
    for name, counts, most in (
        ("tokens", rows.lengths, widths.max_seq_length),
        ("masked tokens", np.diff(rows.masked_offsets), widths.max_predictions),
    ):
        if len(counts) and counts.max() > most:
            where = int(counts.argmax())
            reason = f"sequence {where} has {counts[where]} {name}, at most {most} fit"
            raise UserError("data.too-long", path, reason, "Use larger limits")
