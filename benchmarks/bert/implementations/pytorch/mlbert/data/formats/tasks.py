"""Rows of a task, each with one or two texts and a label, read from files with columns.

A label is a class or a number. Classes are numbered in sorted order (integers by value) from the
training file; other files of the task may have no other classes. The suffix determines the file
format:

.csv           separated by commas or semicolons, quoted as by spreadsheets;
               quoted fields may have line breaks
.tsv .txt      tab-separated without quoting, like GLUE's official files
.jsonl .json   one JSON object per line, or one list of objects

The first row of .csv and .tsv has the column names, unless the caller passes them. Text is UTF-8,
with or without a byte order mark.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from mlbert.data.formats import glue_tasks
from mlbert.data.formats.manifest import file_sha256
from mlbert.host.errors import UserError, nearest
from mlbert.host.files import read_plain
from mlbert.host.json_files import parse_json, shown, whole_characters
from mlbert.host.texts import is_count, is_number, parse_number

_LONGEST_FIELD = 1 << 24  # characters; csv's default limit of 131072 is too small for documents
_MOST_BYTES = 1 << 30  # of a file, which is read into memory
_OBJECT_SUFFIXES = (".jsonl", ".json")
# line, and the wanted fields; None if there is a wrong number of fields.
Row = tuple[int, list[str] | None]
SUFFIXES = (".csv", ".tsv", ".txt", *_OBJECT_SUFFIXES)
# Default column names of a text or of a pair of texts.
TEXT_NAMES = (
    ("text",),
    ("sentence",),
    ("sentence1", "sentence2"),
    ("question", "sentence"),
    ("premise", "hypothesis"),
)
LABEL_NAMES = ("label", "labels", "score")


@dataclass(frozen=True)
class TaskTable:
    """The requested columns of a file.

    Attributes:
        lines: line on which each row begins, from 1.
        columns: one list per column.
        left_out: number of rows skipped because of a wrong number of fields.
    """

    path: Path
    lines: list[int]
    columns: list[list[str]]
    left_out: int


def read_columns(
    path: Path, wanted: Sequence[str], header: Sequence[str] | None = None, lenient: bool = False
) -> TaskTable:
    """Read columns of a file.

    Args:
        path: file with one of the suffixes in the module's table.
        wanted: names of the columns to read.
        header: names of all columns, for a file without a header.
        lenient: skip rows with a wrong number of fields instead of raising an error.

    Raises:
        UserError: the file is missing, damaged or empty, a wanted column is missing or occurs
            twice, or a row has a wrong number of fields.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(
            "data.format", path, "has an unknown suffix", "Give a file with another", SUFFIXES
        )
    if path.suffix in _OBJECT_SUFFIXES:
        found: list[Row] = list(_object_rows(path, wanted))
    else:
        found = list(
            table_rows(path, _lines_of(path), path.suffix == ".csv", wanted, header, lenient)
        )
    kept = {line: fields for line, fields in found if fields is not None}
    if not kept:
        raise UserError("data.empty", path, "holds no rows", "Give a file with at least one")
    columns = [list(column) for column in zip(*kept.values(), strict=True)]
    return TaskTable(path, list(kept), columns, len(found) - len(kept))


def column_names(path: Path) -> list[str]:
    """Return the column names in the file's first row or object, of which there must be one.

    Raises UserError as `read_columns`.
    """
    has_objects = path.suffix in _OBJECT_SUFFIXES
    rows: Iterator[tuple[int, Iterable[str]]] = (
        _objects(path) if has_objects else _records(path, _lines_of(path), path.suffix == ".csv")
    )
    if not (names := [name if has_objects else name.strip() for name in next(rows, (0, []))[1]]):
        raise UserError("data.empty", path, "holds no rows", "Give a file with at least one")
    return names


def _text_of(path: Path) -> str:
    content = read_plain(path, "Name an existing file", _MOST_BYTES)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        reason = f"line {line} is not UTF-8 (byte {error.start})"
        raise UserError("data.encoding", path, reason, "Convert the file to UTF-8") from None


def _lines_of(path: Path) -> Iterator[str]:
    return io.StringIO(_text_of(path), newline="" if path.suffix == ".csv" else "\n")


def _records(path: Path, lines: Iterator[str], is_quoted: bool) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and fields of each line with fields."""
    if not is_quoted:
        for number, line in enumerate(lines, 1):
            if line := line.rstrip("\r\n"):
                yield number, line.split("\t")
        return
    csv.field_size_limit(_LONGEST_FIELD)
    first = next(lines, "")
    reader = csv.reader(chain([first], lines), delimiter=max(",;", key=first.count), strict=True)
    begins = 1
    try:
        for fields in reader:
            if fields:
                yield begins, fields
            begins = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            "data.row", path, f"line {begins}: {error}", "Quote fields as spreadsheets do"
        ) from None


def table_rows(
    path: Path,
    lines: Iterator[str],
    is_quoted: bool,
    wanted: Sequence[str],
    header: Sequence[str] | None = None,
    lenient: bool = False,
) -> Iterator[Row]:
    """Yield the rows of a table's lines, quoted as in .csv or not as in .tsv;
    other arguments as of `read_columns`.
    """
    records = _records(path, lines, is_quoted)
    names = (
        list(header) if header is not None else [name.strip() for name in next(records, (0, []))[1]]
    )
    if not names:
        raise UserError("data.empty", path, "is empty", "Give a file with a header and rows")
    for name in wanted:
        if names.count(name) > 1:
            reason = f"has {names.count(name)} columns called {name!r}"
            raise UserError("data.columns", path, reason, "Rename or remove all but one of them")
    places = [names.index(_found(path, name, names)) for name in wanted]
    for line, fields in records:
        if len(fields) == len(names):
            yield line, [fields[place] for place in places]
        elif lenient:
            yield line, None
        else:
            reason = f"line {line} has {len(fields)} fields, the header has {len(names)}"
            raise UserError(
                "data.row", path, reason, "Quote fields that contain the separator, or fix the row"
            )


def _objects(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (line, object), or for a single list, (number in the list, object)."""
    text = _text_of(path)
    values: Iterable[tuple[int, object]]
    try:
        if text.lstrip().startswith("["):
            values = enumerate(parse_json(text), 1)
        else:
            values = (
                (n, parse_json(line)) for n, line in enumerate(text.split("\n"), 1) if line.strip()
            )
        for number, value in values:
            if not isinstance(value, dict):
                reason = f"line {number} is not a JSON object"
                raise UserError("data.row", path, reason, 'Write for example {"text": "..."}')
            yield number, value
    except UserError:
        raise
    except ValueError as error:
        raise UserError(
            "data.row", path, f"is not JSON ({error})", "Write one object per line, or one list"
        ) from None


def _object_rows(path: Path, wanted: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and wanted fields, as text."""
    for line, value in _objects(path):
        fields = []
        for name in wanted:
            field = value[_found(path, name, list(value), line)]
            if isinstance(field, dict | list):
                reason = f"line {line}: {name} is {shown(field)}, not text or a number"
                raise UserError("data.row", path, reason, "Fix the row")
            text = field if isinstance(field, str) else "" if field is None else json.dumps(field)
            fields.append(whole_characters(text))
        yield line, fields


def _found(path: Path, name: str, names: Sequence[str], line: int | None = None) -> str:
    if name in names:
        return name
    guess = nearest(name, names)
    place = "" if line is None else f"line {line} "
    remedy = f"Did you mean {guess}?" if guess else f"Its columns are {', '.join(names)}"
    raise UserError("data.columns", path, f"{place}has no column {name!r}", remedy)


@dataclass(frozen=True)
class TaskForm:
    """The layout of a task's files.

    Attributes:
        text_columns: one or two columns.
        label_column: column of the label.
        num_labels: number of classes; 1 if the label is a number;
            None to count the classes of the training file.
        classes: names of the classes in order, if known in advance.
        header: names of all columns, if the files have no header.
        lenient: skip rows with a wrong number of fields.
    """

    text_columns: tuple[str, ...]
    label_column: str
    num_labels: int | None = None
    classes: tuple[str, ...] | None = None
    header: tuple[str, ...] | None = None
    lenient: bool = False

    def __post_init__(self) -> None:
        if len(self.text_columns) not in (1, 2):
            reason = f"{len(self.text_columns)} columns are named"
            raise UserError("config.value", "TEXT_COLUMNS", reason, "Name a text, or a pair")


@dataclass(frozen=True)
class TaskRows:
    """The rows of one file (N).

    Attributes:
        texts: a list of N texts for each text column.
        labels: float32 [N], class indices or numbers; None if no labels were requested.
        classes: names of the classes, () for numbers.
        identity: "sha256:..." of the file.
        warnings: messages for the user.
    """

    path: Path
    texts: tuple[list[str], ...]
    labels: np.ndarray | None
    classes: tuple[str, ...]
    identity: str
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.texts[0])

    def first(self, count: int) -> TaskRows:
        """Return the first ``count`` rows."""
        labels = None if self.labels is None else self.labels[:count]
        return replace(self, texts=tuple(texts[:count] for texts in self.texts), labels=labels)


def read_training(path: Path, form: TaskForm) -> TaskRows:
    """Read the training file, which defines the classes.

    Raises UserError as `read_columns`, if a label is not the required number, or if the number of
    classes is not the declared one.
    """
    table = _table(path, form, with_labels=True)
    classes = () if form.num_labels == 1 else form.classes or _classes(table, form.num_labels)
    _refuse_missing_header(path, form, classes)
    labels = _labels(table, classes)
    unseen = sorted(set(range(len(classes))).difference(labels.astype(np.int64).tolist()))
    warnings = [f"no row is of class {classes[number]!r}" for number in unseen]
    return _rows(table, form.text_columns, labels, classes, warnings)


def read_evaluation(path: Path, form: TaskForm, classes: tuple[str, ...]) -> TaskRows:
    """Read a file with the labels of the training file; ``classes`` is () for numbers.

    Raises UserError as `read_columns`, or if a label is not a class of the task or not a number.
    """
    table = _table(path, form, with_labels=True)
    return _rows(table, form.text_columns, _labels(table, classes), classes)


def read_texts(path: Path, form: TaskForm) -> TaskRows:
    """Read only texts. Raises UserError as `read_columns`."""
    table = _table(path, form, with_labels=False)
    _refuse_missing_header(path, form, form.classes or ())
    return _rows(table, form.text_columns, None, ())


def _refuse_missing_header(path: Path, form: TaskForm, classes: tuple[str, ...]) -> None:
    """Raise UserError if the file's first line is a row:
    then the label column is named like a label.

    ``classes`` is () for numbers. Columns that are called 0, 1, ...
    in order are named: pandas does so.
    """
    if form.header is not None or path.suffix in _OBJECT_SUFFIXES:
        return
    name = form.label_column
    if classes:
        is_label = name in classes or (is_count(name) and str(int(name)) in classes)
    else:
        is_label = form.num_labels == 1 and is_number(name)
    if not is_label:
        return
    names = column_names(path)
    if names == [str(number) for number in range(len(names))]:
        return
    reason = f"has no header: its first line has the label {name!r} in place of a column's name"
    remedy = "Add a first line with the names of the columns, such as text,label"
    raise UserError("data.columns", path, reason, remedy)


def _table(path: Path, form: TaskForm, with_labels: bool) -> TaskTable:
    """Read the columns of the texts and, the last one, of the labels."""
    wanted = [*form.text_columns, *([form.label_column] if with_labels else [])]
    return read_columns(path, wanted, form.header, form.lenient)


def _rows(
    table: TaskTable,
    names: Sequence[str],
    labels: np.ndarray | None,
    classes: tuple[str, ...],
    warnings: Sequence[str] = (),
) -> TaskRows:
    texts = table.columns if labels is None else table.columns[:-1]
    what = []
    if table.left_out:
        what.append(f"{table.left_out:,} rows have a wrong number of fields and are left out")
    for name, column in zip(names, texts, strict=True):
        if empty := sum(not text.strip() for text in column):
            what.append(f"{empty:,} of {len(column):,} rows have no text in {name!r}")
    shown_warnings = tuple(f"warning: {table.path}: {warning}" for warning in (*what, *warnings))
    return TaskRows(
        table.path,
        tuple(texts),
        labels,
        classes,
        f"sha256:{file_sha256(table.path)}",
        shown_warnings,
    )


def _labels(table: TaskTable, classes: tuple[str, ...]) -> np.ndarray:
    """Return float32 [N], the numbers of the classes,
    or without ``classes`` the labels as numbers.
    """
    return _class_numbers(table, classes) if classes else _numbers(table)


def _classes(table: TaskTable, declared: int | None) -> tuple[str, ...]:
    path = table.path
    words = table.columns[-1]
    found = {
        word.strip(): line
        for word, line in zip(reversed(words), reversed(table.lines), strict=True)
    }
    if "" in found:
        raise UserError("data.row", path, f"line {found['']} has no label", "Give every row one")
    if all(is_count(word) for word in found):
        numbers = sorted(int(word) for word in found)
        if declared and numbers[-1] < declared:
            return tuple(str(number) for number in range(declared))
        names = [str(number) for number in numbers]
    else:
        names = sorted(found)
    if declared and len(names) > declared:
        extra = names[declared]
        reason = (
            f"line {found.get(extra, table.lines[0])}: "
            f"class {extra!r} is one more than the {declared} declared"
        )
        raise UserError(
            "data.labels", path, reason, f"Set NUM_LABELS={len(names)}, or 1 for numbers"
        )
    if declared and len(names) < declared:
        reason = f"has {len(names)} classes ({', '.join(names[:5])}), {declared} are declared"
        raise UserError(
            "data.labels", path, reason, f"Set NUM_LABELS={len(names)}, or add rows of the others"
        )
    if len(names) == 1:
        raise UserError(
            "data.labels",
            path,
            f"every row is of class {names[0]!r}",
            "Give rows of at least two classes",
        )
    return tuple(names)


def _class_numbers(table: TaskTable, classes: tuple[str, ...]) -> np.ndarray:
    known = {name: number for number, name in enumerate(classes)}
    labels = np.empty(len(table.lines), np.float32)
    for row, word in enumerate(table.columns[-1]):
        name = word.strip()
        number = known.get(name, known.get(str(int(name))) if is_count(name) else None)
        if number is None:
            guess = nearest(name, classes)
            remedy = (
                f"Did you mean {guess}?"
                if guess
                else f"The task's classes are {', '.join(classes[:10])}"
            )
            reason = f"line {table.lines[row]}: {name!r} is not a class of the task"
            raise UserError("data.labels", table.path, reason, remedy)
        labels[row] = number
    return labels


def _numbers(table: TaskTable) -> np.ndarray:
    labels = np.empty(len(table.lines), np.float32)
    for row, word in enumerate(table.columns[-1]):
        try:
            labels[row] = parse_number(word, float)
        except ValueError:
            labels[row] = math.nan
        if not math.isfinite(labels[row]):
            reason = f"line {table.lines[row]}: the label {word!r} is not a finite number"
            raise UserError(
                "data.labels",
                table.path,
                reason,
                "Give every row a number, or declare 2 classes or more",
            )
    return labels


def form_of_task(name: str) -> TaskForm:
    """Return the layout of a GLUE task's files. Raises UserError if there is no such task."""
    if name not in glue_tasks.TASKS:
        raise UserError(
            "config.choice",
            f"TASK={name}",
            "no such task",
            "Give another",
            glue_tasks.TASKS,
        )
    task = glue_tasks.TASKS[name]
    header = None if task.has_header else task.columns
    return TaskForm(
        task.texts, task.label, task.num_labels, task.classes or None, header, lenient=True
    )
