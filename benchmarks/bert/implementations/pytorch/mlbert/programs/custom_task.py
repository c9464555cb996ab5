"""Run ``mlbert finetune --from MODEL --train FILE``: fine-tune on a file with columns, without a configuration.

OUT/run_<i>/train.csv, eval.csv    the rows to train on and those held out, if no evaluation file is given
OUT/run_<i>/report.txt             scores next to the baselines, and those of each class
OUT/run_<i>/...                    the run, see `mlbert.training.experiment` and `mlbert.models.task_model`
"""

from __future__ import annotations

import csv
import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console, RenderableType

from mlbert.config.bert_config import BertConfig
from mlbert.config.resolution import resolve
from mlbert.config.section import parse_number
from mlbert.data.formats.manifest import write_json
from mlbert.data.formats.tasks import TaskForm, TaskRows, column_names, read_columns, read_evaluation, read_training
from mlbert.data.formats.tokenizer import TOKENIZER_CONFIG, VOCAB_FILE, Tokenizer
from mlbert.data.loading.tasks import encode
from mlbert.distributed.lifecycle import FAILED, SUCCEEDED, SUCCESS
from mlbert.distributed.world import World
from mlbert.host.environment import environment
from mlbert.host.errors import UserError
from mlbert.host.files import write_atomically, writing
from mlbert.models import task_model
from mlbert.models.fill_mask import open_model
from mlbert.models.objectives import class_scores, confusion, correlations
from mlbert.models.weights.huggingface import MODELING
from mlbert.ops.precision import small_model_precision
from mlbert.programs.console import new_table, safe
from mlbert.programs.custom_corpus.corpus_plan import cpu_threads
from mlbert.programs.mosaic.finetuning_yaml import LABEL_NAMES, TEXT_NAMES
from mlbert.recipes import classification
from mlbert.runs.progress import NO_LIMIT, Pace
from mlbert.runs.run_folder import RunFolder
from mlbert.training.experiment import RunOptions, run_experiment

MOST_CLASSES = 20  # of a column that is taken for the label, or of integers that are taken for classes
HELD_OUT = 5  # one row of so many
SEED = 1
DROPOUT = 0.1  # at least: few rows are learnt by heart without it
_ORIGIN = "mlbert finetune"
_SHOWN_CLASSES = 10


@dataclass(frozen=True)
class TaskRequest:
    """Options of one call; ``as_numbers`` None infers it from the labels, ``seconds`` None trains for some passes."""

    start: Path
    train: Path
    held_out: Path | None
    text: str | None
    label: str | None
    as_numbers: bool | None
    seconds: float | None
    out: Path


def find_form(path: Path, text: str | None, label: str | None, as_numbers: bool | None) -> TaskForm:
    """Return which columns of a file are text and label, and whether the labels are classes or numbers.

    Args:
        path: the training file.
        text: column of the text, or two with a comma between them; None guesses by name, then by length.
        label: column of the label; None guesses by name, then by the number of different values.
        as_numbers: None infers it from the labels.

    Raises:
        UserError: as `read_columns`, or a column cannot be guessed.
    """
    names, texts = column_names(path), tuple(name.strip() for name in text.split(",")) if text else ()
    if len(names) < 2:
        raise UserError("data.columns", path, f"has only the column {names[0]!r}", "Separate columns by commas")
    wanted = [*texts, *([label] if label else []), *names]
    columns = dict(zip(wanted, read_columns(path, wanted).columns, strict=True))
    label = label or _guess_label(path, {name: columns[name] for name in names if name not in texts})
    others = [name for name in names if name != label]
    if not texts:
        longest = max(others, key=lambda name: sum(map(len, columns[name])))
        texts = max((pair for pair in TEXT_NAMES if set(pair) <= set(others)), key=len, default=(longest,))
    values, num_rows = columns[label], len(columns[label])
    if as_numbers is None:
        as_numbers = _are_numbers(values)
    if not as_numbers and (count := len(set(values))) > max(MOST_CLASSES, num_rows // 2):
        reason = f"{label!r} has {count} different values in {num_rows} rows"
        raise UserError("data.labels", path, reason, "Name another column with --label, or give --numbers")
    return TaskForm(texts, label, 1 if as_numbers else None)


def _guess_label(path: Path, columns: dict[str, list[str]]) -> str:
    by_name = {name.lower(): name for name in columns}
    if (found := next((by_name[name] for name in LABEL_NAMES if name in by_name), None)) is not None:
        return found
    counts = {name: len(set(values)) for name, values in columns.items()}
    fewest = min(counts, key=lambda name: counts[name], default=None)
    if fewest is None or counts[fewest] > MOST_CLASSES:
        reason = f"which of {', '.join(columns) or 'its columns'} is the label?"
        raise UserError("config.ambiguous", path, reason, "Name it: --label COLUMN")
    return fewest


def _are_numbers(words: Sequence[str]) -> bool:
    """Return True for numbers with fractions or many different values."""
    try:
        values = {parse_number(word.strip(), float) for word in words}
    except ValueError:
        return False
    return len(values) > MOST_CLASSES or any(not value.is_integer() for value in values)


def joined_texts(rows: TaskRows) -> list[str]:
    """Return the text of each row, pairs joined."""
    return [" ".join(parts) for parts in zip(*rows.texts, strict=True)]


def draw_held_out(rows: TaskRows) -> np.ndarray:
    """Return bool [N], the rows to hold out: a share of each class. Equal texts stay together; those with different
    labels are trained on. Raises UserError if there are too few rows."""
    texts = joined_texts(rows)
    assert rows.labels is not None
    labels = rows.labels.tolist() if rows.classes else [0] * len(rows)
    labels_of: dict[str, set[float]] = defaultdict(set)
    for text, label in zip(texts, labels, strict=True):
        labels_of[text].add(label)
    of_class: dict[float, list[str]] = defaultdict(list)
    for text, found in labels_of.items():
        if len(found) == 1:
            of_class[min(found)].append(text)
    generator, held = np.random.default_rng(SEED), set[str]()
    for _, members in sorted(of_class.items()):
        held.update(members[i] for i in generator.permutation(len(members))[: len(members) // HELD_OUT])
    if not held:
        reason = f"has fewer than {HELD_OUT} different texts of each class"
        raise UserError("data.too-small", rows.path, reason, "Give more rows, or --eval FILE")
    return np.array([text in held for text in texts])


def _write_rows(path: Path, rows: TaskRows, form: TaskForm, chosen: np.ndarray) -> None:
    assert rows.labels is not None
    with writing(path, "Name another --out"), path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*form.text_columns, form.label_column])
        for row in np.flatnonzero(chosen):
            label = float(rows.labels[row])
            name = rows.classes[int(label)] if rows.classes else repr(label)
            writer.writerow([*(texts[row] for texts in rows.texts), name])


@dataclass(frozen=True)
class TaskPlan:
    """Decisions made from the rows and the model.

    Attributes:
        length: tokens of a row; longer ones are cut.
        fitting: share of the rows that are not cut.
        batch: rows per step.
        passes: over the rows, unless the time is given.
        rate: learning rate at its highest.
    """

    length: int
    fitting: float
    batch: int
    passes: int
    rate: float


def make_plan(rows: TaskRows, shape: BertConfig, tokenizer: Tokenizer) -> TaskPlan:
    """Choose length and batch for the rows, and rate and passes for the model."""
    lengths = encode(rows.first(20_000), tokenizer, 1 << 15).lengths
    length = 8 * math.ceil(float(np.quantile(lengths, 0.99)) / 8)
    length = min(length, shape.max_position_embeddings)
    batch = min(len(rows), 16 if len(rows) < 10_000 else 32)
    passes = max(3, min(10, round(1000 * batch / len(rows))))
    return TaskPlan(length, float((lengths <= length).mean()), batch, passes, _rate(shape))


def _rate(shape: BertConfig) -> float:
    return 5e-5 * 768 / shape.hidden_size


_WARMUP = 0.06  # fraction of the training


def _settings(plan: TaskPlan, num_rows: int, seconds: float | None) -> dict[str, Any]:
    steps = math.ceil(num_rows / plan.batch) * plan.passes
    by_steps: dict[str, Any] = {"schedule": "linear", "warmup_steps": math.ceil(_WARMUP * steps), "end_lr": 0.0}
    by_clock: dict[str, Any] = {"schedule": "constant", "lr_first_step": 1, "max_seconds": seconds}
    limit = steps if seconds is None else NO_LIMIT
    interval = num_rows if seconds is None else 10**15
    return {
        "recipe": classification.RECIPE.name,
        "max_seq_length": plan.length,
        "train_batch_size": plan.batch,
        "auto_micro_batch": True,
        "learning_rate": plan.rate,
        "max_steps": limit,
        "max_samples_termination": limit * plan.batch,
        "eval_iter_start_samples": interval,
        "eval_iter_samples": interval,
        "seed": SEED,
        **(by_steps if seconds is None else by_clock),
    }


def finetune(asked: TaskRequest) -> int:
    """Run the whole command and return the exit status."""
    world = World.identify(environment())
    if world.world_size > 1:
        remedy = "Start it without a launcher"
        raise UserError("command.launcher", "mlbert finetune --from", "runs as one process", remedy)
    console = Console()
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    model, _, tokenizer = open_model(asked.start)
    rates = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    shape = replace(model.config, **{name: max(DROPOUT, getattr(model.config, name)) for name in rates})
    form = find_form(asked.train, asked.text, asked.label, asked.as_numbers)
    folder = _new_run(asked.out)
    train, evaluation = _read_rows(asked, form, folder)
    for line in _describe_rows(asked, form, train, evaluation):
        say(line)
    plan = make_plan(train, shape, tokenizer)
    end = f"{plan.passes} passes" if asked.seconds is None else f"{asked.seconds / 60:g} minutes"
    say(f"model: {shape.num_hidden_layers} layers x {shape.hidden_size}, {shape.num_parameters / 1e6:.1f} M parameters")
    say(f"length: {plan.length} tokens, enough for {plan.fitting:.1%} of the rows")
    say(f"training: {end}, {plan.batch} rows a step, rate {plan.rate:.1e}")
    values = _settings(plan, len(train), asked.seconds) | {
        "init_checkpoint": str(asked.start),
        **_write_model(folder, shape, tokenizer),
        "input_dir": train.path,
        "eval_dir": evaluation.path,
        "output_dir": asked.out,
        "experiment": int(folder.name.removeprefix("run_")),
        "text_columns": ",".join(form.text_columns),
        "label_column": form.label_column,
        "num_labels": max(1, len(train.classes)),
    }
    resolved = resolve(classification.RECIPE, {}, given={key: (value, _ORIGIN) for key, value in values.items()})
    seconds = asked.seconds
    pace = None if seconds is None else Pace(seconds, _WARMUP, 1 - _WARMUP, max(1.0, seconds / 8), math.inf)
    outcome = run_experiment(resolved, world, console, RunOptions(pace, mlperf_log=False))
    if outcome.status != SUCCESS:
        say(f"stopped: {outcome.reason}")
        return FAILED
    parts, path = report(folder, train, evaluation), folder / "report.txt"
    with writing(path, "Free space"), path.open("w", encoding="utf-8") as file:
        for output in (console, Console(file=file, width=100)):
            for part in parts:
                output.print(part, highlight=False)
    _say_results(folder, say)
    return SUCCEEDED


def _read_rows(asked: TaskRequest, form: TaskForm, folder: Path) -> tuple[TaskRows, TaskRows]:
    """Return the rows to train and to evaluate on, and create the run's folder; rows that are drawn are written there.
    Raises UserError as `read_training` and `read_evaluation`."""
    train = read_training(asked.train, form)
    if asked.held_out is not None:
        evaluation = read_evaluation(asked.held_out, form, train.classes)
        folder.mkdir(parents=True)
        return train, evaluation
    is_held_out = draw_held_out(train)
    folder.mkdir(parents=True)
    _write_rows(folder / "train.csv", train, form, ~is_held_out)
    _write_rows(folder / "eval.csv", train, form, is_held_out)
    train = read_training(folder / "train.csv", form)
    return train, read_evaluation(folder / "eval.csv", form, train.classes)


def _write_model(folder: Path, shape: BertConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write shape and vocabulary to the run's folder; return the settings of the model."""
    write_atomically(folder / "bert_config.json", shape.to_json())
    write_atomically(folder / VOCAB_FILE, "\n".join(tokenizer.entries) + "\n")
    write_json(folder / TOKENIZER_CONFIG, {"do_lower_case": tokenizer.lower_case})
    return {
        "precision": small_model_precision(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "cpu_threads": cpu_threads(),
        "bert_config_file": folder / "bert_config.json",
        "tokenizer": str(folder),
    }


def _new_run(out: Path) -> Path:
    folders = (RunFolder.at(out, i).folder for i in range(10_000))
    return next(folder for folder in folders if not folder.exists())


def _describe_rows(asked: TaskRequest, form: TaskForm, train: TaskRows, evaluation: TaskRows) -> Iterator[str]:
    origin = str(asked.held_out) if asked.held_out else f"one in {HELD_OUT}"
    yield f"rows: {len(train):,} to train on, {len(evaluation):,} held out ({origin})"
    assert train.labels is not None
    if train.classes:
        shares = np.bincount(train.labels.astype(int), minlength=len(train.classes)) / len(train)
        most = np.argsort(-shares, kind="stable")[:_SHOWN_CLASSES]
        names = ", ".join(f"{train.classes[i]} {shares[i]:.0%}" for i in most)
        what = f"{len(train.classes)} classes: {names}{', ...' if len(most) < len(shares) else ''}"
    else:
        what = f"numbers, {train.labels.mean():.3g} on average, standard deviation {train.labels.std():.3g}"
    yield f"columns: text {', '.join(form.text_columns)}; label {form.label_column} ({what})"
    both = set(joined_texts(train)).intersection(joined_texts(evaluation))
    if both:
        yield f"warning: {len(both)} texts to evaluate on are also trained on"
    if not train.classes and train.labels.std() + abs(train.labels.mean()) > 20:
        yield "warning: numbers of this size are learnt slowly: scale them to about 0 to 5"


def report(folder: Path, train: TaskRows, evaluation: TaskRows) -> list[RenderableType]:
    """Return the scores of a finished run next to the baselines, and those of each class."""
    labels, classes = evaluation.labels, train.classes
    (words,) = read_columns(folder / task_model.PREDICTIONS, ["prediction"]).columns
    predicted = np.array([classes.index(word) if classes else float(word) for word in words])
    assert labels is not None
    candidates, note = baselines(train, evaluation)
    table = new_table("held-out rows", [""], ["accuracy", "mean F1"] if classes else ["RMSE", "Spearman"])
    quality: dict[str, float] = {}
    for name, values in {**candidates, "this model": predicted}.items():
        if classes:
            counts = confusion(values, labels, len(classes))
            f1 = class_scores(counts)["F1"][counts.sum(axis=1) > 0].mean()
            scores = [counts.trace() / counts.sum(), f1]
            quality[name] = scores[0]
        else:
            scores = [np.sqrt(np.mean((values - labels) ** 2)), correlations(values, labels)["spearman"]]
            quality[name] = -scores[0]
        table.add_row(safe(name), *(f"{score:.4f}" for score in scores))
    best = max(candidates, key=lambda name: quality[name])
    if quality["this model"] <= quality[best]:
        note += (
            f"\n{best} does at least as well: more rows, or a model pre-trained for longer or on closer text, may help."
        )
    parts: list[RenderableType] = [table, *([safe(note.strip())] if note else [])]
    if classes:
        counts = confusion(predicted, labels, len(classes))
        of_class, matrix = (
            class_scores(counts),
            new_table("label (line) and prediction (column)", [""], [*map(safe, classes)]),
        )
        table = new_table("classes", [""], [*of_class, "rows"])
        for i, name in enumerate(classes):
            table.add_row(safe(name), *(f"{score[i]:.4f}" for score in of_class.values()), str(counts[i].sum()))
            matrix.add_row(safe(name), *map(str, counts[i]))
        parts += [table, *([matrix] if len(classes) <= _SHOWN_CLASSES else [])]
    return parts


def baselines(train: TaskRows, evaluation: TaskRows) -> tuple[dict[str, np.ndarray], str]:
    """Return the predictions of simple methods by name, and a note on what is missing."""
    assert train.labels is not None
    if train.classes:
        most = np.bincount(train.labels.astype(int)).argmax()
        found = {f"always {train.classes[most]}": np.full(len(evaluation), most)}
    else:
        found = {"always the mean": np.full(len(evaluation), train.labels.mean())}
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression, Ridge
        from sklearn.pipeline import make_pipeline
    except ImportError:
        return found, "For a TF-IDF baseline: pip install 'mlbert[finetune]'"
    name, last = ("logistic", LogisticRegression(max_iter=1000)) if train.classes else ("ridge", Ridge())
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\w+")
    try:
        fitted = make_pipeline(words, last).fit(joined_texts(train), train.labels)
    except ValueError as error:  # the texts have no words
        return found, f"no TF-IDF baseline: {error}"
    return {**found, f"TF-IDF + {name} regression": fitted.predict(joined_texts(evaluation))}, ""


def _say_results(folder: Path, say: Any) -> None:
    exported = folder / "huggingface"
    trust = ", trust_remote_code=True" if (exported / MODELING.name).exists() else ""
    for name in (task_model.PREDICTIONS, task_model.CONFUSION, "report.txt"):
        say(str(folder / name))
    say(f'AutoModelForSequenceClassification.from_pretrained("{exported}"{trust})\nnext:')
    say(f"  mlbert finetune --predict FILE.csv --model {folder}")
