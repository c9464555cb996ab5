"""Files in GLUE's official format: where they are, and how rows are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from mlbert.data.formats.glue import GlueTask
from mlbert.data.formats.glue_tasks import TASKS
from mlbert.data.formats.manifest import make_folder
from mlbert.host.files import write_atomically

Row = tuple[Sequence[str], str]  # texts and label


def write_file(path: Path, task: GlueTask, rows: Iterable[Row]) -> None:
    """Write one file in the official format; tabs and line breaks within texts become spaces."""
    columns = task.columns if path.name == task.train else task.dev_columns or task.columns
    lines = ["\t".join(columns)] if task.has_header else []
    for number, (texts, label) in enumerate(rows):
        values = dict(zip(task.texts, (" ".join(text.split()) for text in texts), strict=True)) | {
            task.label: label
        }
        lines.append("\t".join(values.get(column, str(number)) for column in columns))
    make_folder(path.parent)
    write_atomically(path, "\n".join(lines) + "\n")


def files_of(task: GlueTask, folder: Path) -> list[Path]:
    """Return all files of a task in GLUE's folder."""
    return [task.train_file(folder), *task.evaluation_files(folder).values()]


def is_complete(folder: Path, tasks: Iterable[str] = TASKS) -> bool:
    """Return whether the folder has every file of these tasks."""
    return all(path.is_file() for name in tasks for path in files_of(TASKS[name], folder))
