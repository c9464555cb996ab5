"""Objectives: metrics against their definitions sample by sample,
what is filled in counts for nothing.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from torch import Tensor

from host_batches import made_up_batches, plain_filled
from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import IGNORED_LABEL, Batch, StaticShape
from mlbert.models.bert import BertForMaskedLM, BertForPreTraining, BertForSequenceClassification
from mlbert.models.objectives import (
    Classification,
    MaskedLM,
    PreTraining,
    Regression,
    class_scores,
    confusion,
)
from model_loss import loss_of
from same_weights import initialized, randomize
from user_errors import user_error

SHAPE = BertConfig(99, 32, 1, 2, 64, max_position_embeddings=32)


def batches(*packs: int) -> list[Batch]:
    return [made_up_batches(n, seed=n, vocab_size=99, max_tokens=32)[0].to("cpu") for n in packs]


def labeled(values: Tensor, *packs: int) -> list[Batch]:
    """Batches whose sequences have these labels in turn."""
    found = batches(*packs)
    return [
        dataclasses.replace(b, labels=values[torch.arange(b.num_samples) % len(values)])
        for b in found
    ]


def filled(batch: Batch, label: float) -> Batch:
    """The batch with two sequences without tokens at its end, and five tokens of none."""
    sizes = StaticShape(
        batch.num_tokens + 5, batch.num_samples + 2, batch.num_masked + 3, batch.max_seqlen
    )
    longer = plain_filled(batch, sizes)
    if longer.labels is not None:
        longer.labels[-2:] = label
    return longer


def classifier(num_labels: int) -> BertForSequenceClassification:
    return randomize(BertForSequenceClassification(SHAPE, num_labels), 0.5)


def evaluated(objective: Any, model: Any, given: list[Batch]) -> dict[str, float]:
    with torch.no_grad():
        sums = sum(objective.sums(model, batch) for batch in given)
        rows = (
            torch.cat([objective.rows(model, batch) for batch in given])
            if objective.num_columns
            else None
        )
    assert sums.dtype == torch.float64
    assert sums.shape == (len(objective.sum_names),)
    found = objective.metrics(sums.tolist(), rows)
    assert objective.metric in found
    return found


@pytest.mark.parametrize(
    ("kind", "objective"), [(BertForPreTraining, PreTraining), (BertForMaskedLM, MaskedLM)]
)
def test_masked_lm_metrics(kind, objective):
    model = initialized(kind(SHAPE))
    given = batches(3, 5)
    model.cls.predictions.bias.data[given[0].masked_labels[0]] = 10.0  # some hits, not all
    right = []
    losses = []
    with torch.no_grad():
        for batch in given:
            logits = model(batch, None).masked[:, : SHAPE.vocab_size]
            right += (logits.argmax(1) == batch.masked_labels).tolist()
            losses += torch.nn.functional.cross_entropy(
                logits, batch.masked_labels, reduction="none"
            ).tolist()
    found = evaluated(objective("step"), model, given)
    assert 0.0 < found["mlm_accuracy"] == sum(right) / len(right)
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert evaluated(objective("step"), model, [filled(b, 0.0) for b in given]) == pytest.approx(
        found, rel=1e-6
    )
    assert objective("rank").scope == "rank"
    with user_error("data.empty", "the evaluation set"):
        objective("step").metrics([0.0] * len(objective.sum_names), None)


@pytest.mark.parametrize("num_labels", [2, 3])
def test_classification_metrics(num_labels):
    values = torch.tensor([0.0, 1.0, 1.0, 0.0, num_labels - 1.0])
    model = classifier(num_labels)
    given = labeled(values, 5, 9)
    objective = Classification(num_labels, "step", "matthews_correlation")
    with torch.no_grad():
        model.classifier.bias -= torch.cat([model(batch, None).labels for batch in given]).mean(0)
        logits = torch.cat([model(batch, None).labels for batch in given])
    labels = torch.cat([batch.labels for batch in given]).long()
    taken_for = logits.argmax(1)
    assert len(set(taken_for.tolist())) > 1, "the comparison needs predictions of several kinds"
    found = evaluated(objective, model, given)
    assert found["accuracy"] == pytest.approx(float((taken_for == labels).double().mean()))
    assert found["loss"] == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5
    )
    assert found["matthews_correlation"] == pytest.approx(
        sklearn.metrics.matthews_corrcoef(labels, taken_for)
    )
    # R_K is the correlation of the one-hot matrices.
    x, y = (torch.nn.functional.one_hot(v, num_labels).double() for v in (taken_for, labels))
    x = x - x.mean(0)
    y = y - y.mean(0)
    correlation = float((x * y).sum() / ((x * x).sum() * (y * y).sum()).sqrt())
    assert found["matthews_correlation"] == pytest.approx(correlation)
    assert objective.latest[:, 0].tolist() == taken_for.tolist()
    assert objective.latest[:, 1] == pytest.approx(
        logits.softmax(1).max(1).values.double().numpy(), rel=1e-5
    )
    assert found.get("f1") == (
        pytest.approx(sklearn.metrics.f1_score(labels, taken_for)) if num_labels == 2 else None
    )
    for filler in (0.0, float(IGNORED_LABEL), math.nan):
        assert evaluated(objective, model, [filled(b, filler) for b in given]) == pytest.approx(
            found, rel=1e-6
        )


def test_regression_metrics():
    values = torch.tensor([0.5, 3.2, 5.0, 1.1, 0.5, 2.4, 2.4])
    model = classifier(1)
    given = labeled(values, 5, 9)
    objective = Regression("step", "spearman")
    with torch.no_grad():
        x = torch.cat([model(batch, None).labels[:, 0] for batch in given]).double()
    y = torch.cat([batch.labels for batch in given]).double()
    found = evaluated(objective, model, given)
    assert found["loss"] == pytest.approx(float((x - y).square().mean()), rel=1e-5)
    assert found["pearson"] == pytest.approx(
        float(torch.corrcoef(torch.stack([x, y]))[0, 1]), rel=1e-6
    )
    # The mean rank by definition: how many are less, and half of those that are equal.
    ranks = [
        (v[None] < v[:, None]).sum(1) + ((v[None] == v[:, None]).sum(1).double() + 1) / 2
        for v in (x, y)
    ]
    assert found["spearman"] == pytest.approx(
        float(torch.corrcoef(torch.stack(ranks))[0, 1]), rel=1e-9
    )
    assert found["r2"] == pytest.approx(1 - found["loss"] / float(y.var(correction=0)), rel=1e-9)
    assert evaluated(objective, model, [filled(b, math.nan) for b in given]) == pytest.approx(
        found, rel=1e-6, abs=1e-6
    )


def test_each_part_has_its_own_metrics():
    model = classifier(2)
    given = labeled(torch.tensor([0.0, 1.0, 1.0]), 5, 9)
    together = Classification(
        2, "step", "accuracy", {"": given[0].num_samples, "other": given[1].num_samples}
    )
    found = evaluated(together, model, given)
    alone = [evaluated(Classification(2, "step", "accuracy"), model, [batch]) for batch in given]
    assert found == {**alone[0], **{f"other_{name}": value for name, value in alone[1].items()}}


@pytest.mark.parametrize(
    "objective", [Classification(3, "step", "accuracy"), Regression("step", "pearson")]
)
def test_parts_of_a_step_add_up(objective):
    """Whatever the filler is, the loss and its gradient are finite
    and those of the real sequences.
    """
    model = classifier(3 if isinstance(objective, Classification) else 1)
    given = labeled(torch.tensor([0.0, 1.0, 2.0]), 4, 7)
    counts = [
        sum(column) for column in zip(*(objective.counts(batch) for batch in given), strict=True)
    ]
    assert objective.divisors(counts) == (float(sum(batch.num_samples for batch in given)),)
    outcomes = []
    for parts in (given, [filled(batch, math.nan) for batch in given]):
        model.zero_grad()
        losses = [loss_of(model, part, counts=counts, objective=objective) for part in parts]
        sum(losses).backward()
        outcomes.append([sum(losses).detach(), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(*outcomes, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        mean = evaluated(objective, model, given)["loss"]
    assert float(outcomes[0][0]) == pytest.approx(mean, rel=1e-6)


def test_scores_of_each_class_are_scikit_learns():
    # 2 is never predicted
    labels = np.array([0, 0, 1, 1, 1, 2, 4])
    taken_for = np.array([0, 1, 1, 1, 3, 0, 4])
    *expected, _ = sklearn.metrics.precision_recall_fscore_support(
        labels, taken_for, labels=range(5), zero_division=0
    )
    found = class_scores(confusion(taken_for, labels, 5))
    np.testing.assert_allclose(list(found.values()), expected)


def test_undefined_metrics_are_zero():
    given = labeled(torch.tensor([0.0]), 5)
    model = classifier(2)
    model.classifier.bias.data = torch.tensor([9.0, -9.0])
    found = evaluated(Classification(2, "step", "f1"), model, given)
    assert (found["accuracy"], found["f1"], found["matthews_correlation"]) == (1.0, 0.0, 0.0)
    found = evaluated(Regression("step", "pearson"), classifier(1), given)
    assert found["pearson"] == found["spearman"] == 0.0


def test_unknown_choices_are_refused():
    with user_error("config.choice", "scope"):
        PreTraining("world")
    for make in (lambda: Classification(3, "step", "f1"), lambda: Regression("step", "accuracy")):
        with user_error("config.choice", "METRIC"):
            make()
