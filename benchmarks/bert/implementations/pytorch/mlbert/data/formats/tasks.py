"""A task's rows: one or two texts and a label each, from files with columns.

A label is a class or a number. Classes are numbered in sorted order (whole numbers by size), as the training file has
them, and every other file of the task must keep to them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mlbert.data.formats import glue
from mlbert.data.formats.task_files import Table, read_columns
from mlbert.host.errors import UserError
from mlbert.host.names import nearest


@dataclass(frozen=True)
class TaskForm:
    """How a task's files look.

    Attributes:
        text_columns: one or two.
        label_column: where a row's label is.
        num_labels: classes; 1: the label is a number; None: as many classes as the training file has.
        classes: their names in order, where they are known beforehand.
        header: names of all columns, where files have no header.
        lenient: rows of a wrong number of fields are left out.
    """

    text_columns: tuple[str, ...]
    label_column: str
    num_labels: int | None = None
    classes: tuple[str, ...] | None = None
    header: tuple[str, ...] | None = None
    lenient: bool = False

    def __post_init__(self) -> None:
        if len(self.text_columns) not in (1, 2):
            raise UserError(
                "config.value", "TEXT_COLUMNS", f"{len(self.text_columns)} columns are named", "Name a text, or a pair"
            )


@dataclass(frozen=True)
class TaskRows:
    """What one file holds.

    Attributes:
        texts: a list of N for each text column.
        labels: float32 [N], class numbers or numbers; None where no labels were asked for.
        classes: names of the classes, () for numbers.
        identity: "sha256:..." of the file.
        warnings: lines for a person.
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
        """The first rows."""
        labels = None if self.labels is None else self.labels[:count]
        return replace(self, texts=tuple(texts[:count] for texts in self.texts), labels=labels)


def read_training(path: Path, form: TaskForm) -> TaskRows:
    """Reads the file that says what the classes are. Raises UserError: see `read_columns`; a label is no number where
    one is asked for, or there are more classes than declared."""
    table, warnings = _table(path, form, with_labels=True)
    *texts, words = table.columns
    identity = file_identity(path)
    if form.num_labels == 1:
        return TaskRows(path, tuple(texts), _numbers(table, words), (), identity, tuple(warnings))
    classes = form.classes or _classes(path, table, words, form.num_labels)
    labels = _class_numbers(table, words, classes)
    unseen = sorted(set(range(len(classes))).difference(labels.astype(np.int64).tolist()))
    warnings += [f"warning: {path}: no row is of class {classes[number]!r}" for number in unseen]
    return TaskRows(path, tuple(texts), labels, classes, identity, tuple(warnings))


def read_evaluation(path: Path, form: TaskForm, classes: tuple[str, ...]) -> TaskRows:
    """Reads a file whose labels are those of the training file; ``classes`` () for numbers. Raises UserError: see
    `read_columns`; a label is no class of the task, or no number."""
    table, warnings = _table(path, form, with_labels=True)
    *texts, words = table.columns
    labels = _class_numbers(table, words, classes) if classes else _numbers(table, words)
    return TaskRows(path, tuple(texts), labels, classes, file_identity(path), tuple(warnings))


def read_texts(path: Path, form: TaskForm) -> TaskRows:
    """Reads texts only. Raises UserError: see `read_columns`."""
    table, warnings = _table(path, form, with_labels=False)
    return TaskRows(path, tuple(table.columns), None, (), file_identity(path), tuple(warnings))


def file_identity(path: Path) -> str:
    """ "sha256:..." of a file."""
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def _table(path: Path, form: TaskForm, with_labels: bool) -> tuple[Table, list[str]]:
    wanted = [*form.text_columns, *([form.label_column] if with_labels else [])]
    table = read_columns(path, wanted, form.header, form.lenient)
    what = f"warning: {path}: {table.left_out} rows have a wrong number of fields and are left out"
    return table, [what] if table.left_out else []


def _classes(path: Path, table: Table, words: Sequence[str], declared: int | None) -> tuple[str, ...]:
    found = {word.strip(): line for word, line in zip(reversed(words), reversed(table.lines), strict=True)}
    if "" in found:
        raise UserError("data.row", path, f"line {found['']} has no label", "Give every row one")
    if all(word.isdecimal() for word in found):
        numbers = sorted(int(word) for word in found)
        if declared and numbers[-1] < declared:
            return tuple(str(number) for number in range(declared))
        names = [str(number) for number in numbers]
    else:
        names = sorted(found)
    if declared and len(names) > declared:
        extra = names[declared]
        reason = f"line {found.get(extra, table.lines[0])}: class {extra!r} is one more than the {declared} declared"
        raise UserError("data.labels", path, reason, f"Set NUM_LABELS={len(names)}, or 1 for numbers")
    if declared and len(names) < declared:
        reason = f"has {len(names)} classes ({', '.join(names[:5])}), {declared} are declared"
        raise UserError("data.labels", path, reason, f"Set NUM_LABELS={len(names)}, or add rows of the others")
    if len(names) == 1:
        raise UserError("data.labels", path, f"every row is of class {names[0]!r}", "Give rows of at least two classes")
    return tuple(names)


def _class_numbers(table: Table, words: Sequence[str], classes: tuple[str, ...]) -> np.ndarray:
    known = {name: number for number, name in enumerate(classes)}
    labels = np.empty(len(words), np.float32)
    for row, word in enumerate(words):
        name = word.strip()
        number = known.get(name, known.get(str(int(name))) if name.isdecimal() else None)
        if number is None:
            guess = nearest(name, classes)
            remedy = f"Did you mean {guess}?" if guess else f"The task's classes are {', '.join(classes[:10])}"
            raise UserError(
                "data.labels", table.path, f"line {table.lines[row]}: {name!r} is no class of the task", remedy
            )
        labels[row] = number
    return labels


def _numbers(table: Table, words: Sequence[str]) -> np.ndarray:
    labels = np.empty(len(words), np.float32)
    for row, word in enumerate(words):
        try:
            labels[row] = float(word)
        except ValueError:
            labels[row] = math.nan
        if not math.isfinite(labels[row]):
            reason = f"line {table.lines[row]}: the label {word!r} is no finite number"
            raise UserError("data.labels", table.path, reason, "Give every row a number, or declare 2 classes or more")
    return labels


def form_of_task(name: str) -> TaskForm:
    """How the files of one of GLUE's tasks look. Raises UserError: no such task."""
    if name not in glue.TASKS:
        raise UserError("config.choice", f"TASK={name}", "no such task", f"Give one of {', '.join(glue.TASKS)}")
    task = glue.TASKS[name]
    header = None if task.has_header else task.columns
    return TaskForm(task.texts, task.label, task.num_labels, task.classes or None, header, lenient=True)
