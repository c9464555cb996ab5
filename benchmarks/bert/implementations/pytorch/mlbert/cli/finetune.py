"""``mlbert finetune``: fine-tune on rows with a text and a label, or predict with the result.

With a YAML as the first argument it is MosaicML's ``sequence_classification.py``: then it runs
`mosaic_yaml.commands.sequence_classification`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from mlbert.cli.pretrain import training_seconds
from mlbert.data.formats.tasks import read_texts
from mlbert.host.console import console_progress
from mlbert.host.errors import UserError, public_names
from mlbert.host.exit_statuses import SUCCEEDED
from mlbert.host.packages import import_sibling
from mlbert.models import task_model
from mlbert.programs import custom_task

PROGRAM = "sequence_classification.py"
YAML_PROGRAM = "mosaic_yaml.commands.sequence_classification"
# Unknown options become words, so that the YAML program can report them.
WORDS = {"ignore_unknown_options": True}
app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings=WORDS)
def finetune(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="YAML", help="YAML file to start from.", show_default=False),
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUE", help="Override values of the file.", show_default=False
        ),
    ] = None,
    start: Annotated[
        Path | None, typer.Option("--from", metavar="MODEL", help="Model to start from.")
    ] = None,
    train: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rows with a text and a label.")
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option("--eval", metavar="FILE", help="Rows to evaluate on.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Text, or a,b for a pair.")
    ] = None,
    label: Annotated[str | None, typer.Option(metavar="COLUMN", help="Label.")] = None,
    numbers: Annotated[
        bool | None, typer.Option("--numbers/--classes", help="What the labels are.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Training time; default: 3 to 10 passes.")
    ] = None,
    predict: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Predict these rows with --model.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="RUN", help="For --predict: a run folder or weights.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Run folders, or a file for predictions.")
    ] = None,
) -> int:
    """Fine-tune a model on rows with a text and a label, or predict with a fine-tuned one.

    \b
    mlbert finetune --from MODEL --train FILE     from the rows alone
    mlbert finetune YAML [NAME=VALUE]...          with every setting, also under mlbert launch or
                                                  torchrun
    mlbert finetune --predict FILE --model finetuned/run_0

    Without a YAML, columns and kind of label are guessed and printed, a fifth of the rows is held
    out, and the run is in finetuned/run_0: metrics, predictions, confusion matrix, weights. FILE:
    .csv, .tsv, .jsonl or .json. In a YAML:

    \b
    load_path=WEIGHTS        a run folder, its weights/, a Hugging Face folder,
                             or a Composer checkpoint
    data.train=FILE          rows to train on
    data.eval=FILE           rows to evaluate on
    data.text_columns=a,b    a text or a pair; default:
                             by name, such as text or sentence1 and sentence2
    data.label_column=NAME   default: label, labels or score
    model.num_labels=N       1 for a number; default: the number of classes in the training file
    data.task=NAME           a GLUE task instead of files: cola mnli mrpc qnli qqp rte sst2 stsb
    data.glue=FOLDER         GLUE's files
    data.source=NAME         how to create missing files: datasets, python (stand-ins)
    """
    is_direct = any(
        value is not None for value in (start, train, held_out, text, label, numbers, minutes)
    )
    if predict is not None or model is not None:
        if predict is None or model is None or path is not None or is_direct:
            reason = "needs --model, and cannot be combined with a YAML file or training options"
            raise UserError(
                "config.conflict", "--predict", reason, "Write --predict FILE --model RUN"
            )
        with public_names({"INIT_CHECKPOINT": "--model"}):
            return _predict(predict, model, out or Path(task_model.PREDICTIONS))
    if is_direct:
        if start is None or train is None or path is not None:
            reason = "must be given together, without a YAML"
            raise UserError(
                "config.conflict",
                "--from and --train",
                reason,
                "Write --from MODEL --train FILE.csv",
            )
        seconds = None if minutes is None else training_seconds(minutes, None)
        with public_names(custom_task.OPTIONS):
            form = custom_task.find_form(train, text, label, numbers)
            folder = out or Path("finetuned")
            return custom_task.finetune(start, train, held_out, form, seconds, folder)
    if path is None:
        raise UserError(
            "config.missing",
            PROGRAM,
            "needs a YAML file",
            f"Write {PROGRAM} yamls/... [name=value ...]",
        )
    status: int = import_sibling(YAML_PROGRAM).finetune(path, words or [])
    return status


def _predict(file: Path, model: Path, out: Path) -> int:
    if out.suffix not in (".csv", ".jsonl"):
        raise UserError(
            "config.value", out, "is neither .csv nor .jsonl", "Name a .csv or .jsonl file"
        )
    weights = model / "weights" if (model / "weights").is_dir() else model
    card = task_model.read_card(weights)
    rows = read_texts(file, card.form)
    console = Console(stderr=True)

    def warn(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    for line in rows.warnings:
        warn(line)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with console_progress(console).task("predicting", len(rows), "rows") as advance:
        found = task_model.predict(weights, card, rows, device, advance, warn)
    task_model.write_predictions(out, [rows], found, card)
    print(f"wrote {len(rows)} predictions to {out}")
    return SUCCEEDED
