"""``sequence_classification.py YAML [name=value ...]``: fine-tune on a task.

Or predict with the result: sequence_classification.py --predict FILE --model RUN_FOLDER [--out PREDICTIONS]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from mlbert.cli import main as command_line
from mlbert.cli.pretrain import training_seconds
from mlbert.data.formats.tasks import read_texts
from mlbert.distributed.world import World
from mlbert.host.environment import environment
from mlbert.host.errors import UserError, public_names
from mlbert.host.exit_statuses import SUCCEEDED
from mlbert.models import task_model
from mlbert.programs import custom_task
from mlbert.programs.console import console_progress, new_table
from mlbert.runs.run_folder import RunFolder
from mlbert.training.config import RunConfig
from mosaic_yaml import finetuning_yaml
from mosaic_yaml.commands.main_yaml import (
    WORDS,
    Words,
    check_yaml_file,
    resolve_layer,
    run_yaml,
)
from mosaic_yaml.common_yaml import names_for_errors
from mosaic_yaml.finetuning_yaml import last_evaluation
from mosaic_yaml.nested_yaml import Leaves, read_nested

PROGRAM = "sequence_classification.py"
app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings=WORDS)
def finetune(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="YAML", help="YAML file to start from.", show_default=False),
    ] = None,
    words: Words = None,
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
    mlbert finetune --from MODEL --train FILE              from the rows alone
    mlbert finetune YAML [NAME=VALUE]...                   with every setting; also under mlbert launch or torchrun
    mlbert finetune --predict FILE --model finetuned/run_0

    Without a YAML, columns and kind of label are guessed and printed, a fifth of the rows is held out, and the run is
    in finetuned/run_0: metrics, predictions, confusion matrix, weights. FILE: .csv, .tsv, .jsonl or .json. In a YAML:

    \b
    load_path=WEIGHTS        a run folder, its weights/, a Hugging Face folder, or a Composer checkpoint
    data.train=FILE          rows to train on
    data.eval=FILE           rows to evaluate on
    data.text_columns=a,b    a text or a pair; default: by name, such as text or sentence1 and sentence2
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
            reason = "needs --model and excludes a YAML and the options of training"
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
    check_yaml_file(PROGRAM, path)
    world = World.identify(environment())
    leaves = Leaves(path, read_nested(path, words or [], finetuning_yaml.KNOWN))
    with public_names(names_for_errors(leaves, finetuning_yaml.NAMES)):
        layer = finetuning_yaml.to_settings(leaves, world.world_size, torch.cuda.is_available())
        resolved = resolve_layer(path, layer)
        status = run_yaml(leaves, layer, resolved, world)
    if status == SUCCEEDED and world.rank == 0:
        _report(RunFolder.of(resolved.config[RunConfig]).folder)
    return status


def _report(folder: Path) -> None:
    console = Console()
    table = new_table("evaluation", ["metric"], ["value"])
    for name, value in last_evaluation(folder).items():
        table.add_row(name.replace("_", " "), f"{value:.4f}")
    console.print(table)
    for name in (task_model.PREDICTIONS, task_model.CONFUSION, "weights"):
        console.print(f"{folder / name}", markup=False, highlight=False, soft_wrap=True)


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


def main() -> None:
    """Entry of benchmarks/mosaic_bert/sequence_classification.py."""
    command_line.main(["finetune", *sys.argv[1:]])
