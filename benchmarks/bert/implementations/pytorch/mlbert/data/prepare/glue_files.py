"""GLUE's official files: written from rows, fetched through ``datasets``, or made of what Python's library says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from mlbert.data.formats.glue import TASKS, GlueTask
from mlbert.data.formats.manifest import make_folder
from mlbert.data.formats.tokenizer import hub_problem
from mlbert.host.errors import UserError
from mlbert.host.files import write_atomically

Row = tuple[Sequence[str], str]  # texts and label
_DATASET = "nyu-mll/glue"
_SPLITS = {"dev.tsv": "validation", "dev_matched.tsv": "validation_matched"}
_SPLITS |= {"dev_mismatched.tsv": "validation_mismatched", "train.tsv": "train"}


def write_file(path: Path, task: GlueTask, rows: Iterable[Row]) -> None:
    """One file in the official form; tabs and line breaks within texts become blanks."""
    columns = task.columns if path.name == task.train else task.dev_columns or task.columns
    lines = ["\t".join(columns)] if task.has_header else []
    for number, (texts, label) in enumerate(rows):
        values = dict(zip(task.texts, (" ".join(text.split()) for text in texts), strict=True)) | {task.label: label}
        lines.append("\t".join(values.get(column, str(number)) for column in columns))
    make_folder(path.parent)
    write_atomically(path, "\n".join(lines) + "\n")


def files_of(task: GlueTask, folder: Path) -> list[Path]:
    """All files of a task in GLUE's folder."""
    return [task.train_file(folder), *task.evaluation_files(folder).values()]


def is_complete(folder: Path, tasks: Iterable[str] = TASKS) -> bool:
    """Whether the folder has every file of these tasks."""
    return all(path.is_file() for name in tasks for path in files_of(TASKS[name], folder))


def fetch(folder: Path, tasks: Iterable[str] = TASKS, tell: Callable[[str], object] = print) -> None:
    """Writes the tasks' files from Hugging Face's copy of GLUE; those that are there stay. Raises UserError: no such
    library, or no network."""
    for name in tasks:
        task = TASKS[name]
        for path in files_of(task, folder):
            if not path.is_file():
                write_file(path, task, _dataset_rows(name, task, _SPLITS[path.name]))
                tell(f"wrote {path}")


def _dataset_rows(name: str, task: GlueTask, split: str) -> list[Row]:
    remedy = "Download GLUE's official files, or make demonstration tasks: mlbert prepare python-glue --out DIR"
    try:
        import datasets
    except ImportError:
        raise UserError("package.missing", "datasets", "is not installed", "pip install 'mlbert[bert]'") from None
    if problem := hub_problem():
        raise UserError("network.unreachable", f"{_DATASET} {name}", f"cannot be fetched: {problem}", remedy)
    try:
        rows = datasets.load_dataset(_DATASET, name, split=split)
    except Exception as error:  # its own classes, and those of what it fetches with
        reason = f"cannot be fetched ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
        raise UserError("data.format", f"{_DATASET} {name}", reason, remedy) from None
    columns = [column for column in rows.column_names if column not in ("label", "idx")]
    return [(tuple(row[column] for column in columns), _label(task, row["label"])) for row in rows]


def _label(task: GlueTask, value: float) -> str:
    return task.classes[int(value)] if task.classes else str(value)


def write_tasks(folder: Path, made: Mapping[str, Mapping[str, Iterable[Row]]]) -> None:
    """Task -> file -> rows, into GLUE's folder."""
    for name, files in made.items():
        for file, rows in files.items():
            write_file(folder / TASKS[name].folder / file, TASKS[name], rows)
