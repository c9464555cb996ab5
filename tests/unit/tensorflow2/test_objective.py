"""Losses, sums and metrics on hand-calculated logits, against PyTorch, and for split steps."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed (the tf extra)")

from host_batches import plain_batch
from mlbert.models.bert import BertForPreTraining
from mlbert.models.objectives import PreTraining
from tf2_bert.model import BertPretrainer, Logits
from tf2_bert.objective import Counts, Sums, counts, loss, metrics, sums
from tf2_bert.rows import Rows
from unit.tensorflow2.cases import NO_DROPOUT, packed_case, single_case, tensors

HALF = np.log(2)
# Two vocabulary entries. Predictions: sure and right (loss 0), even, without weight; the next sentence: sure and
# wrong (loss 1000), even, without weight.
LOGITS = Logits(
    tf.constant([[1000.0, 0.0], [0.0, 0.0], [0.0, 1000.0], [7.0, 7.0]]),
    tf.constant([[1000.0, 0.0], [0.0, 0.0], [0.0, 1000.0], [3.0, 3.0]]),
)
ROWS = Rows(*[None] * 10)._replace(
    masked_labels=tf.constant([[0, 1], [0, 0]]),
    masked_weights=tf.constant([[1.0, 1.0], [0.0, 0.0]]),
    next_sentence_labels=tf.constant([[1, 0], [0, 1]]),
    next_sentence_weights=tf.constant([[1.0, 1.0], [0.0, 0.0]]),
)


def test_loss_by_hand() -> None:
    assert [float(count) for count in counts(ROWS)] == [2.0, 2.0]
    own = float(loss(LOGITS, ROWS, counts(ROWS)))
    assert own == pytest.approx(HALF / (2 + 1e-5) + (1000 + HALF) / 2, rel=1e-6)
    given = float(loss(LOGITS, ROWS, Counts(tf.constant(4.0), tf.constant(5.0))))
    assert given == pytest.approx(HALF / (4 + 1e-5) + (1000 + HALF) / 5, rel=1e-6)


def test_sums_and_metrics_by_hand() -> None:
    found = sums(LOGITS, ROWS)
    assert all(value.dtype == tf.float32 and value.shape == () for value in found)
    # With equal logits, the first one is the answer.
    np.testing.assert_allclose(found, Sums(1, 2, HALF, 1, 2, 1000 + HALF), rtol=1e-6)
    expected = {"mlm_accuracy": 0.5, "loss": HALF / 2, "nsp_accuracy": 0.5, "nsp_loss": (1000 + HALF) / 2}
    assert metrics(found) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("case", [single_case, packed_case])
def test_metrics_match_pytorch(case: Callable) -> None:
    ragged, packs, rows = case()
    reference = BertForPreTraining(NO_DROPOUT)
    reference.initialize(0)
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(False).mul_(5.0 if name.endswith("weight") else 1.0)
    model = BertPretrainer(NO_DROPOUT)
    model.assign({name: parameter.numpy() for name, parameter in reference.named_parameters()})
    objective = PreTraining("step")
    batch = plain_batch(ragged, packs, list(range(len(packs))), rows.input_ids.shape[1])
    with torch.no_grad():
        likeliest = reference(batch, None).masked[:, : NO_DROPOUT.vocab_size].argmax(1)
    batch.masked_labels[::3] = likeliest[::3]  # so that some predictions are correct
    rows.masked_labels[rows.masked_weights == 1] = batch.masked_labels.numpy()
    expected = objective.metrics(objective.sums(reference, batch).tolist(), None)
    found = metrics(sums(model(tensors(rows), None), tensors(rows)))
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    assert 0 < found["mlm_accuracy"] < 1
