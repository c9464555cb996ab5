"""Objectives of tasks with a list of labels for each sequence: a set of classes, or one for each
word.

The labels of a batch are its ``masked_labels``. Those of a word are at the position of its first
piece, those of a set at any position of their sequence. Labels equal to IGNORED_LABEL and empty
sequences, which fill a batch up to a static shape, are ignored.

Legend: S sequences, M labels of a batch, L classes, W most words of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mlbert.config.flops import Counted
from mlbert.data.batches import IGNORED_LABEL, Batch
from mlbert.data.formats.entities import count_entities, is_entity_tag, sum_counts
from mlbert.models.encoder import Keys
from mlbert.models.objectives import ObjectiveModel, SequenceObjective, known_choice

SET_METRICS = ("micro_f1", "macro_f1", "set_accuracy")
TAG_METRICS = ("word_accuracy",)
ENTITY_METRICS = ("f1", *TAG_METRICS)
THRESHOLD = 0.5  # probability from which a class is predicted


def sequences_of_labels(batch: Batch) -> Tensor:
    """Return the sequence of each label, int64 [M]."""
    ends = batch.cu_seqlens[1:].long()
    return torch.searchsorted(ends, batch.masked_positions, right=True)


class LabelSets(SequenceObjective):
    """Binary cross-entropy of ``num_labels`` classes of which any number applies, for models that
    return `SequenceLogits`.

    Args:
        num_labels: L.
        scope: see `mlbert.models.objectives`.
        metric: the target metric, a name of `SET_METRICS`.
        parts: see `SequenceObjective`.

    Metrics: "micro_f1", of all decisions together; "macro_f1", the mean of the classes' (0 if
    undefined); "set_accuracy", the share of sequences whose set is right; "loss", the mean over
    sequences and classes. Rows: loss, L probabilities, L labels of 0 and 1.
    """

    def __init__(
        self, num_labels: int, scope: str, metric: str, parts: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(scope, parts)
        self.num_labels = num_labels
        self.num_columns = 1 + 2 * num_labels
        self.metric = known_choice("METRIC", metric, SET_METRICS)

    def loss(
        self, model: ObjectiveModel, batch: Batch, keys: Keys | None, divisors: Sequence[Tensor]
    ) -> Tensor:
        """Return the loss, a float32 scalar."""
        losses, _, _, has_tokens = self._losses(model, batch, keys)
        return torch.where(has_tokens, losses, 0.0).sum() / divisors[0]

    def rows(self, model: ObjectiveModel, batch: Batch) -> Tensor:
        """Return float64 [S, 1 + 2 L]; columns as in the class docstring."""
        losses, logits, targets, has_tokens = self._losses(model, batch, None)
        rows = torch.cat([losses[:, None], logits.sigmoid(), targets], dim=1).double()
        return torch.where(has_tokens[:, None], rows, torch.nan)

    def probabilities(self, rows: np.ndarray) -> np.ndarray:
        """Return the probabilities in rows, float64 [S, L]."""
        return rows[:, 1 : 1 + self.num_labels]

    def _losses(
        self, model: ObjectiveModel, batch: Batch, keys: Keys | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return losses [S], logits [S, L], targets [S, L] and which sequences have tokens."""
        logits = model(batch, keys).labels.float()
        targets = self._targets(batch)
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=1)
        return losses, logits, targets, batch.cu_seqlens[1:] > batch.cu_seqlens[:-1]

    def _targets(self, batch: Batch) -> Tensor:
        """Return float32 [S, L]: 1 for the classes that apply."""
        width = self.num_labels
        count = batch.num_samples * width
        places = sequences_of_labels(batch) * width + batch.masked_labels
        places = torch.where(batch.masked_labels == IGNORED_LABEL, count, places)
        flat = torch.zeros(count + 1, device=places.device)
        return flat.index_fill(0, places, 1.0)[:-1].view(-1, width)

    def _metrics_of(self, rows: np.ndarray) -> dict[str, float]:
        predicted = self.probabilities(rows) >= THRESHOLD
        labels = rows[:, 1 + self.num_labels :] > 0.5
        return set_scores(predicted, labels) | {"loss": rows[:, 0].mean()}


def set_scores(predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the metrics of `LabelSets` but the loss, from bool [N, L]."""
    right = (predicted & labels).sum(axis=0)
    total = predicted.sum(axis=0) + labels.sum(axis=0)
    micro = 2 * right.sum() / max(total.sum(), 1)
    macro = (2 * right / np.maximum(total, 1)).mean()
    return {
        "micro_f1": float(micro),
        "macro_f1": float(macro),
        "set_accuracy": float((predicted == labels).all(axis=1).mean()),
    }


class WordTags(SequenceObjective):
    """Cross-entropy of one tag for each word, for models that return `TokenLogits`.

    Args:
        tags: their names.
        scope: see `mlbert.models.objectives`.
        metric: the target metric: "word_accuracy", or "f1" if the tags are those of entities.
        most_words: W, of the evaluation set.
        parts: see `SequenceObjective`.

    Metrics: "word_accuracy", "loss", their mean, and for tags of entities their
    "precision", "recall" and "f1", all kinds together, as conlleval and seqeval count them. Rows:
    number of words, sum of the losses, W predicted tags, W labels.
    """

    def __init__(
        self,
        tags: Sequence[str],
        scope: str,
        metric: str | None,
        most_words: int,
        parts: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(scope, parts)
        self.tags = tuple(tags)
        self.most_words = most_words
        self.num_columns = 2 + 2 * most_words
        self.has_entities = has_entities(tags)
        known = ENTITY_METRICS if self.has_entities else TAG_METRICS
        self.metric = known_choice("METRIC", metric or known[0], known)

    def counts(self, batch: Counted) -> tuple[int, ...]:
        """Return the number of words."""
        return (batch.num_masked,)

    def divisors(self, counts: Sequence[int]) -> tuple[float, ...]:
        """Return the number of words, or 1 if there is none."""
        return (float(max(counts[0], 1)),)

    def loss(
        self, model: ObjectiveModel, batch: Batch, keys: Keys | None, divisors: Sequence[Tensor]
    ) -> Tensor:
        """Return the loss, a float32 scalar."""
        logits = model(batch, keys).labels.float()
        total = F.cross_entropy(
            logits, batch.masked_labels, ignore_index=IGNORED_LABEL, reduction="sum"
        )
        return total / divisors[0]

    def rows(self, model: ObjectiveModel, batch: Batch) -> Tensor:
        """Return float64 [S, 2 + 2 W]; columns as in the class docstring."""
        logits = model(batch, None).labels.float()
        labels = batch.masked_labels
        losses = F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="none")
        is_real = labels != IGNORED_LABEL
        count = batch.num_samples
        # Ignored labels come last, and belong to no sequence.
        sequences = torch.where(is_real, sequences_of_labels(batch), count)
        zeros = torch.zeros(count + 1, dtype=torch.float64, device=losses.device)
        words = zeros.index_add(0, sequences, is_real.double())[:-1]
        loss_sums = zeros.index_add(0, sequences, losses.double())[:-1]
        firsts = torch.searchsorted(sequences, torch.arange(count + 1, device=sequences.device))
        within = torch.arange(len(labels), device=sequences.device) - firsts[sequences]
        places = torch.where(is_real, sequences * self.most_words + within, count * self.most_words)

        def spread(values: Tensor) -> Tensor:
            flat = torch.zeros(
                count * self.most_words + 1, dtype=torch.float64, device=values.device
            )
            return flat.index_copy(0, places, values.double())[:-1].view(count, -1)

        parts = [words[:, None], loss_sums[:, None], spread(logits.argmax(dim=1)), spread(labels)]
        has_tokens = batch.cu_seqlens[1:] > batch.cu_seqlens[:-1]
        return torch.where(has_tokens[:, None], torch.cat(parts, dim=1), torch.nan)

    def predicted(self, rows: np.ndarray) -> list[list[str]]:
        """Return the predicted tags of the words of each row."""
        return self._names(rows, 2)

    def labeled(self, rows: np.ndarray) -> list[list[str]]:
        """Return the labels of the words of each row."""
        return self._names(rows, 2 + self.most_words)

    def _names(self, rows: np.ndarray, first: int) -> list[list[str]]:
        return [
            [self.tags[number] for number in row[first : first + int(row[0])].astype(int)]
            for row in rows
        ]

    def _metrics_of(self, rows: np.ndarray) -> dict[str, float]:
        words = max(rows[:, 0].sum(), 1.0)
        predicted = self.predicted(rows)
        labeled = self.labeled(rows)
        right = sum(
            guess == truth
            for guesses, truths in zip(predicted, labeled, strict=True)
            for guess, truth in zip(guesses, truths, strict=True)
        )
        found = {"word_accuracy": right / words, "loss": rows[:, 1].sum() / words}
        if self.has_entities:
            total = sum_counts(list(count_entities(predicted, labeled).values()))
            found |= {"precision": total.precision, "recall": total.recall, "f1": total.f1}
        return found


def has_entities(tags: Sequence[str]) -> bool:
    """Return whether tags are those of entities, and not for example parts of speech."""
    return all(is_entity_tag(tag) for tag in tags) and any("-" in tag for tag in tags)
