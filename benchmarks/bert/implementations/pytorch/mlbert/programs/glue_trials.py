"""Hyper-parameters of a fine-tuning on GLUE, and the scores of a published model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# The order of the columns in tables of papers.
_COLUMNS = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")


@dataclass(frozen=True)
class Trial:
    """Hyper-parameters of one fine-tuning; the decay is the decoupled rate."""

    learning_rate: float
    weight_decay: float
    epochs: int

    @property
    def name(self) -> str:
        """The name of a trial's folder."""
        return f"lr={self.learning_rate:g}_wd={self.weight_decay:g}_ep={self.epochs}"


@dataclass(frozen=True)
class PublishedScores:
    """A published model's scores on the development sets, by task."""

    model: str
    scores: Mapping[str, float]

    @classmethod
    def of_row(cls, model: str, row: Sequence[float]) -> PublishedScores:
        """Return the scores in a row of a paper's table: CoLA, SST-2, MRPC, STS-B, QQP, MNLI, QNLI,
        RTE.
        """
        return cls(model, dict(zip(_COLUMNS, row, strict=True)))

    @property
    def mean(self) -> float:
        """The mean of all tasks."""
        return sum(self.scores.values()) / len(self.scores)
