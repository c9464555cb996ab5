"""What describes a task of GLUE: its official files, metrics and fine-tuning settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

_DEV = {"": "dev.tsv"}  # the evaluation files of most tasks
MAX_SEQ_LENGTH = 256  # tokens of an example, for all tasks


@dataclass(frozen=True)
class GlueTask:
    """A GLUE task.

    Attributes:
        folder: its folder within GLUE's.
        weight_decay: the decoupled rate.
        batch: sequences per step.
        eval_steps: steps between evaluations.
        columns: of the training file.
        dev_columns: of the evaluation files, if different.
        has_header: whether the first line has the column names.
        texts, label: the columns that are used.
        classes: label values in order; () for regression.
        metrics: their mean is the task's score.
        evaluations: name of each evaluation -> its file; the main one has an empty name.
        after_mnli: start from the weights fine-tuned on MNLI.
    """

    folder: str
    learning_rate: float
    weight_decay: float
    batch: int
    epochs: int
    eval_steps: int
    _: KW_ONLY
    columns: tuple[str, ...]
    dev_columns: tuple[str, ...] | None = None
    has_header: bool = True
    texts: tuple[str, ...] = ("sentence1", "sentence2")
    label: str = "label"
    classes: tuple[str, ...] = ("0", "1")
    metrics: tuple[str, ...] = ("accuracy",)
    train: str = "train.tsv"
    evaluations: Mapping[str, str] = field(default_factory=lambda: _DEV)
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
