"""``mlbert finetune``: fine-tune on rows with a text and labels, or predict with the result.

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
from mlbert.data.formats.tagged_words import read_untagged
from mlbert.data.formats.tasks import read_texts
from mlbert.host.console import console_progress
from mlbert.host.errors import UserError, public_names
from mlbert.host.exit_statuses import SUCCEEDED
from mlbert.host.files import writing
from mlbert.host.option_checks import check_at_most_one
from mlbert.host.packages import import_sibling
from mlbert.models import task_model
from mlbert.programs import custom_task
from mlbert.programs.task_guess import Task, find_form

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
        Path | None, typer.Option(metavar="FILE", help="Rows with a text and labels.")
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option("--eval", metavar="FILE", help="Rows to evaluate on.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Text, or a,b for a pair.")
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Label, or a,b,c for columns of 0 and 1."),
    ] = None,
    task: Annotated[
        Task | None,
        typer.Option(
            help="What a label is: a class, a number, several classes, or one for each word."
        ),
    ] = None,
    numbers: Annotated[
        bool | None, typer.Option("--numbers/--classes", help="The same as --task.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Training time; default: about 1,000 steps.")
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(min=0.01, max=10_000, help="Passes over the rows; default: 3 to 80."),
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Evaluations without improvement before training stops, by default "
            f"{custom_task.PATIENCE}; the best weights are kept. 0: train to the end.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=4294967295, help="Random seed; default 1.")
    ] = None,
    class_weights: Annotated[
        bool, typer.Option("--class-weights", help="Let rare classes weigh as much as others.")
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out rows without a label.")
    ] = False,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write TensorBoard's event files.")
    ] = None,
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Log to Weights & Biases.")
    ] = None,
    mlflow: Annotated[str | None, typer.Option(metavar="EXPERIMENT", help="Log to MLflow.")] = None,
    predict: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Predict these rows with --model.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="For --predict: a run, its weights or huggingface."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Run folders, or a file for predictions.")
    ] = None,
) -> int:
    """Fine-tune a model on rows with a text and labels, or predict with a fine-tuned one.

    \b
    mlbert finetune --from MODEL --train FILE     from the rows alone
    mlbert finetune YAML [NAME=VALUE]...          with every setting; also
                                                  under mlbert launch, torchrun
    mlbert finetune --predict FILE --model finetuned/run_0

    Without a YAML, columns and kind of label are guessed and printed, a fifth of the rows is held
    out, and the run is in finetuned/run_0: metrics, predictions, report, weights, and a folder for
    transformers. After Ctrl-C, the same command resumes. FILE: .csv, .tsv, .jsonl, .json, .parquet,
    or .conll. Several labels of a row are a list, a|b, or columns of 0 and 1. A tag for each word,
    such as named entities, is in .conll files, or in JSON with words and tags or text and spans.
    In a YAML:

    \b
    load_path=WEIGHTS        a run folder, its weights/, a Hugging Face folder,
                             or a Composer checkpoint
    data.train=FILE          rows to train on
    data.eval=FILE           rows to evaluate on
    data.text_columns=a,b    a text or a pair; default: by name,
                             such as text or sentence1 and sentence2
    data.label_column=NAME   default: label, labels or score
    model.num_labels=N       1 for a number; default: the number of classes
                             in the training file
    data.task=NAME           a GLUE task instead of files: cola mnli mrpc
                             qnli qqp rte sst2 stsb
    data.glue=FOLDER         GLUE's files
    data.source=NAME         how to create missing files: datasets, python
                             (stand-ins)

    \b
    Examples:
      mlbert finetune --from my-model/model --train reviews.csv
      mlbert finetune --from my-model/model --train names.conll --task words
      mlbert finetune --predict new.csv --model finetuned/run_0
    """
    options = [start, train, held_out, text, label, task, numbers, minutes, epochs, patience, seed]
    options += [tensorboard, wandb, mlflow]
    is_direct = class_weights or skip_bad or any(value is not None for value in options)
    if predict is not None or model is not None:
        if predict is None or model is None or path is not None or is_direct:
            reason = "needs --model, and cannot be combined with a YAML file or training options"
            raise UserError(
                "config.conflict", "--predict", reason, "Write --predict FILE --model RUN"
            )
        with public_names({"INIT_CHECKPOINT": "--model"}):
            return _predict(predict, model, out)
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
        check_at_most_one({"--minutes": minutes, "--epochs": epochs})
        with public_names(custom_task.OPTIONS):
            asked = custom_task.Asked(
                start=start,
                train=train,
                held_out=held_out,
                form=find_form(train, text, label, _kind_of(task, numbers), skip_bad),
                out=out or Path("finetuned"),
                seconds=seconds,
                epochs=epochs,
                patience=custom_task.PATIENCE if patience is None else patience,
                seed=custom_task.SEED if seed is None else seed,
                class_weights=class_weights,
                tensorboard=tensorboard,
                wandb=wandb,
                mlflow=mlflow,
            )
            return custom_task.finetune(asked)
    if path is None:
        raise UserError(
            "config.missing",
            "mlbert finetune",
            "needs a model and rows, or a YAML file",
            "Write mlbert finetune --from MODEL --train FILE",
        )
    status: int = import_sibling(YAML_PROGRAM).finetune(path, words or [])
    return status


def _kind_of(task: Task | None, numbers: bool | None) -> Task | None:
    """Return the kind of label of the two options. Raise UserError if they contradict."""
    if numbers is None:
        return task
    other: Task = "numbers" if numbers else "classes"
    if task not in (None, other):
        raise UserError(
            "config.conflict", f"--{other} and --task {task}", "differ", "Give one of them"
        )
    return other


def _predict(file: Path, model: Path, out: Path | None) -> int:
    weights = task_model.find_task_model(model)
    card = task_model.read_card(weights)
    known = (".conll", ".jsonl") if card.kind == "tags" else (".csv", ".jsonl")
    if out is None:
        out = Path(task_model.PREDICTIONS).with_suffix(known[0])
    if out.suffix not in known:
        either = " nor ".join(known)
        raise UserError(
            "config.value", out, f"is neither {either}", f"Name a {' or '.join(known)} file"
        )
    _check_place(out, file)
    rows = read_untagged(file, card.form) if card.kind == "tags" else read_texts(file, card.form)
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


def _check_place(out: Path, file: Path) -> None:
    """Create the folder for the predictions before predicting. Raise UserError if the
    predictions would replace the file to predict, or cannot be written.
    """
    if out.exists() and file.exists() and out.samefile(file):
        raise UserError("config.conflict", f"--out {out}", "is the file to predict", "Name another")
    if out.is_dir():
        raise UserError("file.wrong-kind", out, "is a folder", "Name a file")
    with writing(out.parent, "Name another --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
