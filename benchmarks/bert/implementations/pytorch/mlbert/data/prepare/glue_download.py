"""Write GLUE's files from Hugging Face's copy, with the package ``datasets``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from mlbert.data.formats.glue import GlueTask
from mlbert.data.formats.glue_tasks import TASKS
from mlbert.data.formats.tokenizer import hub_problem
from mlbert.data.prepare.glue_files import Row, files_of, write_file
from mlbert.host.errors import UserError, import_package

_DATASET = "nyu-mll/glue"
_SPLITS = {
    "train.tsv": "train",
    "dev.tsv": "validation",
    "dev_matched.tsv": "validation_matched",
    "dev_mismatched.tsv": "validation_mismatched",
}


def fetch(folder: Path, tasks: Iterable[str] = TASKS, say: Callable[[str], object] = print) -> None:
    """Write the tasks' files from Hugging Face's copy of GLUE, keeping existing files.

    Raises UserError: the library is not installed, or there is no network.
    """
    for name in tasks:
        task = TASKS[name]
        for path in files_of(task, folder):
            if not path.is_file():
                write_file(path, task, _dataset_rows(name, task, path))
                say(f"wrote {path}")


def _dataset_rows(name: str, task: GlueTask, path: Path) -> list[Row]:
    split = _SPLITS[path.name]
    remedy = (
        f"Copy GLUE's files there, from gluebenchmark.com/tasks or the hub's {_DATASET}, or make "
        "demonstration tasks: mlbert prepare python-glue --out DIR"
    )
    datasets = import_package("datasets", f"{_DATASET} {name}", "bert")
    if problem := hub_problem():
        reason = f"does not exist, and cannot be downloaded: {problem}"
        raise UserError("network.unreachable", path, reason, remedy)
    try:
        rows = datasets.load_dataset(_DATASET, name, split=split)
    except Exception as error:  # datasets and its HTTP libraries raise many types
        reason = f"cannot be fetched ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
        raise UserError("data.format", f"{_DATASET} {name}", reason, remedy) from None
    columns = [column for column in rows.column_names if column not in ("label", "idx")]
    labels = (
        task.classes[int(row["label"])] if task.classes else str(row["label"]) for row in rows
    )
    return [
        (tuple(row[column] for column in columns), label)
        for row, label in zip(rows, labels, strict=True)
    ]
