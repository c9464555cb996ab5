"""GLUE's eight tasks (without WNLI, as usual): official files, metrics and fine-tuning settings.

Learning rates, weight decay, batch sizes, epochs and evaluation intervals are those of MosaicML's published fine-tuning
jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class GlueTask:
    """A GLUE task.

    Attributes:
        folder: its folder within GLUE's.
        evaluations: name of each evaluation -> its file; the main one has an empty name.
        columns: of the training file.
        dev_columns: of the evaluation files, if different.
        has_header: whether the first line has the column names.
        texts, label: the columns that are used.
        classes: label values in order; () for regression.
        metrics: their mean is the task's score.
        weight_decay: the decoupled rate.
        batch: sequences per step.
        eval_steps: steps between evaluations.
        after_mnli: start from the weights fine-tuned on MNLI.
    """

    folder: str
    train: str = "train.tsv"
    evaluations: Mapping[str, str]
    columns: tuple[str, ...]
    dev_columns: tuple[str, ...] | None = None
    has_header: bool = True
    texts: tuple[str, ...]
    label: str
    classes: tuple[str, ...]
    metrics: tuple[str, ...]
    learning_rate: float
    weight_decay: float
    batch: int
    epochs: int
    eval_steps: int
    after_mnli: bool = False

    @property
    def num_labels(self) -> int:
        """Number of classes; 1 for regression."""
        return max(1, len(self.classes))

    def train_file(self, glue: Path) -> Path:
        """Return the path of the training file in GLUE's folder."""
        return glue / self.folder / self.train

    def evaluation_files(self, glue: Path) -> dict[str, Path]:
        """Return the path of each evaluation's file in GLUE's folder, by name."""
        return {name: glue / self.folder / file for name, file in self.evaluations.items()}


MAX_SEQ_LENGTH = 256
_DEV = {"": "dev.tsv"}
_MNLI = (
    *("index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse"),
    *("sentence1_parse", "sentence2_parse", "sentence1", "sentence2", "label1"),
)
_STSB = ("index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2", "score")
_ENTAILMENT = ("entailment", "not_entailment")

TASKS: Mapping[str, GlueTask] = {
    "mnli": GlueTask(
        folder="MNLI",
        evaluations={"": "dev_matched.tsv", "mismatched": "dev_mismatched.tsv"},
        columns=(*_MNLI, "gold_label"),
        dev_columns=(*_MNLI, "label2", "label3", "label4", "label5", "gold_label"),
        texts=("sentence1", "sentence2"),
        label="gold_label",
        classes=("entailment", "neutral", "contradiction"),
        metrics=("accuracy", "mismatched_accuracy"),
        learning_rate=5e-5,
        weight_decay=5e-6,
        batch=48,
        epochs=3,
        eval_steps=2300,
    ),
    "rte": GlueTask(
        folder="RTE",
        evaluations=_DEV,
        columns=("index", "sentence1", "sentence2", "label"),
        texts=("sentence1", "sentence2"),
        label="label",
        classes=_ENTAILMENT,
        metrics=("accuracy",),
        learning_rate=1e-5,
        weight_decay=1e-5,
        batch=16,
        epochs=3,
        eval_steps=100,
        after_mnli=True,
    ),
    "qqp": GlueTask(
        folder="QQP",
        evaluations=_DEV,
        columns=("id", "qid1", "qid2", "question1", "question2", "is_duplicate"),
        texts=("question1", "question2"),
        label="is_duplicate",
        classes=("0", "1"),
        metrics=("accuracy", "f1"),
        learning_rate=3e-5,
        weight_decay=3e-6,
        batch=16,
        epochs=5,
        eval_steps=2000,
    ),
    "cola": GlueTask(
        folder="CoLA",
        evaluations=_DEV,
        columns=("source", "label", "mark", "sentence"),
        has_header=False,
        texts=("sentence",),
        label="label",
        classes=("0", "1"),
        metrics=("matthews_correlation",),
        learning_rate=5e-5,
        weight_decay=5e-6,
        batch=32,
        epochs=10,
        eval_steps=250,
    ),
    "mrpc": GlueTask(
        folder="MRPC",
        evaluations=_DEV,
        columns=("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"),
        texts=("#1 String", "#2 String"),
        label="Quality",
        classes=("0", "1"),
        metrics=("accuracy", "f1"),
        learning_rate=8e-5,
        weight_decay=8e-6,
        batch=32,
        epochs=10,
        eval_steps=100,
        after_mnli=True,
    ),
    "qnli": GlueTask(
        folder="QNLI",
        evaluations=_DEV,
        columns=("index", "question", "sentence", "label"),
        texts=("question", "sentence"),
        label="label",
        classes=_ENTAILMENT,
        metrics=("accuracy",),
        learning_rate=1e-5,
        weight_decay=1e-6,
        batch=16,
        epochs=10,
        eval_steps=1000,
    ),
    "sst2": GlueTask(
        folder="SST-2",
        evaluations=_DEV,
        columns=("sentence", "label"),
        texts=("sentence",),
        label="label",
        classes=("0", "1"),
        metrics=("accuracy",),
        learning_rate=3e-5,
        weight_decay=3e-6,
        batch=16,
        epochs=3,
        eval_steps=500,
    ),
    "stsb": GlueTask(
        folder="STS-B",
        evaluations=_DEV,
        columns=_STSB,
        texts=("sentence1", "sentence2"),
        label="score",
        classes=(),
        metrics=("spearman",),
        learning_rate=3e-5,
        weight_decay=3e-6,
        batch=32,
        epochs=10,
        eval_steps=200,
        after_mnli=True,
    ),
}


def score(task: str, metrics: Mapping[str, float]) -> float:
    """Return the task's score: 100 times the mean of its metrics."""
    values = [metrics[name] for name in TASKS[task].metrics]
    return 100.0 * sum(values) / len(values)
