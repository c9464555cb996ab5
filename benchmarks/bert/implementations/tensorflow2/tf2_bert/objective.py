"""Masked-LM and next-sentence loss of `Logits`, and evaluation sums and metrics, all in float32.

Slots of a row without a prediction or sequence have weight 0.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from mlbert.host.errors import UserError
from tf2_bert.model import Logits
from tf2_bert.rows import Rows

# The reference divides the summed masked-LM loss by (sum of weights + 1e-5).
MLM_DIVISOR_EPS = 1e-5


class Counts(NamedTuple):
    """Divisors of the loss."""

    masked: tf.Tensor  # float32 scalar, predictions
    sequences: tf.Tensor  # float32 scalar


class Sums(NamedTuple):
    """Evaluation sums, float32 scalars; add them over batches and replicas."""

    masked_correct: tf.Tensor
    masked: tf.Tensor
    masked_loss: tf.Tensor
    next_sentence_correct: tf.Tensor
    sequences: tf.Tensor
    next_sentence_loss: tf.Tensor


def counts(rows: Rows) -> Counts:
    """Count the predictions and sequences in the rows."""
    return Counts(tf.reduce_sum(rows.masked_weights), tf.reduce_sum(rows.next_sentence_weights))


def loss(logits: Logits, rows: Rows, counts: Counts) -> tf.Tensor:
    """Return sum(w CE) / (masked + 1e-5) + sum(w next-sentence CE) / sequences, a float32 scalar.

    Args:
        counts: counts of the rows, or their mean over a step's micro-batches and replicas, which
            makes the step's mean loss independent of how it is split. `sequences` must not be 0.
    """
    masked, _ = _summed(logits.masked, rows.masked_labels, rows.masked_weights)
    next_sentence, _ = _summed(
        logits.next_sentence, rows.next_sentence_labels, rows.next_sentence_weights
    )
    return masked / (counts.masked + MLM_DIVISOR_EPS) + next_sentence / counts.sequences


def sums(logits: Logits, rows: Rows) -> Sums:
    """Return the evaluation sums of a batch."""
    masked, sequences = counts(rows)
    masked_loss, masked_correct = _summed(logits.masked, rows.masked_labels, rows.masked_weights)
    nsp_loss, nsp_correct = _summed(
        logits.next_sentence, rows.next_sentence_labels, rows.next_sentence_weights
    )
    return Sums(masked_correct, masked, masked_loss, nsp_correct, sequences, nsp_loss)


def metrics(sums: Sums) -> dict[str, float]:
    """Return the metrics of an evaluation from its total sums.

    "mlm_accuracy" and "loss" count each token once, as in PyTorch; "nsp_accuracy" and "nsp_loss"
    are those of the next-sentence head. Raises UserError if no token is masked.
    """
    correct, masked, loss, nsp_correct, sequences, nsp_loss = (float(value) for value in sums)
    if not masked:
        reason = "contains no masked tokens"
        raise UserError(
            "data.empty",
            "the evaluation set",
            reason,
            "Use a set that was prepared with masked tokens",
        )
    assert sequences, "the evaluation set contains no sequences"
    return {
        "mlm_accuracy": correct / masked,
        "loss": loss / masked,
        "nsp_accuracy": nsp_correct / sequences,
        "nsp_loss": nsp_loss / sequences,
    }


def _summed(
    logits: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the weighted sums of cross-entropy and of correct predictions, float32 scalars."""
    labels = tf.reshape(labels, [-1])
    weights = tf.reshape(weights, [-1])
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    right = tf.argmax(logits, 1, output_type=labels.dtype) == labels
    return tf.reduce_sum(weights * losses), tf.reduce_sum(tf.where(right, weights, 0.0))
