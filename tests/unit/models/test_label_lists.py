"""Objectives with a list of labels a sequence: against transformers' losses and scikit-learn's
scores, and that padding to a static shape changes nothing.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from torch.nn import functional as F

from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import HostBatch, StaticShape
from mlbert.data.formats.ragged import Ragged
from mlbert.models.bert import BertForSequenceClassification, BertForTokenClassification
from mlbert.models.label_lists import LabelSets, WordTags, set_scores

SHAPE = BertConfig(50, 16, 1, 2, 32)
TAGS = ("O", "B-A", "I-A")


def batch_of(positions: list[list[int]], labels: list[list[int]]) -> HostBatch:
    draw = np.random.default_rng(0)
    rows = [
        (draw.integers(5, 50, 6 + n).tolist(), 6 + n, False, places, numbers)
        for n, (places, numbers) in enumerate(zip(positions, labels, strict=True))
    ]
    ragged = replace(Ragged.from_rows(rows), labels=np.zeros(len(rows), np.float32))
    return HostBatch.of_sequences(ragged, np.arange(len(rows)), 16)


@pytest.fixture
def objectives():
    """(objective, model, batch, its labels) of both kinds."""
    sets = BertForSequenceClassification(SHAPE, 3)
    sets.initialize(1)
    tags = BertForTokenClassification(SHAPE, 3)
    tags.initialize(1)
    of_sets = [[0, 2], [], [1]]
    of_words = [[1, 2, 0], [0, 0], [1]]
    return [
        (LabelSets(3, "step", "micro_f1"), sets, batch_of([[0, 0], [], [0]], of_sets), of_sets),
        (
            WordTags(TAGS, "step", None, 4),
            tags,
            batch_of([[1, 2, 4], [1, 3], [2]], of_words),
            of_words,
        ),
    ]


def test_losses_are_those_of_transformers(objectives) -> None:
    (sets, set_model, set_batch, of_sets), (tags, tag_model, tag_batch, of_words) = objectives
    on_device = set_batch.to("cpu")
    targets = torch.zeros(3, 3)
    for row, numbers in enumerate(of_sets):
        targets[row, numbers] = 1
    expected = F.binary_cross_entropy_with_logits(set_model(on_device, None).labels, targets)
    divisors = torch.tensor(sets.divisors(sets.counts(set_batch)))
    assert torch.allclose(sets.loss(set_model, on_device, None, divisors), expected)
    on_device = tag_batch.to("cpu")
    flat = torch.tensor([tag for row in of_words for tag in row])
    expected = F.cross_entropy(tag_model(on_device, None).labels, flat)
    divisors = torch.tensor(tags.divisors(tags.counts(tag_batch)))
    assert torch.allclose(tags.loss(tag_model, on_device, None, divisors), expected)


def test_padding_changes_nothing(objectives) -> None:
    for objective, model, batch, _ in objectives:
        shape = replace(StaticShape.rounded(64, 5, 12, 16), has_labels=True)
        padded = shape.allocate("cpu")
        shape.write(batch, padded)
        divisors = torch.tensor(objective.divisors(objective.counts(batch)))
        plain = batch.to("cpu")
        with torch.no_grad():
            loss = objective.loss(model, plain, None, divisors)
            assert torch.allclose(objective.loss(model, padded, None, divisors), loss)
            rows = objective.rows(model, padded)
            assert torch.allclose(rows[:3], objective.rows(model, plain), atol=1e-6)
            assert rows[3:].isnan().all()


def test_scores_of_sets_are_scikit_learns() -> None:
    draw = np.random.default_rng(0)
    labels = draw.random((40, 6)) < 0.3
    predicted = np.where(draw.random((40, 6)) < 0.8, labels, ~labels)
    labels[:, 5] = predicted[:, 5] = False  # a class that does not occur
    found = set_scores(predicted, labels)
    for average in ("micro", "macro"):
        expected = f1_score(labels, predicted, average=average, zero_division=0)
        assert found[f"{average}_f1"] == pytest.approx(expected)
    assert found["set_accuracy"] == pytest.approx((labels == predicted).all(axis=1).mean())


def test_entities_of_an_evaluation(objectives) -> None:
    _, (objective, model, batch, of_words) = objectives
    rows = objective.rows(model, batch.to("cpu")).detach()
    found = objective.metrics([3.0], rows)
    assert objective.labeled(rows.numpy()) == [[TAGS[tag] for tag in row] for row in of_words]
    assert found["word_accuracy"] == pytest.approx(
        sum(
            guess == TAGS[truth]
            for guesses, truths in zip(objective.predicted(rows.numpy()), of_words, strict=True)
            for guess, truth in zip(guesses, truths, strict=True)
        )
        / 6
    )
    assert set(found) == {"word_accuracy", "loss", "precision", "recall", "f1"}
