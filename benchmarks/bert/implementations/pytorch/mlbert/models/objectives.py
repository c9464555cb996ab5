"""What a model is trained for: the loss of a batch, what a step's losses are divided by, the metrics of an evaluation.

A step's batch is spread over micro-batches and ranks. Each computes sums and divides them by counts of the whole step
(scope "step"), so that any split adds up to the same loss, or by the counts of its own rank where a method averages
over ranks afterwards ("rank"). An evaluation adds up float64 sums, and its metrics are made of the total.

Sequences without tokens, which fill a batch up to fixed sizes, take no part, nor do labels that are IGNORED_LABEL.

Legend: S sequences, M masked tokens, L labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from mlbert import ops
from mlbert.core.bert_config import BertConfig
from mlbert.core.errors import UserError
from mlbert.feed.batch import IGNORED_LABEL, Batch
from mlbert.models import metrics
from mlbert.models.bert import MaskedLogits, PreTrainingLogits, SequenceLogits
from mlbert.models.encoder import Keys
from mlbert.models.flops import Counted

# The reference divides the summed masked-LM loss by (sum of weights + 1e-5).
MLM_DIVISOR_EPS = 1e-5
SCOPES = ("step", "rank")
CLASSIFICATION_METRICS = ("accuracy", "f1", "matthews_correlation")
REGRESSION_METRICS = ("pearson", "spearman")


class Model(Protocol):
    """What an objective asks of a model."""

    config: BertConfig

    def __call__(self, batch: Batch, keys: Keys | None) -> Any:
        """Logits; ``keys`` None means evaluation."""


class _Objective:
    """What all have in common: where the divisor's counts come from, and no rows."""

    num_columns = 0

    def __init__(self, scope: str) -> None:
        self.scope = _known("scope", scope, SCOPES)

    def rows(self, model: Model, batch: Batch) -> Tensor:
        """float64 [S, num_columns]: asked for only where there are columns."""
        return torch.empty(batch.num_samples, 0, dtype=torch.float64)


class MaskedLM(_Objective):
    """Cross-entropy of the masked tokens, for models that give `MaskedLogits`.

    Metrics: "mlm_accuracy", the share of masked tokens whose most probable token is the label; "loss", their mean.
    """

    metric = "mlm_accuracy"
    sum_names: tuple[str, ...] = ("correct", "mlm_loss", "masked")

    def counts(self, batch: Counted) -> tuple[int, ...]:
        """Masked tokens."""
        return (batch.num_masked,)

    def divisors(self, counts: Sequence[int]) -> tuple[float, ...]:
        """What the reference divides by."""
        return (counts[0] + MLM_DIVISOR_EPS,)

    def loss(self, model: Model, batch: Batch, keys: Keys | None, divisors: Sequence[Tensor]) -> Tensor:
        """float32 scalar."""
        loss_sum, _ = self._masked(model, batch, model(batch, keys))
        return loss_sum / divisors[0]

    def sums(self, model: Model, batch: Batch) -> Tensor:
        """float64 [3]."""
        loss_sum, correct = self._masked(model, batch, model(batch, None))
        masked = (batch.masked_labels != IGNORED_LABEL).sum()
        return torch.stack([correct.double(), loss_sum.double(), masked.double()])

    def metrics(self, sums: Sequence[float], rows: Tensor | None) -> dict[str, float]:
        """Each token counts once: tokens are summed before the division, so sharding does not change the accuracy."""
        correct, loss, masked = sums
        assert masked, "the evaluation set holds no masked token"
        return {"mlm_accuracy": correct / masked, "loss": loss / masked}

    @staticmethod
    def _masked(model: Model, batch: Batch, logits: MaskedLogits | PreTrainingLogits) -> tuple[Tensor, Tensor]:
        return ops.masked_cross_entropy(logits.masked, batch.masked_labels, model.config.vocab_size)


class PreTraining(MaskedLM):
    """The benchmark's loss: masked-LM plus next-sentence cross-entropy, for models that give `PreTrainingLogits`.

    Metrics as of `MaskedLM`: the next-sentence head takes no part.
    """

    def counts(self, batch: Counted) -> tuple[int, ...]:
        """Masked tokens and sequences."""
        return batch.num_masked, batch.num_samples

    def divisors(self, counts: Sequence[int]) -> tuple[float, ...]:
        """What the reference divides the two losses by."""
        return counts[0] + MLM_DIVISOR_EPS, float(counts[1])

    def loss(self, model: Model, batch: Batch, keys: Keys | None, divisors: Sequence[Tensor]) -> Tensor:
        """float32 scalar."""
        logits: PreTrainingLogits = model(batch, keys)
        mlm_loss_sum, _ = self._masked(model, batch, logits)
        nsp_loss_sum = F.cross_entropy(logits.next_sentence.float(), batch.next_sentence_labels, reduction="sum")
        return mlm_loss_sum / divisors[0] + nsp_loss_sum / divisors[1]


class _SequenceObjective(_Objective):
    """Of one label a sequence."""

    def counts(self, batch: Counted) -> tuple[int, ...]:
        """Sequences."""
        return (batch.num_samples,)

    def divisors(self, counts: Sequence[int]) -> tuple[float, ...]:
        """Their number."""
        return (float(counts[0]),)


class Classification(_SequenceObjective):
    """Cross-entropy of one of ``num_labels`` labels a sequence, for models that give `SequenceLogits`.

    Args:
        num_labels: L.
        scope: see the module docstring.
        metric: the one that counts: "accuracy", "matthews_correlation", or for two labels "f1".

    Metrics: all of them and "loss", the mean. Sums: the loss, then the confusion matrix, a row a label.
    """

    def __init__(self, num_labels: int, scope: str, metric: str) -> None:
        super().__init__(scope)
        self.num_labels = num_labels
        known = CLASSIFICATION_METRICS if num_labels == 2 else CLASSIFICATION_METRICS[::2]
        self.metric = _known("metric", metric, known)
        pairs = [f"label_{i}_taken_for_{j}" for i in range(num_labels) for j in range(num_labels)]
        self.sum_names = ("loss", *pairs)

    def loss(self, model: Model, batch: Batch, keys: Keys | None, divisors: Sequence[Tensor]) -> Tensor:
        """float32 scalar."""
        return self._loss_sum(model(batch, keys), self._labels(batch)) / divisors[0]

    def sums(self, model: Model, batch: Batch) -> Tensor:
        """float64 [1 + L^2]."""
        logits, labels = model(batch, None), self._labels(batch)
        # Comparisons in place of one-hot rows, which look at the labels on the host.
        known = torch.arange(self.num_labels, device=labels.device)
        of_label, taken_for = labels[:, None] == known, logits.labels.argmax(dim=1)[:, None] == known
        confusion = (of_label[:, :, None] & taken_for[:, None, :]).sum(0)
        return torch.cat([self._loss_sum(logits, labels).double()[None], confusion.flatten().double()])

    def metrics(self, sums: Sequence[float], rows: Tensor | None) -> dict[str, float]:
        """Of the confusion matrix."""
        loss, flat, n = sums[0], list(sums[1:]), self.num_labels
        confusion = [flat[i * n : (i + 1) * n] for i in range(n)]
        found = {"accuracy": metrics.accuracy(confusion)}
        if n == 2:
            found["f1"] = metrics.f1(confusion)
        found["matthews_correlation"] = metrics.matthews_correlation(confusion)
        return found | {"loss": loss / max(1.0, sum(flat))}

    @staticmethod
    def _labels(batch: Batch) -> Tensor:
        labels, there = _labels_of(batch)
        return torch.where(there, labels, float(IGNORED_LABEL)).long()

    @staticmethod
    def _loss_sum(logits: SequenceLogits, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.labels.float(), labels, ignore_index=IGNORED_LABEL, reduction="sum")


class Regression(_SequenceObjective):
    """Squared error of one number a sequence, for models that give `SequenceLogits` of one output.

    Args:
        scope: see the module docstring.
        metric: the one that counts: "pearson", made of sums, or "spearman", which needs every sample's row: prediction
            and label, NaN for a sequence without tokens.

    Metrics: "pearson", "loss", and "spearman" where it counts.
    """

    sum_names = ("samples", "loss", "x", "y", "xx", "yy", "xy")  # x the predictions, y the labels

    def __init__(self, scope: str, metric: str) -> None:
        super().__init__(scope)
        self.metric = _known("metric", metric, REGRESSION_METRICS)
        self.num_columns = 2 if metric == "spearman" else 0

    def loss(self, model: Model, batch: Batch, keys: Keys | None, divisors: Sequence[Tensor]) -> Tensor:
        """float32 scalar."""
        x, y, _ = self._pairs(model, batch, keys)
        return (x - y).square().sum() / divisors[0]

    def sums(self, model: Model, batch: Batch) -> Tensor:
        """float64 [7]."""
        x, y, there = self._pairs(model, batch, None)
        error = (x - y).square().sum().double()
        x, y = x.double(), y.double()
        return torch.stack([there.sum().double(), error, *(t.sum() for t in (x, y, x * x, y * y, x * y))])

    def rows(self, model: Model, batch: Batch) -> Tensor:
        """float64 [S, 2]."""
        x, y, there = self._pairs(model, batch, None)
        return torch.where(there[:, None], torch.stack([x, y], dim=1).double(), torch.nan)

    def metrics(self, sums: Sequence[float], rows: Tensor | None) -> dict[str, float]:
        """Correlations of predictions and labels, and the mean squared error."""
        samples, loss, *moments = sums
        found = {"pearson": metrics.pearson(samples, *moments), "loss": loss / max(1.0, samples)}
        if self.num_columns:
            assert rows is not None, "Spearman's correlation needs the rows"
            found["spearman"] = metrics.spearman(*rows[~rows[:, 0].isnan()].unbind(1))
        return found

    @staticmethod
    def _pairs(model: Model, batch: Batch, keys: Keys | None) -> tuple[Tensor, Tensor, Tensor]:
        """Predictions and labels float32 [S], 0 for sequences without tokens, and which have some."""
        labels, there = _labels_of(batch)
        predictions = model(batch, keys).labels.float().squeeze(1)
        return torch.where(there, predictions, 0.0), torch.where(there, labels, 0.0), there


def _known(subject: str, choice: str, known: Sequence[str]) -> str:
    """The choice; raises UserError for one that is not known."""
    if choice not in known:
        raise UserError(subject, f"{choice!r} is unknown", f"Use one of {', '.join(known)}")
    return choice


def _labels_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """A task's labels float32 [S], and which sequences have tokens."""
    assert batch.labels is not None, "this objective needs a task's labels"
    return batch.labels, batch.cu_seqlens[1:] > batch.cu_seqlens[:-1]
