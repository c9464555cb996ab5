"""Reader and writer of the benchmark's TFRecords as ragged sequences.

    for rows, starts, ends in ExampleReader("part-00000-of-00500"):
        ...

Every checksum and every value is checked, and padding is removed.
Errors name the file, the number of the record (from
0) and its first byte. The work is done by `mlbert.data.formats.tfrecord_native`
   if it can be compiled, otherwise by
`mlbert.data.formats.tfrecord_plain`, which also documents the record format.

Legend: R records, S sequences.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from mlbert.data.formats import tfrecord_native, tfrecord_plain
from mlbert.data.formats.file_map import FileMap
from mlbert.data.formats.padded import MAX_ID
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tfrecord_plain import (
    HEADER_BYTES,
    BadExample,
    Widths,
    parse_record,
    read_list,
    record_size,
)
from mlbert.host import native
from mlbert.host.errors import UserError
from mlbert.host.files import reading, whole_file

BATCH = 4096  # records
RESTORE = "Restore the file"
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
    """Return the module with the compiled ``scan``, ``parse`` and ``encode``, or without a
    compiler, the one with the same functions in Python.
    """
    try:
        tfrecord_native.library()
    except native.NativeUnavailable:
        return tfrecord_plain
    return tfrecord_native


def slowness() -> str | None:
    """Return the reason why TFRecords are read slowly on this machine, or None."""
    return (
        None
        if codec() is tfrecord_native
        else f"TFRecords are read and written slowly here ({native.status()})"
    )


def find_files(path: Path | str) -> list[Path]:
    """Return the TFRecord files of a folder, sorted by name: ``part-*``, ``*.tfrecord``,
    ``*.tfrecords`` and ``eval_10k``. A path of a file returns that file.

    Raises UserError if the folder cannot be read or has no such files, its ``instances.json`` is
    damaged, or its files are not exactly those listed there (without a list, those implied by
    ``-of-00500`` in their names).
    """
    path = Path(path)
    if not path.is_dir():
        return [path]
    if not (files := named_files(path)):
        reason = "has no TFRecord files (part-*, *.tfrecord, *.tfrecords)"
        raise UserError("data.missing", path, reason, "Give another folder")
    names = {file.name for file in files}
    listed = read_list(path)
    expected = _whole_set(names) if listed is None else set(listed.by_name)
    if extra := sorted(names - expected):
        raise UserError("data.mixed", path / extra[0], "is not one of the set's files", "Remove it")
    if missing := sorted(expected - names):
        remedy = "Restore what is missing, or name the files that you want"
        raise UserError("data.incomplete", path, missing_text(missing), remedy)
    return files


def named_files(folder: Path) -> list[Path]:
    """Return the files of a folder that are named like TFRecords.

    Raises UserError if it cannot be read.
    """
    with reading(folder):
        return sorted(
            file for file in folder.iterdir() if _NAME.fullmatch(file.name) and file.is_file()
        )


def _whole_set(names: Collection[str]) -> set[str]:
    """Return the names without numbers, and all names of the numbered sets (``part-00000-of-00500``
    etc.) in it.
    """
    matches = {name: _NUMBERED.fullmatch(name) for name in names}
    sets = {match.group("stem", "count", "rest") for match in matches.values() if match}
    expected = {
        f"{stem}{index:05d}-of-{count}{rest}"
        for stem, count, rest in sets
        for index in range(int(count))
    }
    return expected | {name for name, match in matches.items() if not match}


def missing_numbers(names: Collection[str]) -> list[str]:
    """Return the missing names of numbered sets (``part-00000-of-00500`` etc.) of which other names
    occur.
    """
    return sorted(_whole_set(names) - {*names})


def missing_text(missing: Sequence[str]) -> str:
    """Return the error text for missing files."""
    first = (
        "there is no" if len(missing) == 1 else f"{len(missing)} files are missing, the first is"
    )
    return f"{first} {missing[0]}"


def is_text(head: bytes) -> bool:
    """Return True if a file with these first bytes is UTF-8 text;
    they may end within a character.
    """
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:
            return False
    return b"\0" not in head and bool(head.strip())


class BadRecord(NamedTuple):
    """A skipped record: its number in the file (from 0), its first byte, and the reason."""

    number: int
    offset: int
    reason: str

    def __str__(self) -> str:
        return f"record {self.number} (byte {self.offset}) {self.reason}"


class RecordPart(NamedTuple):
    """Some sequences of a file, and the first byte
    and the byte after the last of their records (int64 [S]).
    """

    rows: Ragged
    starts: np.ndarray
    ends: np.ndarray


def problem_of(
    record: np.ndarray, widths: Widths | None, vocab_size: int = MAX_ID + 1
) -> str | None:
    """Return why a record (uint8 [B]) is bad, or None."""
    try:
        parse_record(record.tobytes(), widths, vocab_size)
    except BadExample as error:
        return str(error)
    return None


@dataclass
class ExampleReader:
    """Reads one TFRecord file from its start.

    Args:
        path: the file.
        batch: maximum records of one `RecordPart`.
        widths: required of every record; by default those of the first good record,
            available after the first part.
        vocab_size: exclusive upper bound of ids; by default 16 bits.
        skip_bad: skip bad records and list them in ``bad``. After a record with a damaged length,
            or one that is cut off by the end of the file, the rest of the file is lost.
        remedy: advice in messages about bad records.

    Attributes:
        num_records: records seen so far, including bad ones.
        bad: skipped records.
    """

    path: Path
    _: KW_ONLY
    batch: int = BATCH
    widths: Widths | None = None
    vocab_size: int = MAX_ID + 1
    skip_bad: bool = False
    remedy: str = RESTORE
    num_records: int = field(default=0, init=False)
    bad: list[BadRecord] = field(default_factory=list, init=False)

    def __iter__(self) -> Iterator[RecordPart]:
        """Iterate over the file's sequences, in order.

        Raises UserError if the file is unreadable, not TFRecords, or without any good record, or
        for a bad record unless ``skip_bad``.
        """
        any_good = False
        at = 0
        files = FileMap([self.path])
        content = files.bytes[: files.ends[0]]
        while len(starts := at + codec().scan(content[at:], self.batch)) > 1:
            part = self._read(content, starts)
            self.num_records += len(starts) - 1
            at = int(starts[-1])
            if len(part.rows):
                any_good = True
                yield part
        if at < len(content):
            self._refuse_rest(content[at:], at)
        if not any_good:
            problem = "contains no good record" if self.bad else "contains no records"
            raise UserError("data.empty", self.path, problem, self.remedy)

    def _read(self, content: np.ndarray, borders: np.ndarray) -> RecordPart:
        starts = borders[:-1]
        ends = borders[1:]
        if self.widths is None:
            self.widths = self._first_widths(content, borders)
        if self.widths is None:
            rows = Ragged.from_rows([])
            good = np.zeros(len(starts), bool)
        else:
            rows, good = codec().parse(content, starts, ends, self.widths, self.vocab_size)
        for index in np.flatnonzero(~good).tolist():
            reason = problem_of(content[starts[index] : ends[index]], self.widths, self.vocab_size)
            assert reason, "the reference accepts a record that the compiled code rejects"
            self._refuse(int(starts[index]), reason, index)
        return RecordPart(rows, starts[good], ends[good])

    def _first_widths(self, content: np.ndarray, borders: np.ndarray) -> Widths | None:
        for start, end in itertools.pairwise(borders.tolist()):
            with contextlib.suppress(BadExample):
                return parse_record(content[start:end].tobytes(), None, self.vocab_size)[1]
        return None

    def _refuse(self, offset: int, reason: str, index: int = 0) -> None:
        record = BadRecord(self.num_records + index, offset, reason)
        if not self.skip_bad:
            raise UserError("data.damaged", self.path, str(record), self.remedy)
        self.bad.append(record)

    def _refuse_rest(self, rest: np.ndarray, offset: int) -> None:
        """Refuse the end of a file, which is not a complete record."""
        header = rest[:HEADER_BYTES].tobytes()
        needed = HEADER_BYTES if len(header) < HEADER_BYTES else record_size(header)
        if needed:
            of = (
                f"its {needed} bytes"
                if needed > HEADER_BYTES
                else f"the {HEADER_BYTES} bytes of its header"
            )
            self._refuse(offset, f"is cut off: the file ends after {len(rest)} of {of}")
        elif offset:
            self._refuse(offset, "has a damaged length: no record after it can be found")
        else:
            raise self._other_format(rest[:_LOOKED_AT].tobytes())

    def _other_format(self, head: bytes) -> UserError:
        if packer := next(
            (name for magic, name in _COMPRESSED.items() if head.startswith(magic)), None
        ):
            return UserError(
                "data.encoding", self.path, f"is compressed ({packer})", "Unpack it first"
            )
        if is_text(head):
            remedy = "Make instances from it: `mlbert prepare instances`"
            return UserError("data.format", self.path, "is text, not TFRecords", remedy)
        reason = "is not a TFRecord file, or is damaged in record 0 (byte 0)"
        return UserError("data.damaged", self.path, reason, RESTORE)


def read_widths(
    path: Path, *, vocab_size: int = MAX_ID + 1, skip_bad: bool = False, remedy: str = RESTORE
) -> Widths:
    """Return the widths of a file's first good record, reading no further.

    Arguments and errors as `ExampleReader`.
    """
    reader = ExampleReader(path, batch=1, vocab_size=vocab_size, skip_bad=skip_bad, remedy=remedy)
    for _ in reader:
        break
    assert reader.widths is not None
    return reader.widths


def write_examples(
    path: Path | str, rows: Ragged, max_seq_length: int, max_predictions: int
) -> None:
    """Write sequences as a TFRecord file, atomically,
    with the same bytes as the benchmark's generator.

    Raises UserError if a sequence is too long or has too many masked tokens,
    or the file cannot be written.
    """
    path = Path(path)
    widths = Widths(max_seq_length, max_predictions)
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
            reason = f"sequence {where} has {counts[where]} {name}, but at most {most} fit"
            raise UserError("data.too-long", path, reason, "Use larger limits")
