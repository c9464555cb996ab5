"""``sequence_classification.py YAML [name=value ...]``: fine-tune on a task.

Or predict with the result: sequence_classification.py --predict FILE --model RUN_FOLDER [--out PREDICTIONS]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from mlbert.cli import main as command_line
from mlbert.cli.mosaic_bert.main_yaml import WORDS, Words, check_yaml_file, notes, resolve_layer
from mlbert.cli.pretrain import training_seconds
from mlbert.cli.train import run_resolved
from mlbert.data.formats.tasks import read_texts
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.distributed.lifecycle import SUCCEEDED
from mlbert.distributed.world import World
from mlbert.host.environment import environment
from mlbert.host.errors import UserError
from mlbert.models import task_model
from mlbert.programs import custom_task
from mlbert.programs.custom_task import TaskRequest
from mlbert.programs.mosaic import finetuning_yaml
from mlbert.programs.mosaic.finetuning_yaml import last_evaluation
from mlbert.programs.mosaic.nested_yaml import Leaves, read_nested
from mlbert.runs.run_folder import RunFolder
from mlbert.training.config import RunConfig

PROGRAM = "sequence_classification.py"
app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings=WORDS)
def finetune(
    path: Annotated[
        Path | None, typer.Argument(metavar="YAML", help="YAML file to start from.", show_default=False)
    ] = None,
    words: Words = None,
    start: Annotated[Path | None, typer.Option("--from", metavar="MODEL", help="Start here, without a YAML.")] = None,
    train: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For --from: rows with a text and a label.")
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option("--eval", metavar="FILE", help="Rows to evaluate on; default: a part of --train.")
    ] = None,
    text: Annotated[str | None, typer.Option(metavar="COLUMN", help="Text, or a pair: a,b; default: a guess.")] = None,
    label: Annotated[str | None, typer.Option(metavar="COLUMN", help="Label; default: a guess.")] = None,
    numbers: Annotated[
        bool | None, typer.Option("--numbers/--classes", help="What the labels are; default: by their values.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Training time; default: some passes over the rows.")] = None,
    predict: Annotated[Path | None, typer.Option(metavar="FILE", help="Predict its rows with --model.")] = None,
    model: Annotated[Path | None, typer.Option(metavar="RUN", help="For --predict: a run folder or weights.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="PATH", help="Runs (finetuned), or predictions (.csv).")] = None,
) -> int:
    """Fine-tune on a task, alone or under mlbert launch local or torchrun, or predict with a fine-tuned model.

    Write metrics, predictions, a confusion matrix and the weights to the run folder. Some names:

    \b
    load_path=WEIGHTS        a run folder, its weights/, a Hugging Face folder, or a Composer checkpoint
    data.train=FILE          .csv, .tsv, .jsonl or .json with columns
    data.eval=FILE           the same for evaluation
    data.text_columns=a,b    a text or a pair; default: by name, such as text or sentence1 and sentence2
    data.label_column=NAME   default: label, labels or score
    model.num_labels=N       1 for a number; default: the number of classes in the training file
    data.task=NAME           a GLUE task instead of files: cola mnli mrpc qnli qqp rte sst2 stsb
    data.glue=FOLDER         GLUE's files
    data.source=NAME         how to create missing files: datasets, python (stand-ins)
    """
    if predict is not None or model is not None:
        if predict is None or model is None or path is not None:
            reason = "needs --model and excludes a YAML"
            raise UserError("config.conflict", "--predict", reason, "Write --predict FILE --model RUN")
        return _predict(predict, model, out or Path(task_model.PREDICTIONS))
    if start is not None or train is not None:
        start, train = _start_and_rows(start, train, path)
        seconds = None if minutes is None else training_seconds(minutes, None)
        asked = TaskRequest(start, train, held_out, text, label, numbers, seconds, out or Path("finetuned"))
        return custom_task.finetune(asked)
    if path is None:
        raise UserError("config.missing", PROGRAM, "needs a YAML file", f"Write {PROGRAM} yamls/... [name=value ...]")
    check_yaml_file(PROGRAM, path)
    world = World.identify(environment())
    leaves = Leaves(path, read_nested(path, words or [], finetuning_yaml.KNOWN))
    resolved = resolve_layer(path, finetuning_yaml.to_settings(leaves, world.world_size, torch.cuda.is_available()))
    status = run_resolved(resolved, world, notes(leaves))
    if status == SUCCEEDED and world.rank == 0:
        _report(resolved.config[RunConfig])
    return status


def _start_and_rows(start: Path | None, train: Path | None, path: Path | None) -> tuple[Path, Path]:
    if start is None or train is None or path is not None:
        reason = "need each other and exclude a YAML and other words"
        raise UserError("config.conflict", "--from and --train", reason, "Write --from MODEL --train FILE.csv")
    return start, train


def _report(config: RunConfig) -> None:
    folder = RunFolder.of(config).folder
    console = Console()
    console.print(metrics_table(last_evaluation(folder)))
    for name in (task_model.PREDICTIONS, task_model.CONFUSION, "weights"):
        console.print(f"{folder / name}", markup=False, highlight=False, soft_wrap=True)


def metrics_table(metrics: Mapping[str, float]) -> Table:
    """Return a table with the metrics of an evaluation, one per line."""
    table = Table(title="evaluation")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        table.add_row(name.replace("_", " "), f"{value:.4f}")
    return table


def _predict(file: Path, model: Path, out: Path) -> int:
    if out.suffix not in (".csv", ".jsonl"):
        raise UserError("config.value", out, "is neither .csv nor .jsonl", "Name a .csv or .jsonl file")
    weights = model / "weights" if (model / "weights").is_dir() else model
    card = task_model.read_card(weights)
    rows = read_texts(file, card.form)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = task_model.predict(weights, card, rows, load_tokenizer(weights), device)
    task_model.write_predictions(out, [rows], found, card)
    print(f"wrote {len(rows)} predictions to {out}")
    return SUCCEEDED


def main() -> None:
    """Entry of benchmarks/mosaic_bert/sequence_classification.py."""
    command_line.main(["finetune", *sys.argv[1:]])
