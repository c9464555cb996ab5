"""Run ``mlbert finetune --from MODEL --train FILE``:
fine-tune on a file with columns, without a configuration.

OUT/run_<i>/train.csv, eval.csv    the rows to train on and those held out,
                                   if no evaluation file is given
OUT/run_<i>/report.txt             scores next to the baselines, and those of each class
OUT/run_<i>/...                    the run, see `mlbert.training.experiment` and
                                   `mlbert.models.task_model`
"""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.tasks import (
    LABEL_NAMES,
    TEXT_NAMES,
    TaskForm,
    TaskRows,
    column_names,
    read_columns,
    read_evaluation,
    read_training,
)
from mlbert.data.formats.tokenizer import Tokenizer, write_tokenizer
from mlbert.data.loading.tasks import encode
from mlbert.distributed.world import World
from mlbert.host.console import new_table, safe
from mlbert.host.environment import environment
from mlbert.host.errors import UserError, install_words
from mlbert.host.exit_statuses import FAILED, SUCCEEDED, SUCCESS
from mlbert.host.files import write_atomically, writing
from mlbert.host.texts import is_number
from mlbert.models import task_model
from mlbert.models.fill_mask import open_model
from mlbert.models.objectives import class_scores, confusion, correlations
from mlbert.ops.precision import small_model_precision
from mlbert.programs.custom_corpus.corpus_plan import cpu_threads
from mlbert.recipes import classification
from mlbert.recipes.sections import resolve
from mlbert.runs.progress import NO_LIMIT, Pace
from mlbert.runs.run_folder import RunFolder
from mlbert.training.experiment import run_experiment
from mlbert.training.run_options import RunOptions

# Of a guessed label, of integers that are taken for classes, and of a printed matrix.
MOST_CLASSES = 20
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
}
HELD_OUT = 5  # one row of so many
RATE = 5e-5 * 768  # highest learning rate times hidden size
DROPOUT = 0.1  # at least: few rows are learnt by heart without it
WARMUP = 0.06  # fraction of the training


def finetune(
    start: Path,
    train: Path,
    held_out: Path | None,
    form: TaskForm,
    seconds: float | None,
    out: Path,
) -> int:
    """Run the whole command and return the exit status.

    Args:
        start: model to start from.
        train, held_out: files; without the second, a share of the training rows is held out.
        form: see `find_form`.
        seconds: training time; None trains for some passes over the rows.
        out: folder of the runs.
    """
    world = World.identify(environment())
    console = Console()
    if world.world_size > 1:
        raise UserError(
            "command.launcher", "mlbert finetune --from", "runs as one process", "Start it directly"
        )
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    model, _, tokenizer = open_model(start)
    rows, evaluation, number = _read_rows(train, held_out, form, out)
    folder = RunFolder.at(out, number).folder
    what = (
        f"{len(rows.classes)} classes: {', '.join(rows.classes[:MOST_CLASSES])}"
        if rows.classes
        else "numbers"
    )
    say(f"columns: text {', '.join(form.text_columns)}; label {form.label_column} ({what})")
    say(f"rows: {len(rows):,} to train on, {len(evaluation):,} held out")
    if both := set(joined_texts(rows)).intersection(joined_texts(evaluation)):
        say(f"warning: {len(both)} texts to evaluate on are also trained on")
    plan = make_plan(rows, model.config, tokenizer, seconds)
    batch, length, rate = (
        plan[name] for name in ("train_batch_size", "max_seq_length", "learning_rate")
    )
    say(f"training: {batch} rows a step, at most {length} tokens a row, learning rate {rate:.1e}")
    values = plan | {
        "recipe": classification.RECIPE.name,
        "init_checkpoint": str(start),
        "bert_config_file": _write_model(folder, model.config, tokenizer),
        "tokenizer": str(folder),
        "precision": small_model_precision(world.device),
        "cpu_threads": cpu_threads(),
        "seed": 1,
        "input_dir": rows.path,
        "eval_dir": evaluation.path,
        "output_dir": out,
        "experiment": number,
        "text_columns": ",".join(form.text_columns),
        "label_column": form.label_column,
        "num_labels": max(1, len(rows.classes)),
    }
    resolved = resolve(
        classification.RECIPE,
        {},
        given={name: (value, "finetune") for name, value in values.items()},
    )
    pace = (
        None
        if seconds is None
        else Pace(seconds, WARMUP, 1 - WARMUP, max(1.0, seconds / 8), math.inf)
    )
    outcome = run_experiment(resolved, world, console, RunOptions(pace, mlperf_log=False))
    if outcome.status != SUCCESS:
        say(f"stopped: {outcome.reason}")
        return FAILED
    tables, note = report(folder, rows, evaluation)
    with writing(folder, "Free space"), (folder / "report.txt").open("w", encoding="utf-8") as file:
        for output in (console, Console(file=file, width=200)):
            output.print(*tables, safe(note), sep="\n", highlight=False)
    say(f"{folder}: report.txt, {task_model.PREDICTIONS}, {task_model.CONFUSION}, huggingface/")
    say(f"next:\n  mlbert finetune --predict FILE.csv --model {folder}")
    return SUCCEEDED


def find_form(path: Path, text: str | None, label: str | None, as_numbers: bool | None) -> TaskForm:
    """Return which columns of a file are text and label,
    and whether the labels are classes or numbers.

    Args:
        path: the training file.
        text: column of the text, or two with a comma between them;
            None guesses by name, then by length.
        label: column of the label; None guesses by name, then by the number of different values.
        as_numbers: None infers it from the labels.

    Raises:
        UserError: as `read_columns`, or a column cannot be guessed.
    """
    texts = tuple(name.strip() for name in text.split(",")) if text else ()
    if label in texts:
        raise UserError(
            "config.conflict", f"--label {label}", "is also the text", "Name two different columns"
        )
    given = [*texts, *([label] if label else [])]
    in_file = column_names(path)
    # Two columns of one name are an error only if that name is given, or would be guessed.
    usual = {*LABEL_NAMES, *itertools.chain.from_iterable(TEXT_NAMES)}
    guessable = [
        name for name in in_file if name.lower() in usual or (name and in_file.count(name) == 1)
    ]
    names = list(dict.fromkeys([*given, *guessable]))
    if len(names) < 2:
        read_columns(path, in_file)  # raises the error if they all have the same name
        raise UserError(
            "data.columns",
            path,
            f"has only the column {in_file[0]!r}",
            "Separate columns by commas",
        )
    columns = dict(zip(names, read_columns(path, names).columns, strict=True))
    counts = {name: len(set(values)) for name, values in columns.items() if name not in texts}
    if label is None:
        named = [name for name in counts if name.lower() in LABEL_NAMES]
        likely = named or [name for name, count in counts.items() if 1 < count <= MOST_CLASSES]
        if not likely:
            raise UserError(
                "config.ambiguous",
                path,
                f"which of {', '.join(names)} is the label?",
                "Name it: --label",
            )
        label = min(likely, key=lambda name: counts[name])
    if not texts:
        others = [name for name in names if name != label]
        longest = max(others, key=lambda name: sum(map(len, columns[name])))
        texts = max(
            (known for known in TEXT_NAMES if set(known) <= set(others)),
            key=len,
            default=(longest,),
        )
    if as_numbers is None:  # fractions, or many different values
        values = {word.strip() for word in columns[label]}
        as_numbers = all(map(is_number, values)) and (
            len(values) > MOST_CLASSES or not all(float(value).is_integer() for value in values)
        )
    if not as_numbers and counts[label] > max(MOST_CLASSES, len(columns[label]) // 2):
        reason = f"{label!r} has {counts[label]} different values in {len(columns[label])} rows"
        raise UserError(
            "data.labels", path, reason, "Name another column with --label, or give --numbers"
        )
    return TaskForm(texts, label, 1 if as_numbers else None)


def _read_rows(
    train: Path, held_out: Path | None, form: TaskForm, out: Path
) -> tuple[TaskRows, TaskRows, int]:
    """Return the rows to train and to evaluate on, and the number of the run, whose folder is
    created in ``out``; rows that are drawn are written there. Raises UserError as `read_training`
    and `read_evaluation`.
    """
    rows = read_training(train, form)
    evaluation = read_evaluation(held_out or train, form, rows.classes)
    is_held_out = draw_held_out(rows) if held_out is None else np.ones(0, bool)
    with writing(out, "Name another --out"):
        number = _new_run(out)
        folder = RunFolder.at(out, number).folder
        if held_out is not None:
            return rows, evaluation, number
        header = [*form.text_columns, form.label_column]
        lines = list(zip(*read_columns(train, header).columns, strict=True))
        for name, chosen in (("train.csv", ~is_held_out), ("eval.csv", is_held_out)):
            with (folder / name).open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([header, *itertools.compress(lines, chosen)])
    rows = read_training(folder / "train.csv", form)
    return rows, read_evaluation(folder / "eval.csv", form, rows.classes), number


def _new_run(out: Path) -> int:
    """Create the folder of the next run, and return its number.

    Another process may be doing the same.
    """
    number = 0
    while True:
        with contextlib.suppress(FileExistsError):
            RunFolder.at(out, number).folder.mkdir(parents=True)
            return number
        number += 1


def joined_texts(rows: TaskRows) -> list[str]:
    """Return the text of each row, pairs joined."""
    return [" ".join(parts) for parts in zip(*rows.texts, strict=True)]


def draw_held_out(rows: TaskRows) -> np.ndarray:
    """Return bool [N], the rows to hold out: a share of each class; equal texts stay together.

    Raises UserError if there are too few rows.
    """
    assert rows.labels is not None
    texts = joined_texts(rows)
    held = set[str]()
    generator = random.Random(1)
    label_of = (
        dict(zip(texts, rows.labels.tolist(), strict=True))
        if rows.classes
        else dict.fromkeys(texts, 0.0)
    )
    for label in sorted(set(label_of.values())):
        members = [text for text, value in label_of.items() if value == label]
        held.update(generator.sample(members, len(members) // HELD_OUT))
    if not held:
        reason = f"has fewer than {HELD_OUT} different texts of each class"
        raise UserError("data.too-small", rows.path, reason, "Give more rows, or --eval FILE")
    return np.array([text in held for text in texts])


def make_plan(
    rows: TaskRows, shape: BertConfig, tokenizer: Tokenizer, seconds: float | None
) -> dict[str, Any]:
    """Return settings: length and batch for the rows, the rate for the model,
    and when to evaluate and to end.
    """
    length = 8 * math.ceil(
        np.quantile(encode(rows.first(20_000), tokenizer, 1 << 15).lengths, 0.99) / 8
    )
    batch = min(16, len(rows))
    interval = len(rows)
    # 3 to 10 passes.
    steps = math.ceil(len(rows) / batch) * max(3, min(10, round(1000 * batch / len(rows))))
    schedule: dict[str, Any] = {"warmup_proportion": WARMUP}
    if seconds is not None:
        steps = interval = NO_LIMIT
        schedule = {"schedule": "constant", "lr_first_step": 1, "max_seconds": seconds}
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


def _write_model(folder: Path, shape: BertConfig, tokenizer: Tokenizer) -> Path:
    """Write the vocabulary and the shape, with dropout, to the run's folder;
    return the file of the shape.
    """
    rates = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    shape = replace(shape, **{name: max(DROPOUT, getattr(shape, name)) for name in rates})
    write_tokenizer(tokenizer, folder)
    write_atomically(folder / "bert_config.json", shape.to_json())
    return folder / "bert_config.json"


def report(folder: Path, train: TaskRows, evaluation: TaskRows) -> tuple[list[Table], str]:
    """Return the scores of a finished run next to the baselines, those of each class,
    and a note.
    """
    labels = evaluation.labels
    classes = train.classes
    assert labels is not None
    found, note = baselines(train, evaluation)
    (words,) = read_columns(folder / task_model.PREDICTIONS, ["prediction"]).columns
    found["this model"] = np.array(
        [classes.index(word) if classes else float(word) for word in words]
    )
    tables = [
        new_table(
            "held-out rows", [""], ["accuracy", "mean F1"] if classes else ["RMSE", "Spearman"]
        )
    ]
    for name, values in found.items():
        tables[0].add_row(
            safe(name), *(f"{score:.4f}" for score in _scores(values, labels, len(classes)))
        )
    if classes:
        counts = confusion(found["this model"], labels, len(classes))
        names = [safe(name) for name in classes]
        scores = class_scores(counts)
        of_class = new_table("classes", [""], [*scores, "rows"])
        matrix = new_table("label (line) and prediction (column)", [""], names)
        for i, name in enumerate(names):
            of_class.add_row(
                name, *(f"{score[i]:.4f}" for score in scores.values()), str(counts[i].sum())
            )
            matrix.add_row(name, *map(str, counts[i]))
        tables.append(of_class)
        if len(classes) <= MOST_CLASSES:
            tables.append(matrix)
    return tables, note


def _scores(predicted: np.ndarray, labels: np.ndarray, num_classes: int) -> tuple[float, float]:
    """Return accuracy and mean F1 of the classes that occur;
    for numbers RMSE and Spearman's correlation.
    """
    if not num_classes:
        rmse = float(np.sqrt(np.mean((predicted - labels) ** 2)))
        return rmse, correlations(predicted, labels)["spearman"]
    counts = confusion(predicted, labels, num_classes)
    accuracy = counts.trace() / counts.sum()
    occurs = counts.sum(axis=1) > 0
    return accuracy, class_scores(counts)["F1"][occurs].mean()


def baselines(train: TaskRows, evaluation: TaskRows) -> tuple[dict[str, np.ndarray], str]:
    """Return the predictions of simple methods by name, and a note on what is missing."""
    assert train.labels is not None
    most = np.bincount(train.labels.astype(int)).argmax() if train.classes else 0
    name, value = (
        (train.classes[most], most) if train.classes else ("the mean", train.labels.mean())
    )
    found = {f"always {name}": np.full(len(evaluation), value)}
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression, Ridge

        words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\w+")
        features = words.fit_transform(joined_texts(train))
    except ImportError:
        return found, f"For a TF-IDF baseline: {install_words('finetune')}"
    except ValueError as error:  # the texts have no words
        return found, f"no TF-IDF baseline: {error}"
    name, model = (
        ("logistic", LogisticRegression(max_iter=1000)) if train.classes else ("ridge", Ridge())
    )
    predicted = model.fit(features, train.labels).predict(words.transform(joined_texts(evaluation)))
    return {**found, f"TF-IDF + {name} regression": predicted}, ""
