"""Training objectives: the loss of a batch, its divisors, and the metrics of an evaluation.

A step's batch is split into micro-batches and over ranks. Each divides its sums by the counts of
the full step (scope "step"), so that the loss does not depend on the split, or by the counts of its
rank if the method averages over ranks afterwards ("rank"). An evaluation adds up float64 sums, or
gathers one row per sequence, and computes its metrics from the total.

Empty sequences, which fill a batch up to a static shape,
and labels equal to IGNORED_LABEL are ignored.

Legend: S sequences, M masked tokens, L labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mlbert.config.bert_config import BertConfig
from mlbert.config.flops import Counted
from mlbert.data.batches import IGNORED_LABEL, Batch
from mlbert.host.errors import UserError
from mlbert.models.bert import MaskedLogits, PreTrainingLogits
from mlbert.models.encoder import Keys
from mlbert.ops import api as ops

# The reference divides the summed masked-LM loss by (sum of weights + 1e-5).
MLM_DIVISOR_EPS = 1e-5
SCOPES = ("step", "rank")
CLASSIFICATION_METRICS = ("accuracy", "f1", "matthews_correlation")
REGRESSION_METRICS = ("pearson", "spearman", "r2")


class ObjectiveModel(Protocol):
    """The model interface that objectives need."""

    config: BertConfig

    def __call__(self, batch: Batch, keys: Keys | None) -> Any:
        """Return logits; ``keys`` None means evaluation."""


class _Objective:
    """Base of all objectives: the scope of the divisor's counts, and no rows."""

    num_columns = 0

    def __init__(self, scope: str) -> None:
        self.scope = known_choice("scope", scope, SCOPES)

    def rows(self, model: ObjectiveModel, batch: Batch) -> Tensor:
        """Return float64 [S, num_columns]. Called only if there are columns."""
        return torch.empty(batch.num_samples, 0, dtype=torch.float64)


class MaskedLM(_Objective):
    """Cross-entropy of the masked tokens, for models that return `MaskedLogits`.

    Metrics: "mlm_accuracy", the share of masked tokens whose most probable token is the label;
    "loss", their mean.
    """

    metric = "mlm_accuracy"
    sum_names: tuple[str, ...] = ("correct", "mlm_loss", "masked")

    def counts(self, batch: Counted) -> tuple[int, ...]:
        """Return the number of masked tokens."""
        return (batch.num_masked,)

    def divisors(self, counts: Sequence[int]) -> tuple[float, ...]:
        """Return the reference's divisor."""
        return (counts[0] + MLM_DIVISOR_EPS,)

    def loss(
        self, model: ObjectiveModel, batch: Batch, keys: Keys | None, divisors: Sequence[Tensor]
    ) -> Tensor:
        """Return the loss, a float32 scalar."""
        loss_sum, _ = self._masked(model, batch, model(batch, keys))
        return loss_sum / divisors[0]

    def sums(self, model: ObjectiveModel, batch: Batch) -> Tensor:
        """Return float64 [3] in the order of `sum_names`."""
        loss_sum, correct = self._masked(model, batch, model(batch, None))
        masked = (batch.masked_labels != IGNORED_LABEL).sum()
        return torch.stack([correct.double(), loss_sum.double(), masked.double()])

    def metrics(self, sums: Sequence[float], rows: Tensor | None) -> dict[str, float]:
        """Return the metrics of all tokens.

        Sums are divided at the end, so sharding does not change them.
        Raise UserError if nothing was masked.
        """
        correct, loss, masked = sums
        if not masked:
            reason = (
                "contains no token that could be masked: "
                "its words are [UNK] in the vocabulary, or there are none"
            )
            raise UserError(
                "data.empty",
                "the evaluation set",
                reason,
                "Give text, and the vocabulary of its language",
            )
        return {"mlm_accuracy": correct / masked, "loss": loss / masked}

    @staticmethod
    def _masked(
        model: ObjectiveModel, batch: Batch, logits: MaskedLogits | PreTrainingLogits
    ) -> tuple[Tensor, Tensor]:
        return ops.masked_cross_entropy(logits.masked, batch.masked_labels, model.config.vocab_size)


class PreTraining(MaskedLM):
    """The benchmark's loss: masked-LM plus next-sentence cross-entropy, for models that return
    `PreTrainingLogits`. Metrics are those of `MaskedLM`, without the next-sentence head.
    """

    def counts(self, batch: Counted) -> tuple[int, ...]:
        """Return the numbers of masked tokens and of sequences."""
        return batch.num_masked, batch.num_samples

    def divisors(self, counts: Sequence[int]) -> tuple[float, ...]:
        """Return the reference's divisors of the two losses."""
        return counts[0] + MLM_DIVISOR_EPS, float(counts[1])

    def loss(
        self, model: ObjectiveModel, batch: Batch, keys: Keys | None, divisors: Sequence[Tensor]
    ) -> Tensor:
        """Return the loss, a float32 scalar."""
        logits: PreTrainingLogits = model(batch, keys)
        mlm_loss_sum, _ = self._masked(model, batch, logits)
        nsp_loss_sum = F.cross_entropy(
            logits.next_sentence.float(), batch.next_sentence_labels, reduction="sum"
        )
        return mlm_loss_sum / divisors[0] + nsp_loss_sum / divisors[1]


class SequenceObjective(_Objective):
    """Base of objectives with one label per sequence, with metrics over all predictions.

    Args:
        scope: see the module docstring.
        parts: name -> number of sequences, if the set consists of several evaluations in a row.
            Names prefix the metrics, except "". None means one evaluation.

    Attributes:
        latest: float64 [sequences, num_columns], the rows of the last evaluation,
            in the order of the set.
    """

    sum_names: tuple[str, ...] = ("sequences",)
    latest: np.ndarray

    def __init__(self, scope: str, parts: Mapping[str, int] | None) -> None:
        super().__init__(scope)
        self.parts = parts

    def counts(self, batch: Counted) -> tuple[int, ...]:
        """Return the number of sequences."""
        return (batch.num_samples,)

    def divisors(self, counts: Sequence[int]) -> tuple[float, ...]:
        """Return the number of sequences."""
        return (float(counts[0]),)

    def sums(self, model: ObjectiveModel, batch: Batch) -> Tensor:
        """Return the number of sequences with tokens, float64 [1]."""
        return (batch.cu_seqlens[1:] > batch.cu_seqlens[:-1]).sum().double()[None]

    def metrics(self, sums: Sequence[float], rows: Tensor | None) -> dict[str, float]:
        """Return the metrics of each part, from its rows."""
        assert rows is not None, "these metrics need the rows"
        self.latest = rows[~rows[:, 0].isnan()].numpy()
        parts = self.parts or {"": len(self.latest)}
        assert sum(parts.values()) == len(self.latest) == sums[0], "the set has other parts"
        found: dict[str, float] = {}
        first = 0
        for name, count in parts.items():
            of_part = self._metrics_of(self.latest[first : first + count])
            found |= {
                f"{name}_{metric}" if name else metric: float(value)
                for metric, value in of_part.items()
            }
            first += count
        return found

    def _metrics_of(self, rows: np.ndarray) -> dict[str, float]:
        raise NotImplementedError


class Classification(SequenceObjective):
    """Cross-entropy with one of ``num_labels`` labels per sequence,
    for models that return `SequenceLogits`.

    Args:
        num_labels: L.
        scope: see the module docstring.
        metric: the target metric: "accuracy", "matthews_correlation",
            or for two labels "f1" of label 1.
        parts: see `SequenceObjective`.
        weights: of the labels in the training loss; None weighs all alike. The loss is still
            divided by the number of sequences.

    Metrics: all of these (0 if undefined), and "loss", the mean without weights.
    Rows: predicted label, its probability, loss, label.
    """

    num_columns = 4

    def __init__(
        self,
        num_labels: int,
        scope: str,
        metric: str,
        parts: Mapping[str, int] | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__(scope, parts)
        self.num_labels = num_labels
        self._weights = None if weights is None else torch.tensor(weights, dtype=torch.float32)
        known = CLASSIFICATION_METRICS if num_labels == 2 else CLASSIFICATION_METRICS[::2]
        self.metric = known_choice("METRIC", metric, known)

    def loss(
        self, model: ObjectiveModel, batch: Batch, keys: Keys | None, divisors: Sequence[Tensor]
    ) -> Tensor:
        """Return the loss, a float32 scalar."""
        labels, has_tokens = self._labels(batch)
        if self._weights is not None:
            self._weights = self._weights.to(labels.device)
        logits = model(batch, keys).labels.float()
        losses = F.cross_entropy(logits, labels, self._weights, reduction="none")
        return torch.where(has_tokens, losses, 0.0).sum() / divisors[0]

    def rows(self, model: ObjectiveModel, batch: Batch) -> Tensor:
        """Return float64 [S, 4]; columns as in the class docstring."""
        logits = model(batch, None).labels.float()
        labels, has_tokens = self._labels(batch)
        probability, predicted = logits.softmax(dim=1).max(dim=1)
        losses = F.cross_entropy(logits, labels, reduction="none")
        return _masked_rows(has_tokens, predicted, probability, losses, labels)

    def _metrics_of(self, rows: np.ndarray) -> dict[str, float]:
        counts = confusion(rows[:, 0], rows[:, 3], self.num_labels)
        found = {"accuracy": counts.trace() / counts.sum()}
        if self.num_labels == 2:
            found["f1"] = class_scores(counts)["F1"][1]
        found["matthews_correlation"] = _matthews_correlation(counts)
        return found | {"loss": rows[:, 2].mean()}

    @staticmethod
    def _labels(batch: Batch) -> tuple[Tensor, Tensor]:
        labels, has_tokens = _labels_of(batch)
        return torch.where(has_tokens, labels, 0.0).long(), has_tokens


class Regression(SequenceObjective):
    """Squared error of one number per sequence, for models
    that return `SequenceLogits` with one output.

    Args:
        scope: see the module docstring.
        metric: the target metric: "pearson", "spearman" or "r2".
        parts: see `SequenceObjective`.
        mean, deviation: the model's output is (number - mean) / deviation, and the loss is that of
            the output.

    Metrics: the correlations by SciPy (0 if undefined); "r2", the share of the labels' variance
    that is explained; and "loss", the mean squared error of the numbers. Rows: predicted number and
    label.
    """

    num_columns = 2

    def __init__(
        self,
        scope: str,
        metric: str,
        parts: Mapping[str, int] | None = None,
        mean: float = 0.0,
        deviation: float = 1.0,
    ) -> None:
        super().__init__(scope, parts)
        self.metric = known_choice("METRIC", metric, REGRESSION_METRICS)
        self.mean = mean
        self.deviation = deviation

    def loss(
        self, model: ObjectiveModel, batch: Batch, keys: Keys | None, divisors: Sequence[Tensor]
    ) -> Tensor:
        """Return the loss, a float32 scalar."""
        outputs, labels, has_tokens = self._pairs(model, batch, keys)
        targets = (labels - self.mean) / self.deviation
        return torch.where(has_tokens, outputs - targets, 0.0).square().sum() / divisors[0]

    def rows(self, model: ObjectiveModel, batch: Batch) -> Tensor:
        """Return float64 [S, 2]: prediction and label."""
        outputs, labels, has_tokens = self._pairs(model, batch, None)
        return _masked_rows(has_tokens, outputs * self.deviation + self.mean, labels)

    def _metrics_of(self, rows: np.ndarray) -> dict[str, float]:
        x, y = rows.T
        loss = ((x - y) ** 2).mean()
        variance = y.var()
        r2 = 1.0 - loss / variance if variance else 0.0
        return correlations(x, y) | {"r2": r2, "loss": loss}

    @staticmethod
    def _pairs(
        model: ObjectiveModel, batch: Batch, keys: Keys | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return outputs and labels, float32 [S], 0 for empty sequences,
        and which sequences have tokens.
        """
        labels, has_tokens = _labels_of(batch)
        outputs = model(batch, keys).labels.float().squeeze(1)
        return (
            torch.where(has_tokens, outputs, 0.0),
            torch.where(has_tokens, labels, 0.0),
            has_tokens,
        )


def known_choice(subject: str, choice: str, known: Sequence[str]) -> str:
    """Return the choice; raise UserError if it is unknown."""
    if choice not in known:
        raise UserError(
            "config.choice", subject, f"{choice!r} is unknown", "Use a valid one", known
        )
    return choice


def _labels_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return a task's labels, float32 [S], and which sequences have tokens."""
    assert batch.labels is not None, "this objective needs a task's labels"
    return batch.labels, batch.cu_seqlens[1:] > batch.cu_seqlens[:-1]


def _masked_rows(has_tokens: Tensor, *columns: Tensor) -> Tensor:
    """Return float64 [S, columns], NaN for empty sequences."""
    return torch.where(
        has_tokens[:, None], torch.stack([column.double() for column in columns], dim=1), torch.nan
    )


def confusion(predicted: np.ndarray, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Return int64 [L, L]: how many rows with label i are predicted as j."""
    counts = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(counts, (labels.astype(int), predicted.astype(int)), 1)
    return counts


def class_scores(counts: np.ndarray) -> dict[str, np.ndarray]:
    """Return float64 [L] of each score by name, 0 if undefined, from the counts of `confusion`."""
    hits = counts.diagonal()
    labeled = counts.sum(axis=1)
    predicted = counts.sum(axis=0)
    return {
        "precision": hits / np.maximum(predicted, 1),
        "recall": hits / np.maximum(labeled, 1),
        "F1": 2 * hits / np.maximum(labeled + predicted, 1),
    }


def _matthews_correlation(counts: np.ndarray) -> float:
    """Return the correlation of labels and predictions (R_K for more than two classes),
    0 if undefined.
    """
    total = float(counts.sum())
    labeled = counts.sum(axis=1)
    predicted = counts.sum(axis=0)
    spread = (total**2 - labeled @ labeled) * (total**2 - predicted @ predicted)
    return (total * counts.trace() - labeled @ predicted) / spread**0.5 if spread else 0.0


def correlations(predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return Pearson's and Spearman's correlation, by SciPy, 0 if undefined."""
    from scipy import stats  # takes half a second

    tests = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}
    varies = len(labels) > 1 and all(x.min() < x.max() for x in (predicted, labels))
    return {
        name: float(test(predicted, labels).statistic) if varies else 0.0
        for name, test in tests.items()
    }
