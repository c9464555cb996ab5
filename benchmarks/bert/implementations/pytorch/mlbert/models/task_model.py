"""Write a fine-tuned model and its predictions. The run folder of a task additionally has:

weights/task.json       the task: columns, classes, length
weights/vocab.txt       its vocabulary
huggingface/config.json the classes' names as ``id2label``
predictions.csv         one line per evaluation row
confusion_matrix.png    confused classes; for regression, predictions over labels
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, Strict

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.tasks import TaskForm, TaskRows
from mlbert.data.formats.tokenizer import Tokenizer, load_tokenizer
from mlbert.data.loading.tasks import TaskEvalSet
from mlbert.host.files import write_atomically, writing
from mlbert.host.schema import Document, read_model
from mlbert.models.bert import AnyBert, BertForSequenceClassification
from mlbert.models.objectives import confusion
from mlbert.models.weights.export import write_weights
from mlbert.models.weights.load import load_weights

TASK = "task.json"
PREDICTIONS = "predictions.csv"
CONFUSION = "confusion_matrix.png"
_BATCH = 32  # rows predicted at a time
_MOST_NAMES = 40  # classes whose names fit the axes of a figure
Names = Annotated[tuple[str, ...], Strict(False)]  # a list in JSON


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
        )


def write_task_model(
    model: AnyBert, folder: Path, facts: Mapping[str, object], card: TaskCard, tokenizer: Tokenizer
) -> None:
    """Write the weights, vocabulary and card, and the class names for Hugging Face.

    Raise UserError as `write_weights` does.
    """
    write_weights(model, folder, facts, tokenizer.file, card.classes)
    write_atomically(folder / "weights" / TASK, json.dumps(card.model_dump(), indent=2) + "\n")


def read_card(weights: Path) -> TaskCard:
    """Return the card of a ``weights/`` folder. Raise UserError if it is missing or damaged."""
    return read_model(TaskCard, weights / TASK, "Name the run folder of a fine-tuned model")


@torch.no_grad()
def predict(
    weights: Path,
    card: TaskCard,
    rows: TaskRows,
    device: torch.device,
    advance: Callable[[int], object],
    warn: Callable[[str], None] | None = None,
) -> np.ndarray:
    """Return float64 [N, 2] for the rows: class and its probability,
    or number and NaN for regression.

    ``advance`` is called with the number of rows of each batch; ``warn`` as by
    `mlbert.data.loading.tasks.encode`.
    """
    model = BertForSequenceClassification(
        BertConfig.from_json(weights / "bert_config.json"), card.num_labels
    )
    model.initialize(0)
    load_weights(model.to(device), weights)
    model.train(False)
    batches = TaskEvalSet(
        [rows],
        load_tokenizer(weights),
        max_seq_length=card.max_seq_length,
        batch_size=_BATCH,
        warn=warn,
    )
    batches.open()
    found = []
    for batch in batches:
        logits = model(batch.to(device), None).labels.double()
        if card.classes:
            probability, number = logits.softmax(dim=1).max(dim=1)
            found.append(torch.stack([number.double(), probability], dim=1).cpu())
        else:
            found.append(torch.cat([logits, torch.full_like(logits, torch.nan)], dim=1).cpu())
        advance(len(logits))
    return torch.cat(found).numpy()


def write_predictions(
    path: Path, parts: Sequence[TaskRows], predicted: np.ndarray, card: TaskCard
) -> None:
    """Write one line per row: its texts, label if any, prediction and the class's probability.

    The suffix selects JSON lines (.jsonl) or CSV.

    Args:
        path: to write.
        parts: the files, in order.
        predicted: float64 [N, 2], see `predict`.
        card: of the model.

    Raises:
        UserError: the file cannot be written.
    """
    lines = list(_prediction_lines(parts, predicted, card))
    with writing(path, "Name another place"), path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        elif lines:
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)


def _prediction_lines(
    parts: Sequence[TaskRows], predicted: np.ndarray, card: TaskCard
) -> Iterator[dict[str, str | float]]:
    first = 0
    for part in parts:
        for row in range(len(part)):
            value, probability = predicted[first + row]
            line: dict[str, str | float] = {"file": part.path.name, "row": row + 1}
            line |= {
                name: texts[row] for name, texts in zip(card.text_columns, part.texts, strict=True)
            }
            if part.labels is not None:
                label = float(part.labels[row])
                line["label"] = card.classes[int(label)] if card.classes else label
            if card.classes:
                line |= {
                    "prediction": card.classes[int(value)],
                    "probability": round(float(probability), 6),
                }
            else:
                line["prediction"] = round(float(value), 6)
            yield line
        first += len(part)


def draw_confusion(path: Path, predicted: np.ndarray, labels: np.ndarray, card: TaskCard) -> None:
    """Draw the confusion matrix as a PNG; for regression, predictions over labels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 5), layout="constrained")
    if card.classes:
        counts = confusion(predicted, labels, card.num_labels)
        share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        figure.colorbar(
            axes.imshow(share, vmin=0, vmax=1, cmap="Blues"), label="share of the label's rows"
        )
        if card.num_labels <= _MOST_NAMES:
            places = range(card.num_labels)
            axes.set_xticks(places, card.classes, rotation=45, ha="right")
            axes.set_yticks(places, card.classes)
            for i, j in np.ndindex(counts.shape):
                color = "white" if share[i, j] > 0.5 else "black"
                axes.text(j, i, str(counts[i, j]), ha="center", va="center", color=color)
        axes.set(xlabel="prediction", ylabel="label")
    else:
        axes.plot(labels, predicted, ".", markersize=4)
        axes.set(xlabel="label", ylabel="prediction")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
