"""Columns of the files that tasks come in, told by the suffix.

.csv           comma-separated, quoted as spreadsheets do; line breaks may stand within quotes
.tsv .txt      tab-separated without quoting, as GLUE's official files are
.jsonl .json   one JSON object a line, or one list of objects

The first row of .csv and .tsv names the columns, unless the caller does. Text is UTF-8, with or without a byte order
mark.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbert.host.errors import UserError
from mlbert.host.json_files import parse_json, shown, whole_characters
from mlbert.host.names import nearest

_LONGEST_FIELD = 1 << 24  # characters; csv's own limit of 131072 is too little for documents
SUFFIXES = (".csv", ".tsv", ".txt", ".jsonl", ".json")

Records = Iterator[tuple[int, list[str]]]  # line number and fields


@dataclass(frozen=True)
class Table:
    """The columns that were asked for.

    Attributes:
        lines: line on which each row begins, from 1.
        columns: one list a column.
        left_out: rows of a wrong number of fields, where those are left out.
    """

    path: Path
    lines: list[int]
    columns: list[list[str]]
    left_out: int


def read_columns(
    path: Path, wanted: Sequence[str], header: Sequence[str] | None = None, lenient: bool = False
) -> Table:
    """Reads these columns of a file.

    Args:
        path: of a suffix of the module's table.
        wanted: names of columns.
        header: names of all columns, of a file without a header.
        lenient: leave rows of a wrong number of fields out, in place of refusing them.

    Raises:
        UserError: the file is missing, damaged or empty, a column is missing, or a row has a wrong number of fields.
    """
    if path.suffix not in SUFFIXES:
        raise UserError("data.format", path, "is no known kind of file", f"Give one of {', '.join(SUFFIXES)}")
    text = _text_of(path)
    if path.suffix in (".jsonl", ".json"):
        table = _from_objects(path, _objects(path, text), wanted)
    else:
        records = _csv_records(path, text) if path.suffix == ".csv" else _tsv_records(text)
        table = _from_records(path, records, wanted, header, lenient)
    if not table.lines:
        raise UserError("data.empty", path, "holds no rows", "Give a file with at least one")
    return table


def column_names(path: Path) -> list[str]:
    """The columns that the file's first row or object names. Raises UserError as `read_columns`."""
    text = _text_of(path)
    if path.suffix in (".jsonl", ".json"):
        first = next(_objects(path, text), None)
        return [] if first is None else list(first[1])
    records = _csv_records(path, text) if path.suffix == ".csv" else _tsv_records(text)
    return next(records, (0, []))[1]


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(
            "file.unreadable", path, f"cannot be read ({error.strerror})", "Name an existing file"
        ) from None
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise UserError(
            "data.encoding", path, f"line {line} is not UTF-8 (byte {error.start})", "Convert the file to UTF-8"
        ) from None


def _tsv_records(text: str) -> Records:
    for number, line in enumerate(text.split("\n"), 1):
        if line := line.rstrip("\r"):
            yield number, line.split("\t")


def _csv_records(path: Path, text: str) -> Records:
    csv.field_size_limit(_LONGEST_FIELD)
    reader, begins = csv.reader(io.StringIO(text, newline=""), strict=True), 1
    try:
        for fields in reader:
            if fields:
                yield begins, fields
            begins = reader.line_num + 1
    except csv.Error as error:
        raise UserError("data.row", path, f"line {begins}: {error}", "Quote fields as spreadsheets do") from None


def _from_records(
    path: Path, records: Records, wanted: Sequence[str], header: Sequence[str] | None, lenient: bool
) -> Table:
    names = list(header) if header is not None else [name.strip() for name in next(records, (0, []))[1]]
    if not names:
        raise UserError("data.empty", path, "is empty", "Give a file with a header and rows")
    places = [names.index(_found(path, name, names)) for name in wanted]
    lines: list[int] = []
    columns: list[list[str]] = [[] for _ in wanted]
    left_out = 0
    for line, fields in records:
        if len(fields) != len(names):
            if not lenient:
                reason = f"line {line} has {len(fields)} fields, the header has {len(names)}"
                raise UserError("data.row", path, reason, "Quote fields that hold the separator, or mend the row")
            left_out += 1
            continue
        lines.append(line)
        for column, place in zip(columns, places, strict=True):
            column.append(fields[place])
    return Table(path, lines, columns, left_out)


def _objects(path: Path, text: str) -> Iterator[tuple[int, dict[str, object]]]:
    """(line, object); of a list that is one value, (number in the list, object)."""
    values: Iterable[tuple[int, object]]
    try:
        if text.lstrip().startswith("["):
            values = enumerate(parse_json(text), 1)
        else:
            values = ((n, parse_json(line)) for n, line in enumerate(text.split("\n"), 1) if line.strip())
        for number, value in values:
            if not isinstance(value, dict):
                raise UserError(
                    "data.row", path, f"line {number} is no JSON object", 'Write for example {"text": "..."}'
                )
            yield number, value
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError("data.row", path, f"is not JSON ({error})", "Write one object a line, or one list") from None


def _from_objects(path: Path, objects: Iterator[tuple[int, dict[str, object]]], wanted: Sequence[str]) -> Table:
    lines: list[int] = []
    columns: list[list[str]] = [[] for _ in wanted]
    for line, value in objects:
        lines.append(line)
        for column, name in zip(columns, wanted, strict=True):
            field = value[_found(path, name, list(value), line)]
            if isinstance(field, dict | list):
                raise UserError(
                    "data.row", path, f"line {line}: {name} is {shown(field)}, no text or number", "Mend the row"
                )
            text = field if isinstance(field, str) else "" if field is None else json.dumps(field)
            column.append(whole_characters(text))
    return Table(path, lines, columns, 0)


def _found(path: Path, name: str, names: Sequence[str], line: int | None = None) -> str:
    if name in names:
        return name
    guess = nearest(name, names)
    place = "" if line is None else f"line {line} "
    remedy = f"Did you mean {guess}?" if guess else f"Its columns are {', '.join(names)}"
    raise UserError("data.columns", path, f"{place}has no column {name!r}", remedy)
