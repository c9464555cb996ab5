"""Guess what the columns of a task's file are: the text, the label, and the kind of label."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from mlbert.data.formats.tagged_words import TAG_NAMES, TEXT_NAME, is_tagged
from mlbert.data.formats.tasks import (
    LABEL_NAMES,
    TEXT_NAMES,
    TaskForm,
    classes_of_set,
    column_names,
    read_columns,
    suffix_of,
)
from mlbert.host.errors import UserError
from mlbert.host.texts import has_decimal_comma, is_number

# What a label is: one class, a number, any number of classes, or a tag for each word.
Task = Literal["classes", "numbers", "labels", "words"]
MOST_CLASSES = 20  # of a guessed label, and of integers that are taken for classes
MOST_WORDS = 0.1  # of a guessed number's labels: for example n/a in place of a number
# What to do about a file with one column, by its suffix.
_ANOTHER_COLUMN = {
    ".csv": "Separate columns by commas, semicolons or tabs",
    ".tsv": "Separate columns by tabs",
    ".txt": "Separate columns by tabs",
}
_MORE = "Give rows with a text and a label"
_JOINT = "|"  # of the classes of a set
_OF_EMBEDDINGS = {"anchor", "positive"}  # columns of pairs and triplets


def find_form(
    path: Path, text: str | None, label: str | None, task: Task | None, skip_bad: bool = False
) -> TaskForm:
    """Return which columns of a file are text and label, and what the labels are.

    Args:
        path: the training file.
        text: column of the text, or two with a comma between them;
            None or no letters guess by name, then by length.
        label: column of the label, or of 0 and 1 for each class, with commas between them;
            None or no letters guess by name, then by the number of different values.
        task: None infers it from the labels.
        skip_bad: leave out rows without a label.

    Raises:
        UserError: as `read_columns`, or a column cannot be guessed.
    """
    is_plain = not text and not label
    if task == "words" or (task is None and is_plain and is_tagged(path)):
        if not is_plain:
            reason = "name columns, but a tag for each word has none"
            raise UserError("config.conflict", "--text and --label", reason, "Remove them")
        return TaskForm((TEXT_NAME,), TAG_NAMES[0], kind="tags", skip_bad=skip_bad)
    texts = tuple(name.strip() for name in text.split(",")) if text else ()
    _check_different(f"--text {text}", texts, ())
    _check_different(f"--label {label}", (label,) if label else (), texts)
    in_file = column_names(path)
    if is_plain and {name.lower() for name in in_file} >= _OF_EMBEDDINGS:
        reason = "has anchors and positives, which train embeddings; finetune trains on labels"
        remedy = "Run docs/examples/train_embeddings.py, or name columns: --text and --label"
        raise UserError("data.columns", path, reason, remedy)
    if label and label not in in_file and "," in label:
        labels = tuple(name.strip() for name in label.split(","))
        _check_different(f"--label {label}", labels, texts)
        texts = texts or _guess_texts(_columns(path, in_file, texts, labels), labels)
        return TaskForm(texts, ",".join(labels), kind="set", skip_bad=skip_bad)
    columns = _columns(path, in_file, texts, (label,) if label else ())
    if not label:
        label = _guess_label(path, columns, texts)
    texts = texts or _guess_texts(columns, (label,))
    task = task or _guess_task(columns[label])
    if task == "labels":
        return TaskForm(texts, label, kind="set", skip_bad=skip_bad)
    count = len(set(columns[label]))
    if task == "classes" and count > max(MOST_CLASSES, len(columns[label]) // 2):
        reason = f"{label!r} has {count} different values in {len(columns[label])} rows"
        remedy = "Name another column with --label, or give --numbers"
        if any(map(has_decimal_comma, columns[label])):
            remedy = "Write numbers with a point in place of the comma, or name another --label"
        raise UserError("data.labels", path, reason, remedy)
    return TaskForm(texts, label, 1 if task == "numbers" else None, skip_bad=skip_bad)


def _check_different(option: str, names: Sequence[str], texts: Sequence[str]) -> None:
    """Raise UserError if an option names a column twice, or one of the text."""
    remedy = "Name different columns"
    if len(set(names)) < len(names):
        raise UserError("config.conflict", option, "names a column twice", remedy)
    if not set(names).isdisjoint(texts):
        raise UserError("config.conflict", option, "is also the text", remedy)


def _columns(
    path: Path, in_file: Sequence[str], texts: Sequence[str], labels: Sequence[str]
) -> dict[str, list[str]]:
    """Return the columns that were named, and those that may be guessed, by name.

    Two columns of one name are an error only if that name is given, or would be guessed.
    """
    usual = {*LABEL_NAMES, *itertools.chain.from_iterable(TEXT_NAMES)}
    guessable = [
        name for name in in_file if name.lower() in usual or (name and in_file.count(name) == 1)
    ]
    names = list(dict.fromkeys([*texts, *labels, *guessable]))
    if len(names) < 2:
        read_columns(path, in_file)  # raises the error if they all have the same name
        reason = f"has only the column {in_file[0]!r}"
        raise UserError("data.columns", path, reason, _ANOTHER_COLUMN.get(suffix_of(path), _MORE))
    found = read_columns(path, names, lenient=True, lists=names).columns
    return dict(zip(names, found, strict=True))


def _guess_label(path: Path, columns: Mapping[str, Sequence[str]], texts: Sequence[str]) -> str:
    others = [name for name in columns if name not in texts]
    if len(others) == 1:
        return others[0]
    counts = {name: len(set(columns[name])) for name in others}
    named = [name for name in others if name.lower() in LABEL_NAMES]
    likely = named or [name for name in others if 1 < counts[name] <= MOST_CLASSES]
    if not likely and len(others) == 2 and not texts:
        (text,) = _guess_texts(columns, ())
        likely = [name for name in others if name != text]
    if not likely:
        raise UserError(
            "config.ambiguous",
            path,
            f"does not show which of {', '.join(columns)} is the label",
            "Name it: --label",
        )
    return min(likely, key=lambda name: counts[name])


def _guess_texts(columns: Mapping[str, Sequence[str]], labels: Sequence[str]) -> tuple[str, ...]:
    others = [name for name in columns if name not in labels]
    longest = max(others, key=lambda name: sum(map(len, columns[name])))
    return max(
        (known for known in TEXT_NAMES if set(known) <= set(others)), key=len, default=(longest,)
    )


def _guess_task(labels: Sequence[str]) -> Task:
    """Return the kind of label: sets if some are joined, numbers for fractions or many different
    values, else classes."""
    values = {word.strip() for word in labels} - {""}
    sets = [classes_of_set(value) for value in values]
    classes = {name for found in sets for name in found}
    is_joined = any(_JOINT in value for value in values)
    if is_joined and len(classes) <= max(MOST_CLASSES, len(labels) // 2):
        return "labels"
    numbers = {value for value in values if is_number(value)}
    num_words = sum(label.strip() in values - numbers for label in labels)
    if not numbers or num_words > MOST_WORDS * len(labels):
        return "classes"
    has_fractions = not all(float(value).is_integer() for value in numbers)
    return "numbers" if len(numbers) > MOST_CLASSES or has_fractions else "classes"
