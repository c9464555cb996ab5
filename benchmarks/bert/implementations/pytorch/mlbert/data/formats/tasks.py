"""Rows of a task, each with one or two texts and a label, read from files with columns.

A label is a class, a number, or a set of classes. Classes are numbered in sorted order (integers by
value) from the training file; other files of the task may have no other classes. A set is written
``a|b``, as a list of JSON or Parquet, or in a column of 0 and 1 for each class; an empty one says
that no class applies. The suffix determines the file format:

.csv           separated by commas, semicolons or tabs, whichever the first line has most of,
               quoted as by spreadsheets; quoted fields may have line breaks
.tsv .txt      tab-separated without quoting, like GLUE's official files
.jsonl .json   one JSON object per line, or one list of objects
.parquet       columns of text, numbers or lists of them; needs the package pyarrow

The first row of .csv and .tsv has the column names, unless the caller passes them. Text is UTF-8,
with or without a byte order mark.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mlbert.data.formats import glue_tasks
from mlbert.data.formats.manifest import file_sha256
from mlbert.host.errors import UserError, import_package, nearest
from mlbert.host.files import read_plain
from mlbert.host.json_files import parse_json, problem_in_line, shown, whole_characters
from mlbert.host.texts import counted, has_decimal_comma, is_count, is_number, parse_number

_LONGEST_FIELD = 1 << 24  # characters; csv's default limit of 131072 is too small for documents
_MOST_BYTES = 1 << 30  # of a file, which is read into memory
_MOST_NAMED = 10  # lines of rows without a label in one message
_EXISTING = "Name an existing file"  # remedy
_PARQUET = ".parquet"
OBJECT_SUFFIXES = (".jsonl", ".json", _PARQUET)
_SEPARATOR = "|"  # of the classes of a set
_IN_SET = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}
LabelKind = Literal["one", "set", "tags"]
# line, and the wanted fields; None if there is a wrong number of fields.
Row = tuple[int, list[str] | None]
SUFFIXES = (".csv", ".tsv", ".txt", *OBJECT_SUFFIXES)
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
    path: Path,
    wanted: Sequence[str],
    header: Sequence[str] | None = None,
    lenient: bool = False,
    lists: Sequence[str] = (),
) -> TaskTable:
    """Read columns of a file.

    Args:
        path: file with one of the suffixes in the module's table.
        wanted: names of the columns to read.
        header: names of all columns, for a file without a header.
        lenient: skip rows with a wrong number of fields instead of raising an error.
        lists: columns in which a list [a, b] is read as the text ``a|b``.

    Raises:
        UserError: the file is missing, damaged or empty, a wanted column is missing or occurs
            twice, or a row has a wrong number of fields.
    """
    _check_suffix(path)
    if suffix_of(path) in OBJECT_SUFFIXES:
        found: list[Row] = list(_object_rows(path, wanted, lists))
    else:
        found = list(
            table_rows(path, _lines_of(path), suffix_of(path) == ".csv", wanted, header, lenient)
        )
    kept = {line: fields for line, fields in found if fields is not None}
    if not kept:
        raise UserError("data.empty", path, "contains no rows", "Give a file with at least one")
    columns = [list(column) for column in zip(*kept.values(), strict=True)]
    return TaskTable(path, list(kept), columns, len(found) - len(kept))


def suffix_of(path: Path) -> str:
    """Return a file's suffix in lower case: some programs write DATA.CSV."""
    return path.suffix.lower()


def _check_suffix(path: Path) -> None:
    """Raise UserError if a file has an unknown suffix. Who reads a folder says that it is one."""
    if suffix_of(path) not in SUFFIXES and not path.is_dir():
        raise UserError(
            "data.format", path, "has an unknown suffix", "Give a file with a known one", SUFFIXES
        )


def column_names(path: Path) -> list[str]:
    """Return the column names in the file's first row or object, of which there must be one.

    Raises UserError as `read_columns`.
    """
    _check_suffix(path)
    has_objects = suffix_of(path) in OBJECT_SUFFIXES
    rows: Iterator[tuple[int, Iterable[str]]] = (
        read_objects(path)
        if has_objects
        else _records(path, _lines_of(path), suffix_of(path) == ".csv")
    )
    if not (names := [name if has_objects else name.strip() for name in next(rows, (0, []))[1]]):
        raise UserError("data.empty", path, "contains no rows", "Give a file with at least one")
    return names


def text_of_file(path: Path) -> str:
    """Return the text of a UTF-8 file.

    Raises UserError if it is missing, too large, or not UTF-8.
    """
    content = read_plain(path, _EXISTING, _MOST_BYTES)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        reason = f"line {line} is not UTF-8 (byte {error.start})"
        raise UserError("data.encoding", path, reason, "Convert the file to UTF-8") from None


def _lines_of(path: Path) -> Iterator[str]:
    return io.StringIO(text_of_file(path), newline="" if suffix_of(path) == ".csv" else "\n")


def _records(path: Path, lines: Iterator[str], is_quoted: bool) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and fields of each line with fields."""
    if not is_quoted:
        for number, line in enumerate(lines, 1):
            if line := line.rstrip("\r\n"):
                yield number, line.split("\t")
        return
    csv.field_size_limit(_LONGEST_FIELD)
    first = next(lines, "")
    reader = csv.reader(chain([first], lines), delimiter=max(",;\t", key=first.count), strict=True)
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
            reason = (
                f"line {line} has {counted(len(fields), 'field')}, but the header has {len(names)}"
            )
            raise UserError(
                "data.row", path, reason, "Quote fields that contain the separator, or fix the row"
            )


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (line, object) of JSON lines; for one list or Parquet, (number of the row, object).

    Raises UserError as `read_columns`.
    """
    if suffix_of(path) == _PARQUET:
        yield from _parquet_rows(path)
        return
    text = text_of_file(path)
    values: Iterable[tuple[int, object]]
    if text.lstrip().startswith("["):
        values = enumerate(_json_value(path, text, None), 1)
    else:
        values = (
            (n, _json_value(path, line, n))
            for n, line in enumerate(text.split("\n"), 1)
            if line.strip()
        )
    for number, value in values:
        if not isinstance(value, dict):
            reason = f"line {number} is not a JSON object"
            raise UserError("data.row", path, reason, 'Write for example {"text": "..."}')
        yield number, value


def _json_value(path: Path, text: str, line: int | None) -> Any:
    """Return the value of a line of a file, or of the whole file if the line is None.

    Raises UserError if it is not JSON.
    """
    try:
        return parse_json(text)
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError):
            line = line or error.lineno
        place = "" if line is None else f"line {line} "
        reason = f"{place}is not JSON ({problem_in_line(error)})"
        raise UserError(
            "data.row", path, reason, "Write one object per line, or one list"
        ) from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    import_package("pyarrow", path, "bert")
    from pyarrow import ArrowException, parquet

    content = io.BytesIO(read_plain(path, _EXISTING, _MOST_BYTES))
    try:
        rows = parquet.read_table(content).to_pylist()
    except (ArrowException, OSError) as error:
        reason = f"cannot be read by pyarrow ({str(error).splitlines()[0]})"
        raise UserError("data.damaged", path, reason, "Write it again") from None
    yield from enumerate(rows, 1)


def _object_rows(
    path: Path, wanted: Sequence[str], lists: Sequence[str]
) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and wanted fields, as text."""
    for line, value in read_objects(path):
        fields = []
        for name in wanted:
            field = value[_found(path, name, list(value), line)]
            if name in lists and isinstance(field, list):
                parts = [_plain(part) for part in field]
                if divided := next((part for part in parts if _SEPARATOR in part), None):
                    reason = f"line {line}: {name} has {shown(divided)}, but | separates classes"
                    raise UserError("data.labels", path, reason, "Rename the class")
                field = _SEPARATOR.join(parts)
            if isinstance(field, dict | list | bytes):
                reason = f"line {line}: {name} is {shown(field)}, not text or a number"
                raise UserError("data.row", path, reason, "Fix the row")
            fields.append(whole_characters(_plain(field)))
        yield line, fields


def _plain(field: object) -> str:
    """Return a field as text. Parquet also has dates and decimals, which are written as Python
    does.
    """
    if field is None:
        return ""
    is_of_json = isinstance(field, bool | int | float | list | dict)
    return json.dumps(field, default=str) if is_of_json else str(field)


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
        kind: whether a label is one class or number, or a set of classes, in one column or in
            those that ``label_column`` names with commas. "tags": one class for each word
            (`mlbert.data.formats.tagged_words`).
        skip_bad: leave out rows without a label, or with one that is not the number required.
    """

    text_columns: tuple[str, ...]
    label_column: str
    num_labels: int | None = None
    classes: tuple[str, ...] | None = None
    header: tuple[str, ...] | None = None
    lenient: bool = False
    kind: LabelKind = "one"
    skip_bad: bool = False

    def __post_init__(self) -> None:
        if len(self.text_columns) not in (1, 2):
            reason = f"{len(self.text_columns)} columns are named"
            raise UserError("config.value", "TEXT_COLUMNS", reason, "Name a text, or a pair")

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns of the label: several if there is one of 0 and 1 for each class."""
        if self.kind != "set":
            return (self.label_column,)
        return tuple(name.strip() for name in self.label_column.split(","))


@dataclass(frozen=True)
class TaskRows:
    """The rows of one file (N).

    Attributes:
        texts: a list of N texts for each text column.
        labels: float32 [N], class indices or numbers; None if no labels were requested,
            or they are in ``label_lists``.
        classes: names of the classes, () for numbers.
        identity: "sha256:..." of the file.
        warnings: messages for the user.
        lines: line on which each row begins.
        label_lists: for each row, class indices: of a set, or one for each word; or None.
        left_out: rows of the file that are not here, because they are damaged or have no label.
        words: of texts with one class for each word: the words, each with the white space before
            it, so that joined they are the text; or None.
    """

    path: Path
    texts: tuple[list[str], ...]
    labels: np.ndarray | None
    classes: tuple[str, ...]
    identity: str
    warnings: tuple[str, ...] = ()
    lines: tuple[int, ...] = ()
    label_lists: list[list[int]] | None = None
    words: list[list[str]] | None = None
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.texts[0])

    def first(self, count: int) -> TaskRows:
        """Return the first ``count`` rows."""
        return replace(
            self,
            texts=tuple(texts[:count] for texts in self.texts),
            labels=None if self.labels is None else self.labels[:count],
            lines=self.lines[:count],
            label_lists=None if self.label_lists is None else self.label_lists[:count],
            words=None if self.words is None else self.words[:count],
        )


def read_training(path: Path, form: TaskForm) -> TaskRows:
    """Read the training file, which defines the classes.

    Raises UserError as `read_columns`, if a row has no label or one that is not the required
    number, if the number of classes is not the declared one, if all labels are equal, or if no row
    has text.
    """
    table = _table(path, form, with_labels=True)
    if form.kind == "set":
        return _rows_of_sets(table, form, None)
    classes = () if form.num_labels == 1 else form.classes or _classes(table, form.num_labels)
    _refuse_missing_header(path, form, classes)
    labels = _labels(table, classes)
    if not classes and len(labels) > 1 and np.ptp(labels) == 0:
        reason = f"every row has the number {table.columns[-1][0].strip()}"
        raise UserError("data.labels", path, reason, "Give rows with different numbers")
    unseen = sorted(set(range(len(classes))).difference(labels.astype(np.int64).tolist()))
    warnings = [f"no row has the class {classes[number]!r}" for number in unseen]
    return _rows(table, form, labels, classes, warnings)


def read_evaluation(path: Path, form: TaskForm, classes: tuple[str, ...]) -> TaskRows:
    """Read a file with the labels of the training file; ``classes`` is () for numbers.

    Raises UserError as `read_columns`, if a row has no label, or if it is not a class of the task
    or not a number.
    """
    table = _table(path, form, with_labels=True)
    if form.kind == "set":
        return _rows_of_sets(table, form, classes)
    return _rows(table, form, _labels(table, classes), classes)


def read_texts(path: Path, form: TaskForm) -> TaskRows:
    """Read only texts. Raises UserError as `read_columns`."""
    table = _table(path, form, with_labels=False)
    _refuse_missing_header(path, form, form.classes or ())
    return _rows(table, form, None, ())


def _refuse_missing_header(path: Path, form: TaskForm, classes: tuple[str, ...]) -> None:
    """Raise UserError if the file's first line is a row:
    then the label column is named like a label.

    ``classes`` is () for numbers. Columns that are called 0, 1, ...
    in order are named: pandas does so.
    """
    if form.header is not None or suffix_of(path) in OBJECT_SUFFIXES:
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
    if not with_labels:
        return read_columns(path, form.text_columns, form.header, form.lenient)
    names = form.label_columns
    wanted = [*form.text_columns, *names]
    lists = names if form.kind == "set" else ()
    table = read_columns(path, wanted, form.header, form.lenient, lists)
    if form.kind == "set" and len(names) == 1:
        return table  # an empty set is a label
    rows_of_labels = zip(*table.columns[-len(names) :], strict=True)
    has_label = [all(word.strip() for word in words) for words in rows_of_labels]
    if not all(has_label):
        problem = f"{_named_lines(table, has_label)} no label"
        remedy = "Label each row, or leave out those without a label with SKIP_BAD=1"
        error = UserError("data.row", path, problem, remedy)
        table = _good_rows(table, has_label, form, error)
    if len(names) > 1:
        return _with_joined_columns(table, names)
    if form.num_labels == 1:
        is_finite = [_is_finite(word) for word in table.columns[-1]]
        if not all(is_finite):
            table = _good_rows(table, is_finite, form, _no_number(table, is_finite))
    return table


def _good_rows(
    table: TaskTable, is_good: Sequence[bool], form: TaskForm, error: UserError
) -> TaskTable:
    """Return the good rows if the others are to be left out; raise the error if they are not, or if
    there is no good row.
    """
    if not form.skip_bad or not any(is_good):
        raise error
    left_out = table.left_out + is_good.count(False)
    lines = list(compress(table.lines, is_good))
    columns = [list(compress(column, is_good)) for column in table.columns]
    return TaskTable(table.path, lines, columns, left_out)


def _is_finite(word: str) -> bool:
    """Return whether a word is a number that float32 has."""
    return is_number(word) and abs(float(word)) <= float(np.finfo(np.float32).max)


def _no_number(table: TaskTable, is_finite: Sequence[bool]) -> UserError:
    example = table.columns[-1][is_finite.index(False)]
    several = is_finite.count(False) > 1
    what = "labels that are not finite numbers, such as" if several else "the label"
    which = "" if several else ", which is not a finite number"
    remedy = (
        "Give every row a number, leave these out with SKIP_BAD=1, or declare 2 classes or more"
    )
    if has_decimal_comma(example):
        remedy = "Write a point in place of the comma"
    reason = f"{_named_lines(table, is_finite)} {what} {example!r}{which}"
    return UserError("data.labels", table.path, reason, remedy)


def _named_lines(table: TaskTable, is_good: Sequence[bool]) -> str:
    """Return the start of a sentence about the lines of the other rows: "line 3 has"."""
    lines = [line for line, good in zip(table.lines, is_good, strict=True) if not good]
    if len(lines) == 1:
        return f"line {lines[0]} has"
    named = ", ".join(map(str, lines[:_MOST_NAMED]))
    more = len(lines) - _MOST_NAMED
    return f"lines {named} and {more:,} more have" if more > 0 else f"lines {named} have"


def _with_joined_columns(table: TaskTable, names: Sequence[str]) -> TaskTable:
    """Return the table with the columns of 0 and 1 joined to one, of sets.

    Raises UserError for another value.
    """
    texts = table.columns[: -len(names)]
    joined = []
    rows = zip(*table.columns[-len(names) :], strict=True)
    for line, row in zip(table.lines, rows, strict=True):
        for name, word in zip(names, row, strict=True):
            if word.strip().lower() not in _IN_SET:
                reason = f"line {line}: {name} is {word!r}, not 0 or 1"
                raise UserError("data.labels", table.path, reason, "Write 1 if the label applies")
        joined.append(
            _SEPARATOR.join(
                name for name, word in zip(names, row, strict=True) if _IN_SET[word.strip().lower()]
            )
        )
    return TaskTable(table.path, table.lines, [*texts, joined], table.left_out)


def classes_of_set(word: str) -> list[str]:
    """Return the classes of a set that is written ``a|b``."""
    return [part.strip() for part in word.split(_SEPARATOR) if part.strip()]


def written_set(classes: Iterable[str]) -> str:
    """Return the text of a set, ``a|b``."""
    return _SEPARATOR.join(classes)


def _rows_of_sets(table: TaskTable, form: TaskForm, known: Sequence[str] | None) -> TaskRows:
    """Return the rows of a table with sets; without ``known`` its words are the classes."""
    sets = [classes_of_set(word) for word in table.columns[-1]]
    if known is None:
        named = form.label_columns if len(form.label_columns) > 1 else ()
        classes = form.classes or named or tuple(sorted({name for found in sets for name in found}))
        if not classes:
            raise UserError("data.labels", table.path, "no row has a label", "Give labels")
    else:
        classes = tuple(known)
    numbers = {name: number for number, name in enumerate(classes)}
    for line, found in zip(table.lines, sets, strict=True):
        for name in found:
            if name not in numbers:
                raise _unknown_class(table.path, line, name, classes)
    label_lists = [sorted({numbers[name] for name in found}) for found in sets]
    warnings = []
    if empty := sum(not numbers_of_row for numbers_of_row in label_lists):
        warnings.append(f"{empty:,} of {len(sets):,} rows have no label: no class applies")
    rows = _rows(table, form, np.empty(0, np.float32), classes, warnings)
    return replace(rows, labels=None, label_lists=label_lists)


def _rows(
    table: TaskTable,
    form: TaskForm,
    labels: np.ndarray | None,
    classes: tuple[str, ...],
    warnings: Sequence[str] = (),
) -> TaskRows:
    texts = table.columns if labels is None else table.columns[:-1]
    what = []
    if table.left_out:
        reason = (
            "a wrong number of fields, or no valid label,"
            if form.skip_bad
            else "a wrong number of fields"
        )
        what.append(f"{table.left_out:,} rows have {reason} and are left out")
    for name, column in zip(form.text_columns, texts, strict=True):
        empty = sum(not text.strip() for text in column)
        if empty == len(column):
            remedy = "Give rows with text, or another column"
            raise UserError("data.empty", table.path, f"has no text in {name!r}", remedy)
        if empty:
            what.append(f"{empty:,} of {len(column):,} rows have no text in {name!r}")
    shown_warnings = tuple(f"warning: {table.path}: {warning}" for warning in (*what, *warnings))
    return TaskRows(
        table.path,
        tuple(texts),
        labels,
        classes,
        f"sha256:{file_sha256(table.path)}",
        shown_warnings,
        tuple(table.lines),
        left_out=table.left_out,
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
            f"class {extra!r} is not one of the {declared} declared classes"
        )
        raise UserError(
            "data.labels", path, reason, f"Set NUM_LABELS={len(names)}, or 1 for numbers"
        )
    if declared and len(names) < declared:
        reason = f"has {len(names)} classes ({', '.join(names[:5])}), but {declared} are declared"
        raise UserError(
            "data.labels", path, reason, f"Set NUM_LABELS={len(names)}, or add rows of the others"
        )
    if len(names) == 1:
        raise UserError(
            "data.labels",
            path,
            f"every row has the class {names[0]!r}",
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
            raise _unknown_class(table.path, table.lines[row], name, classes)
        labels[row] = number
    return labels


def _unknown_class(path: Path, line: int, name: str, classes: Sequence[str]) -> UserError:
    guess = nearest(name, classes)
    remedy = f"The task's classes are {', '.join(classes[:10])}"
    if guess:
        remedy = f"Did you mean {guess}?"
    return UserError(
        "data.labels", path, f"line {line}: {name!r} is not a class of the task", remedy
    )


def _numbers(table: TaskTable) -> np.ndarray:
    """Return the labels, of which `_table` has checked that they are finite numbers."""
    return np.array([parse_number(word, float) for word in table.columns[-1]], np.float32)


def form_of_task(name: str) -> TaskForm:
    """Return the layout of a GLUE task's files. Raises UserError if there is no such task."""
    if name not in glue_tasks.TASKS:
        raise UserError(
            "config.choice",
            f"TASK={name}",
            "no such task",
            "Use a valid one",
            glue_tasks.TASKS,
        )
    task = glue_tasks.TASKS[name]
    header = None if task.has_header else task.columns
    return TaskForm(
        task.texts, task.label, task.num_labels, task.classes or None, header, lenient=True
    )
