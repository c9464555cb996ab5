"""Run ``mlbert finetune --from MODEL --train FILE``:
fine-tune on a file with columns, without a configuration.

OUT/run_<i>/train.csv, eval.csv    the rows to train on and those held out, if no evaluation file is
                                   given; with a tag for each word, train.jsonl and eval.jsonl
OUT/run_<i>/report.txt             scores next to the baselines, and those of each class
OUT/run_<i>/...                    the run, see `mlbert.training.experiment` and
                                   `mlbert.models.task_model`
"""

from __future__ import annotations

import csv
import functools
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.manifest import file_sha256
from mlbert.data.formats.tagged_words import read_task, write_tagged
from mlbert.data.formats.tasks import TaskForm, TaskRows, written_set
from mlbert.data.formats.tokenizer import Tokenizer, write_tokenizer
from mlbert.data.loading.tasks import encode
from mlbert.distributed.world import World
from mlbert.host.console import safe
from mlbert.host.environment import environment
from mlbert.host.errors import UserError
from mlbert.host.exit_statuses import SUCCEEDED
from mlbert.host.files import write_atomically, writing
from mlbert.host.json_files import as_json
from mlbert.host.texts import shortened
from mlbert.models import task_model
from mlbert.models.fill_mask import open_model
from mlbert.models.weights.modernbert import with_known_pooling
from mlbert.programs.custom_corpus.corpus_plan import cpu_threads
from mlbert.programs.save_on_signal import train_until_signal
from mlbert.programs.task_folder import REPORT, TaskFolder, held_folder
from mlbert.programs.task_guess import MOST_CLASSES
from mlbert.programs.task_report import joined_texts, report
from mlbert.recipes import classification
from mlbert.recipes.classification_build import balanced_weights, check_class_weights
from mlbert.recipes.sections import resolve
from mlbert.runs.progress import NO_LIMIT, Pace
from mlbert.training.run_options import RunOptions

# What a user types for the settings that errors name.
OPTIONS = {
    "INIT_CHECKPOINT": "--from",
    "DATADIR_PHASE2": "--train",
    "EVALDIR": "--eval",
    "LOGDIR": "--out",
    "LOGDIR or EXPERIMENT": "--out",
    "TEXT_COLUMNS": "--text",
    "LABEL_COLUMN": "--label",
    "MAX_SECONDS": "--minutes",
    "SKIP_BAD=1": "--skip-bad",
    "CLASS_WEIGHTS=balanced": "--class-weights",
}
HELD_OUT = 5  # one row of so many
RATE = 5e-5 * 768  # highest learning rate times hidden size
DROPOUT = 0.1  # at least: few rows are learnt by heart without it
WARMUP = 0.06  # fraction of the training
# Passes over the rows: so many that there are about UPDATES steps, within limits. With 120 rows,
# ten passes are 80 steps, and a small model has hardly begun to learn.
UPDATES = 1000
LEAST_EPOCHS = 3
MOST_EPOCHS = 80
EVALUATIONS = 10  # about as many in a run of several passes
PATIENCE = 3  # evaluations without a better one, after which training ends
SEED = 1
_MOST_NAMED = 3  # repeated rows in a warning
_MOST_TEXT = 40  # characters of a repeated row
_SETS_COLUMN = "labels"  # of the parts that are written, unless a text is called so


@dataclass(frozen=True)
class Asked:
    """Options of one call.

    Attributes:
        start: model to start from.
        train, held_out: files; without the second, a share of the training rows is held out.
        form: see `mlbert.programs.task_guess.find_form`.
        out: folder of the runs.
        seconds: training time; None trains for some passes over the rows.
        epochs: passes over the rows; None: by their number.
        patience: evaluations without a better one, after which training ends with the weights of
            the best; 0: the run ends with the last weights.
        seed: of the order of the rows, of dropout, and of new weights.
        class_weights: weigh the classes so that each has an equal share of the loss.
        tensorboard, wandb, mlflow: folder of event files, project and experiment, if any.
    """

    start: Path
    train: Path
    held_out: Path | None
    form: TaskForm
    out: Path
    seconds: float | None = None
    epochs: float | None = None
    patience: int = PATIENCE
    seed: int = SEED
    class_weights: bool = False
    tensorboard: Path | None = None
    wandb: str | None = None
    mlflow: str | None = None

    def identity(self) -> dict[str, Any]:
        """Return what a run must share with a call that continues it, JSON-able."""
        return {
            "start": str(self.start.resolve()),
            "train": file_sha256(self.train),
            "eval": None if self.held_out is None else file_sha256(self.held_out),
            "form": as_json(asdict(self.form)),
            "seconds": self.seconds,
            "epochs": self.epochs,
            "patience": self.patience,
            "seed": self.seed,
            "class_weights": self.class_weights,
        }


def finetune(asked: Asked) -> int:
    """Run the whole command and return the exit status."""
    world = World.identify(environment())
    console = Console()
    if world.world_size > 1:
        raise UserError(
            "command.launcher", "mlbert finetune --from", "runs as one process", "Start it directly"
        )
    if asked.class_weights:
        check_class_weights(asked.form)
    model, _, tokenizer = open_model(asked.start)
    rows = read_task(asked.train, asked.form)
    if asked.held_out is None:
        is_held_out = draw_held_out(rows)
    else:
        evaluation = read_task(asked.held_out, asked.form, rows.classes)
    identity = asked.identity()
    with held_folder(asked.out, identity) as folder:
        run = _Run(asked, identity, folder, world, console)
        if asked.held_out is None:
            if folder.remembered() is None:
                run.write_parts(rows, is_held_out)
            if rows.left_out:
                run.say(f"left out: {rows.left_out:,} rows of {asked.train}")
            rows, evaluation = run.read_parts()
        return run.go(rows, evaluation, model.config, tokenizer)


class _Run:
    """One call of the command, in its folder."""

    def __init__(
        self,
        asked: Asked,
        identity: dict[str, Any],
        folder: TaskFolder,
        world: World,
        console: Console,
    ) -> None:
        self._asked = asked
        self._identity = identity
        self._folder = folder
        self._world = world
        self._console = console
        self.say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
        suffix = "jsonl" if asked.form.kind == "tags" else "csv"
        self._train_part = folder.path / f"train.{suffix}"
        self._eval_part = folder.path / f"eval.{suffix}"

    def write_parts(self, rows: TaskRows, is_held_out: np.ndarray) -> None:
        """Write the rows to train on and those to evaluate on. Raises UserError if that fails."""
        with writing(self._folder.path, "Name another --out"):
            for path, chosen in ((self._train_part, ~is_held_out), (self._eval_part, is_held_out)):
                numbers = np.flatnonzero(chosen).tolist()
                if self._asked.form.kind == "tags":
                    write_tagged(path, rows, numbers)
                else:
                    self._write_table(path, rows, numbers)

    def read_parts(self) -> tuple[TaskRows, TaskRows]:
        """Return the rows to train and to evaluate on that `write_parts` wrote."""
        form = self._form_of_parts()
        rows = read_task(self._train_part, form)
        return rows, read_task(self._eval_part, form, rows.classes)

    def go(
        self, rows: TaskRows, evaluation: TaskRows, shape: BertConfig, tokenizer: Tokenizer
    ) -> int:
        """Train, or continue to, and report; return the exit status."""
        self._describe(rows, evaluation)
        notes = self._folder.remembered()
        resume = notes is not None and self._folder.has_checkpoint()
        if notes is None:
            plan = make_plan(rows, shape, tokenizer, self._asked.seconds, self._asked.epochs)
            _write_model(self._folder.path, shape, tokenizer)
            self._folder.remember({"asked": self._identity, "plan": plan})
        else:
            plan = notes["plan"]
        if resume and not self._folder.is_trained:
            self.say(f"{self._folder.path} was interrupted; resuming from its newest checkpoint")
        if not self._folder.is_trained:
            status = self._train(plan, rows, evaluation, resume)
            if status != SUCCEEDED:
                return status
        self._folder.finish()
        self._report(rows, evaluation)
        return SUCCEEDED

    def _form_of_parts(self) -> TaskForm:
        """Return the form of the files that `write_parts` writes."""
        form = self._asked.form
        if form.kind != "set":
            return form
        name = _SETS_COLUMN
        while name in form.text_columns:
            name += "_"
        return replace(form, label_column=name)

    def _write_table(self, path: Path, rows: TaskRows, numbers: Sequence[int]) -> None:
        form = self._form_of_parts()
        labels = _written_labels(rows)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*form.text_columns, form.label_column])
            for row in numbers:
                writer.writerow([*(texts[row] for texts in rows.texts), labels[row]])

    def _describe(self, rows: TaskRows, evaluation: TaskRows) -> None:
        form = self._asked.form
        names = ", ".join(rows.classes[:MOST_CLASSES])
        if form.kind == "tags":
            self.say(f"words with tags ({len(rows.classes)}: {names})")
        else:
            what = f"{len(rows.classes)} classes: {names}" if rows.classes else "numbers"
            if form.kind == "set":
                what = f"any number of {what}"
            text = ", ".join(form.text_columns)
            self.say(f"columns: text {text}; label {form.label_column} ({what})")
        self.say(f"rows: {len(rows):,} to train on, {len(evaluation):,} held out")
        for line in repeated_rows(rows, evaluation):
            self.say(f"warning: {line}")
        if self._asked.class_weights and rows.labels is not None and rows.classes:
            weights = balanced_weights(rows.labels, len(rows.classes))
            pairs = zip(rows.classes, weights, strict=True)
            self.say(f"class weights: {', '.join(f'{name} {w:.3g}' for name, w in pairs)}")

    def _train(
        self, plan: dict[str, Any], rows: TaskRows, evaluation: TaskRows, resume: bool
    ) -> int:
        asked = self._asked
        batch = plan["train_batch_size"]
        length = plan["max_seq_length"]
        rate = plan["learning_rate"]
        sizes = f"{batch} rows a step, at most {length} tokens a row"
        self.say(f"training: {sizes}, learning rate {rate:.1e}, seed {asked.seed}")
        form = self._asked.form if asked.held_out is not None else self._form_of_parts()
        values = plan | {
            "recipe": classification.RECIPE.name,
            "init_checkpoint": str(asked.start),
            "bert_config_file": self._folder.path / "bert_config.json",
            "tokenizer": str(self._folder.path),
            "precision": "auto",
            "cpu_threads": cpu_threads(),
            "seed": asked.seed,
            "input_dir": rows.path,
            "eval_dir": evaluation.path,
            "output_dir": asked.out,
            "experiment": self._folder.number,
            "text_columns": ",".join(form.text_columns),
            "label_column": form.label_column,
            "label_kind": form.kind,
            "skip_bad": form.skip_bad,
            "num_labels": max(1, len(rows.classes)),
            "resume": resume,
            "tensorboard_dir": asked.tensorboard,
            "wandb_project": asked.wandb,
            "mlflow_experiment": asked.mlflow,
        }
        if not rows.classes:
            values |= {"standardize": True, "metric": "r2"}
        if asked.class_weights:
            values["class_weights"] = "balanced"
        resolved = resolve(
            classification.RECIPE,
            {},
            given={name: (value, "finetune") for name, value in values.items()},
        )
        seconds = asked.seconds
        pace = None
        if seconds is not None:
            pace = Pace(
                seconds=seconds,
                warmup=WARMUP,
                decay=1 - WARMUP,
                evaluate_every=max(1.0, seconds / 8),
                save_every=60.0,
            )
        options = RunOptions(
            pace, mlperf_log=False, saves_last_step=True, patience=asked.patience or None
        )
        return train_until_signal(
            resolved,
            self._world,
            self._console,
            options,
            self.say,
            self._folder.has_checkpoint,
        )

    def _report(self, rows: TaskRows, evaluation: TaskRows) -> None:
        folder = self._folder.path
        form = self._asked.form
        tables, note = report(folder, form, rows, evaluation)
        partial = folder / f".{REPORT}.partial"
        with writing(folder, "Free space"), partial.open("w", encoding="utf-8") as file:
            for output in (self._console, Console(file=file, width=200)):
                output.print(*tables, safe(note), sep="\n", highlight=False)
        partial.rename(folder / REPORT)
        files = [task_model.PREDICTIONS]
        to_predict = "FILE.csv"
        if form.kind == "tags":
            to_predict = "FILE.jsonl"
            files = [task_model.TAGGED_PREDICTIONS]
        elif form.kind == "one":
            files.append(task_model.CONFUSION)
        self.say(f"{folder}: {REPORT}, {', '.join(files)}, huggingface/")
        self.say(f"next:\n  mlbert finetune --predict {to_predict} --model {folder}")


def _written_labels(rows: TaskRows) -> list[str]:
    if rows.label_lists is not None:
        return [
            written_set(rows.classes[number] for number in numbers) for numbers in rows.label_lists
        ]
    assert rows.labels is not None
    if rows.classes:
        return [rows.classes[int(label)] for label in rows.labels]
    return [str(label) for label in rows.labels]


def draw_held_out(rows: TaskRows) -> np.ndarray:
    """Return bool [N], the rows to hold out: a share of each class, or of all rows if they have
    numbers or several labels; equal texts stay together, and each label occurs in the other rows.

    Raises UserError if there are too few rows.
    """
    texts = joined_texts(rows)
    held = set[str]()
    generator = random.Random(1)
    label_of: dict[str, float] = dict.fromkeys(texts, 0.0)
    if rows.classes and rows.labels is not None:
        label_of = dict(zip(texts, rows.labels.tolist(), strict=True))
    for label in sorted(set(label_of.values())):
        members = [text for text, value in label_of.items() if value == label]
        held.update(generator.sample(members, len(members) // HELD_OUT))
    _keep_labels(rows, texts, held)
    if not held:
        reason = f"has fewer than {HELD_OUT} different texts of each class"
        raise UserError("data.too-small", rows.path, reason, "Give more rows, or --eval FILE")
    return np.array([text in held for text in texts])


def _keep_labels(rows: TaskRows, texts: Sequence[str], held: set[str]) -> None:
    """Take texts out of those held out until each label of a list occurs in the others."""
    if rows.label_lists is None:
        return
    kept: set[int] = set()
    holders: dict[int, str] = {}
    for text, numbers in zip(texts, rows.label_lists, strict=True):
        if text in held:
            holders |= dict.fromkeys(numbers, text)
        else:
            kept.update(numbers)
    for number, text in holders.items():
        if number not in kept:
            held.discard(text)


def repeated_rows(rows: TaskRows, evaluation: TaskRows) -> list[str]:
    """Return sentences that name the rows to evaluate on that are also trained on, and those to
    train on whose text has another label elsewhere. Rows without text are not compared."""
    first_line: dict[str, int] = {}
    labels: dict[str, set[str]] = defaultdict(set)
    known = _written_labels(rows) if rows.words is None else [""] * len(rows)
    for text, line, label in zip(joined_texts(rows), rows.lines, known, strict=True):
        if text.strip():
            first_line.setdefault(text, line)
            labels[text].add(label)
    found = []
    both = {
        text: line
        for text, line in zip(joined_texts(evaluation), evaluation.lines, strict=True)
        if text in first_line
    }
    if both:
        named = [
            f"{evaluation.path.name} line {line} is {rows.path.name} line {first_line[text]} "
            f"({shortened(text, _MOST_TEXT)!r})"
            for text, line in both.items()
        ]
        found.append(f"{len(both):,} texts to evaluate on are also trained on: {_some(named)}")
    if rows.classes and (several := [text for text, names in labels.items() if len(names) > 1]):
        named = [
            f"line {first_line[text]} ({shortened(text, _MOST_TEXT)!r}): "
            f"{', '.join(sorted(labels[text]))}"
            for text in several
        ]
        found.append(
            f"{len(several):,} texts of {rows.path.name} have several labels: {_some(named)}"
        )
    return found


def _some(parts: Sequence[str]) -> str:
    more = len(parts) - _MOST_NAMED
    rest = f", and {more:,} more" if more > 0 else ""
    return ", ".join(parts[:_MOST_NAMED]) + rest


def make_plan(
    rows: TaskRows,
    shape: BertConfig,
    tokenizer: Tokenizer,
    seconds: float | None,
    epochs: float | None,
) -> dict[str, Any]:
    """Return settings: length and batch for the rows, the rate for the model,
    and when to evaluate and to end.
    """
    lengths = encode(rows.first(20_000), tokenizer, 1 << 15).lengths
    longest = lengths.max() if rows.words is not None else np.quantile(lengths, 0.99)
    length = 8 * math.ceil(longest / 8)
    batch = min(16, len(rows))
    steps_per_epoch = math.ceil(len(rows) / batch)
    if epochs is None:
        epochs = max(LEAST_EPOCHS, min(MOST_EPOCHS, round(UPDATES * batch / len(rows))))
    steps = max(1, round(steps_per_epoch * epochs))
    passes_between = max(1, round(epochs / EVALUATIONS))
    interval = len(rows) * passes_between
    schedule: dict[str, Any] = {"warmup_proportion": WARMUP}
    if seconds is not None:
        steps = interval = NO_LIMIT
        schedule = {"schedule": "constant", "lr_first_step": 1, "max_seconds": seconds}
    else:
        schedule["save_checkpoint_steps"] = steps_per_epoch * passes_between
    return schedule | {
        "max_seq_length": min(length, shape.max_position_embeddings),
        "train_batch_size": batch,
        "auto_micro_batch": True,
        "learning_rate": RATE / shape.hidden_size,
        "max_steps": steps,
        "max_samples_termination": steps * batch,
        "eval_iter_start_samples": interval,
        "eval_iter_samples": interval,
    }


def _write_model(folder: Path, shape: BertConfig, tokenizer: Tokenizer) -> None:
    """Write the vocabulary and the shape to the run's folder: with dropout, and with a form of
    pooling that transformers has, too."""
    rates = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    shape = replace(shape, **{name: max(DROPOUT, getattr(shape, name)) for name in rates})
    shape = with_known_pooling(shape)
    write_tokenizer(tokenizer, folder)
    write_atomically(folder / "bert_config.json", shape.to_json())
