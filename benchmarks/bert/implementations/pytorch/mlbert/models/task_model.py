"""Write a fine-tuned model and its predictions. The run folder of a task additionally has:

weights/task.json       the task: columns, classes, length; also in huggingface/
weights/vocab.txt       its vocabulary
huggingface/config.json the classes' names as ``id2label``
predictions.csv         one line per evaluation row; with a tag for each word, predictions.conll
confusion_matrix.png    confused classes; for regression, predictions over labels
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, Strict

from mlbert.data.formats.entities import OUTSIDE, entities_of
from mlbert.data.formats.tagged_words import word_places
from mlbert.data.formats.tasks import LabelKind, TaskForm, TaskRows, written_set
from mlbert.data.formats.tokenizer import Tokenizer, load_tokenizer
from mlbert.data.loading.tasks import TaskEvalSet, encode_words
from mlbert.host.errors import UserError
from mlbert.host.files import write_atomically, writing
from mlbert.host.schema import Document, read_model
from mlbert.models.bert import (
    AnyBert,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from mlbert.models.label_lists import THRESHOLD
from mlbert.models.objectives import confusion
from mlbert.models.task_figures import draw_confusion_matrix, draw_numbers
from mlbert.models.weights.export import write_weights
from mlbert.models.weights.load import HUGGINGFACE, load_weights, shape_in_folder

TASK = "task.json"
_WEIGHTS = "weights"  # folder of a run
_REMEDY = "Name a run of mlbert finetune, such as finetuned/run_0, its weights or its huggingface"
PREDICTIONS = "predictions.csv"
TAGGED_PREDICTIONS = "predictions.conll"
CONFUSION = "confusion_matrix.png"
_BATCH = 32  # rows predicted at a time
# Columns of predictions. A text with such a name gets an underscore after it.
_OWN_COLUMNS = {"file", "row", "label", "prediction", "probability", "probabilities", "spans"}
Names = Annotated[tuple[str, ...], Strict(False)]  # a list in JSON
# A sequence's predictions: a class and its probability, a number, the probabilities of all classes,
# or the tags of its words.
Predicted = tuple[str, float] | float | list[float] | list[str]


class TaskCard(Document, extra="forbid"):
    """The task of a fine-tuned model: ``task.json``.

    ``classes`` is () for regression; ``header`` names the columns of files without a header.
    """

    text_columns: Names
    label_column: str
    classes: Names
    max_seq_length: Annotated[int, Field(ge=1, le=2**18)]
    header: Names | None = None
    lenient: bool = False
    kind: LabelKind = "one"

    @property
    def num_labels(self) -> int:
        """Return the number of the model's outputs (1 for regression)."""
        return max(1, len(self.classes))

    @property
    def form(self) -> TaskForm:
        """Return the form of the task's files."""
        classes = self.classes or None
        return TaskForm(
            self.text_columns,
            self.label_column,
            self.num_labels,
            classes,
            self.header,
            self.lenient,
            self.kind,
        )

    @property
    def problem_type(self) -> str | None:
        """Return Hugging Face's name of the loss of a sequence classifier."""
        if self.kind == "tags":
            return None
        if self.kind == "set":
            return "multi_label_classification"
        return "single_label_classification" if self.classes else "regression"


def write_task_model(
    model: AnyBert, folder: Path, facts: Mapping[str, object], card: TaskCard, tokenizer: Tokenizer
) -> None:
    """Write the weights, vocabulary and card, and the class names for Hugging Face.

    Raise UserError as `write_weights` does.
    """
    write_weights(
        model, folder, facts, tokenizer.file, card.classes, problem_type=card.problem_type
    )
    for name in (_WEIGHTS, HUGGINGFACE):
        write_card(card, folder / name)


def write_card(card: TaskCard, folder: Path) -> None:
    """Write the card next to weights. Raise UserError if that fails."""
    write_atomically(folder / TASK, json.dumps(card.model_dump(), indent=2) + "\n")


def read_card(weights: Path) -> TaskCard:
    """Return the card next to weights. Raise UserError if it is missing or damaged."""
    return read_model(TaskCard, weights / TASK, _REMEDY)


def find_task_model(path: Path) -> Path:
    """Return the folder with weights and card of a fine-tuned model.

    ``path`` is that folder, of ours or of Hugging Face, or the run folder above it. Raise UserError
    if there is none.
    """
    # A run of an earlier version has the card in weights/ only.
    of_run = [path.parent / _WEIGHTS] if path.name == HUGGINGFACE else []
    for folder in (path, path / _WEIGHTS, *of_run):
        if (folder / TASK).is_file():
            return folder
    if not path.exists():
        raise UserError("file.missing", path, "does not exist", _REMEDY)
    raise UserError("checkpoint.missing", path, f"has no fine-tuned model with its {TASK}", _REMEDY)


@torch.no_grad()
def predict(
    weights: Path,
    card: TaskCard,
    rows: TaskRows,
    device: torch.device,
    advance: Callable[[int], object],
    warn: Callable[[str], None] | None = None,
) -> list[Predicted]:
    """Return the prediction for each row.

    ``advance`` is called with the number of rows of each batch; ``warn`` as by
    `mlbert.data.loading.tasks.encode`.
    """
    shape = shape_in_folder(weights)
    if shape is None:
        reason = "has no model configuration"
        raise UserError("checkpoint.incomplete", weights, reason, "Put its config.json there")
    kind = BertForTokenClassification if card.kind == "tags" else BertForSequenceClassification
    model = kind(shape, card.num_labels)
    model.initialize(0)
    report = load_weights(model.to(device), weights)
    if report.missing:
        reason = f"lacks {min(report.missing)} of a model with {card.num_labels} labels"
        raise UserError("checkpoint.incomplete", weights, reason, _REMEDY)
    model.train(False)
    tokenizer = load_tokenizer(weights)
    batches = TaskEvalSet(
        [rows],
        tokenizer,
        max_seq_length=card.max_seq_length,
        batch_size=_BATCH,
        warn=warn,
    )
    batches.open()
    found: list[Predicted] = []
    for batch in batches:
        on_device = batch.to(device)
        logits = model(on_device, None).labels.double().cpu()
        found += _of_logits(logits, card, on_device.masked_positions, on_device.cu_seqlens)
        advance(batch.num_samples)
    if card.kind != "tags":
        return found
    return [*all_words(rows, found, tokenizer, card.max_seq_length)]  # type: ignore[arg-type]


def _of_logits(
    logits: torch.Tensor, card: TaskCard, positions: torch.Tensor, cu_seqlens: torch.Tensor
) -> Iterator[Predicted]:
    """Yield a batch's predictions from float64 logits, [S, L] or [M, L]."""
    if card.kind == "tags":
        tags = [card.classes[number] for number in logits.argmax(dim=1).tolist()]
        ends = torch.searchsorted(positions, cu_seqlens[1:].long()).tolist()
        for first, end in zip([0, *ends[:-1]], ends, strict=True):
            yield tags[first:end]
    elif card.kind == "set":
        yield from logits.sigmoid().tolist()
    elif card.classes:
        probabilities, numbers = logits.softmax(dim=1).max(dim=1)
        for number, probability in zip(numbers.tolist(), probabilities.tolist(), strict=True):
            yield card.classes[number], probability
    else:
        yield from logits[:, 0].tolist()


def all_words(
    rows: TaskRows, tags: Sequence[list[str]], tokenizer: Tokenizer, max_seq_length: int
) -> list[list[str]]:
    """Return a tag for every word: O for those that the model did not see."""
    assert rows.words is not None
    _, kept = encode_words(rows, tokenizer, max_seq_length)
    found = []
    for words, seen, of_seen in zip(rows.words, kept, tags, strict=True):
        whole = [OUTSIDE] * len(words)
        for word, tag in zip(seen, of_seen, strict=True):
            whole[word] = tag
        found.append(whole)
    return found


def write_predictions(
    path: Path, parts: Sequence[TaskRows], predicted: Sequence[Predicted], card: TaskCard
) -> None:
    """Write the predictions for the rows of all parts.

    ``.csv`` and ``.jsonl``: one line per row: its texts, label if any, prediction and
    probabilities. A row with tagged words has its entities in JSON lines. ``.conll``: a line for
    each word, with its label, if any, and its tag.

    Raises UserError if the file cannot be written.
    """
    file = io.StringIO(newline="")
    if path.suffix == ".conll":
        file.writelines(_conll_lines(parts, predicted, card))
    else:
        lines = list(_prediction_lines(parts, predicted, card, is_json=path.suffix == ".jsonl"))
        if path.suffix == ".jsonl":
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        elif lines:
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)
    with writing(path, "Name another place"):
        write_atomically(path, file.getvalue())


def _conll_lines(
    parts: Sequence[TaskRows], predicted: Sequence[Predicted], card: TaskCard
) -> Iterator[str]:
    remaining = iter(predicted)
    for part in parts:
        assert part.words is not None
        for row, words in enumerate(part.words):
            tags: Any = next(remaining)
            labels: list[str] = []
            if part.label_lists is not None:
                labels = [card.classes[number] for number in part.label_lists[row]]
            # A column for each word, also for one with a space or without a character.
            written = ["_".join(word.split()) or "_" for word in words]
            columns = [written, *([labels] if labels else []), tags]
            yield from (" ".join(fields) + "\n" for fields in zip(*columns, strict=True))
            yield "\n"


def _prediction_lines(
    parts: Sequence[TaskRows], predicted: Sequence[Predicted], card: TaskCard, is_json: bool
) -> Iterator[dict[str, Any]]:
    remaining = iter(predicted)
    names = [f"{name}_" if name in _OWN_COLUMNS else name for name in card.text_columns]
    for part in parts:
        for row in range(len(part)):
            found: Any = next(remaining)
            line: dict[str, Any] = {"file": part.path.name, "row": row + 1}
            line |= {name: texts[row] for name, texts in zip(names, part.texts, strict=True)}
            if card.kind == "tags":
                line["spans"] = _spans(part.words[row] if part.words else [], found)
            elif card.kind == "set":
                line |= _set_fields(part, row, found, card, is_json)
            elif card.classes:
                if part.labels is not None:
                    line["label"] = card.classes[int(part.labels[row])]
                line |= {"prediction": found[0], "probability": round(found[1], 6)}
            else:
                if part.labels is not None:
                    line["label"] = float(part.labels[row])
                line["prediction"] = round(found, 6)
            yield line


def _set_fields(
    part: TaskRows, row: int, probabilities: Sequence[float], card: TaskCard, is_json: bool
) -> dict[str, Any]:
    chosen = [name for name, p in zip(card.classes, probabilities, strict=True) if p >= THRESHOLD]
    fields: dict[str, Any] = {}
    if part.label_lists is not None:
        labels = [card.classes[number] for number in part.label_lists[row]]
        fields["label"] = labels if is_json else written_set(labels)
    rounded = {name: round(p, 6) for name, p in zip(card.classes, probabilities, strict=True)}
    if is_json:
        return fields | {"prediction": chosen, "probabilities": rounded}
    fields["prediction"] = written_set(chosen)
    return fields | {f"probability {name}": p for name, p in rounded.items()}


def _spans(words: Sequence[str], tags: Sequence[str]) -> list[dict[str, object]]:
    places = word_places(words)
    text = "".join(words)
    spans: list[dict[str, object]] = []
    for entity in entities_of(tags):
        start = places[entity.first][0]
        end = places[entity.end - 1][1]
        label = entity.kind or tags[entity.first]
        spans.append({"start": start, "end": end, "label": label, "text": text[start:end]})
    return spans


def draw_confusion(path: Path, predicted: np.ndarray, labels: np.ndarray, card: TaskCard) -> None:
    """Draw the confusion matrix as a PNG; for regression, predictions over labels."""
    if card.classes:
        draw_confusion_matrix(path, confusion(predicted, labels, card.num_labels), card.classes)
    else:
        draw_numbers(path, predicted, labels)
