"""The TensorFlow model, loss and metrics against PyTorch's with the same weights:
precisions, XLA, packing, dropout.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import BertForPreTraining
from mlbert.models.objectives import PreTraining
from user_errors import user_error

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed (the tf extra)")

from host_batches import plain_batch
from model_loss import loss_of
from stored_sets import make_rows
from tf2_bert import objective
from tf2_bert.model import BertPretrainer, Logits, _dropout
from tf2_bert.rows import Rows
from tf2_bert.store_rows import RowShape, rows_of
from unit.tensorflow2.cases import NO_DROPOUT, SHAPE, packed_case, single_case, tensors

SEED = (7, 3)
HALF = np.log(2)
# Two vocabulary entries. Predictions: sure and right (loss 0), even, without weight; the next
# sentence: sure and wrong (loss 1000), even, without weight.
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


def pytorch_model(shape: BertConfig) -> BertForPreTraining:
    """Return PyTorch's model with noise on all parameters, so that none is 0 or 1."""
    reference = BertForPreTraining(shape)
    reference.initialize(seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return reference


def same_weights(reference: BertForPreTraining, dtype: tf.DType = tf.float32) -> BertPretrainer:
    model = BertPretrainer(reference.config, dtype)
    model.assign(
        {name: parameter.detach().numpy() for name, parameter in reference.named_parameters()}
    )
    return model


def real_logits(logits: Logits, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of real predictions and sequences, in the order of the flat stream."""
    masked, next_sentence = (
        weights.reshape(-1) == 1 for weights in (rows.masked_weights, rows.next_sentence_weights)
    )
    return logits.masked.numpy()[masked], logits.next_sentence.numpy()[next_sentence]


def loss_and_gradients(
    model: BertPretrainer, rows: Rows, seed: Any = None
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    with tf.GradientTape() as tape:
        loss = objective.loss(model(rows, seed), rows, objective.counts(rows))
    parameters = model.parameters()
    return loss, dict(zip(parameters, tape.gradient(loss, list(parameters.values())), strict=True))


def assert_near(
    found: dict[str, tf.Tensor], expected: dict[str, tf.Tensor], tolerance: float
) -> None:
    """Compare relative to the norm, or to 0.01, since the gradient of a key's bias is only rounding
    errors.
    """
    for name, gradient in found.items():
        error = tf.norm(gradient - expected[name]) / tf.maximum(tf.norm(expected[name]), 0.01)
        assert float(error) < tolerance, name


@pytest.mark.parametrize(
    ("case", "activation"),
    [(single_case, "gelu_erf"), (packed_case, "gelu_erf"), (packed_case, "gelu")],
)
def test_matches_pytorch(case: Callable, activation: str) -> None:
    ragged, packs, rows = case()
    reference = pytorch_model(dataclasses.replace(NO_DROPOUT, hidden_act=activation))
    model = same_weights(reference)
    batch = plain_batch(ragged, packs, list(range(len(packs))), rows.input_ids.shape[1])

    expected = reference(batch, None)
    masked, next_sentence = real_logits(model(tensors(rows), None), rows)
    vocabulary = expected.masked.detach().numpy()[:, : SHAPE.vocab_size]
    np.testing.assert_allclose(masked, vocabulary, atol=1e-5, rtol=0)
    np.testing.assert_allclose(
        next_sentence, expected.next_sentence.detach().numpy(), atol=1e-5, rtol=0
    )

    expected_loss = loss_of(reference, batch)
    expected_loss.backward()
    loss, gradients = loss_and_gradients(model, tensors(rows))
    assert not any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients.values()), (
        "they must be dense"
    )
    assert float(loss) == pytest.approx(expected_loss.item(), abs=1e-5)
    for name, parameter in reference.named_parameters():
        is_kernel = gradients[name].shape.rank == 2 and not name.endswith("embeddings.weight")
        found = gradients[name].numpy().T if is_kernel else gradients[name].numpy()
        np.testing.assert_allclose(
            found, parameter.grad.numpy()[: len(found)], atol=1e-5, rtol=0, err_msg=name
        )


@pytest.mark.parametrize("most", [1, 3])
def test_padding_rows_change_nothing(most: int) -> None:
    ragged = make_rows([20, 11], 4, SHAPE.vocab_size)
    model = same_weights(pytorch_model(NO_DROPOUT))
    found = []
    for packs in ([1, 1], [1, 0, 1]):
        rows = rows_of(ragged, np.array(packs), len(packs), RowShape(24, 4, most))
        logits = model(tensors(rows), None)
        assert all(np.isfinite(part.numpy()).all() for part in logits)
        loss, gradients = loss_and_gradients(model, tensors(rows))
        found.append((loss, list(gradients.values())))
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-6)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(tf.bfloat16, 0.05), (tf.float16, 0.006)])
@pytest.mark.parametrize("case", [single_case, packed_case])
def test_16_bit_precisions_are_close(case: Callable, dtype: tf.DType, tolerance: float) -> None:
    _, _, rows = case()
    reference = pytorch_model(NO_DROPOUT)
    expected = real_logits(same_weights(reference)(tensors(rows), None), rows)
    model = same_weights(reference, dtype)
    logits = model(tensors(rows), None)
    assert {part.dtype for part in logits} == {tf.float32}
    for one, other in zip(real_logits(logits, rows), expected, strict=True):
        error = np.linalg.norm(one - other) / np.linalg.norm(other)
        assert 0 < error < tolerance
    _, gradients = loss_and_gradients(model, tensors(rows))
    _, exact = loss_and_gradients(same_weights(reference), tensors(rows))
    assert {gradient.dtype for gradient in gradients.values()} == {tf.float32}
    assert_near(gradients, exact, 2 * tolerance)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(tf.float32, 1e-5), pytest.param(tf.bfloat16, 0.05, marks=pytest.mark.slow)],
)
def test_xla_matches_eager(dtype: tf.DType, tolerance: float) -> None:
    """One layer: the time of the compiler grows with their number."""
    rows = tensors(packed_case()[2])
    model = same_weights(pytorch_model(dataclasses.replace(NO_DROPOUT, num_hidden_layers=1)), dtype)
    compiled = tf.function(lambda *parts: loss_and_gradients(model, Rows(*parts)), jit_compile=True)
    loss, gradients = compiled(*rows)
    expected_loss, expected = loss_and_gradients(model, rows)
    assert float(loss) == pytest.approx(float(expected_loss), rel=tolerance)
    assert_near(gradients, expected, tolerance)


@pytest.mark.slow
def test_xla_dropout_depends_on_the_seed() -> None:
    rows = tensors(single_case()[2])
    model = same_weights(pytorch_model(dataclasses.replace(SHAPE, num_hidden_layers=1)))
    compiled = tf.function(
        lambda seed, *parts: loss_and_gradients(model, Rows(*parts), seed), jit_compile=True
    )
    (loss, gradients), (again, same), (other, _) = (
        compiled(tf.constant(seed), *rows) for seed in (SEED, SEED, (7, 4))
    )
    evaluated, _ = loss_and_gradients(model, rows)
    assert len({float(loss), float(again), float(other), float(evaluated)}) == 3
    assert_near(gradients, same, 1e-5)


def test_dropout_depends_only_on_its_seed() -> None:
    rows = tensors(single_case()[2])
    model = same_weights(pytorch_model(SHAPE))
    one, again, other = (
        model(rows, tf.constant(seed)).masked.numpy() for seed in (SEED, SEED, (7, 4))
    )
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 0.01
    without = same_weights(pytorch_model(NO_DROPOUT))
    for found in (model(rows, None), without(rows, None), without(rows, tf.constant(SEED))):
        np.testing.assert_array_equal(found.masked.numpy(), model(rows, None).masked.numpy())


@pytest.mark.parametrize(
    ("hidden", "attention", "masks"), [(0.1, 0.1, 10), (0.1, 0.0, 7), (0.0, 0.1, 3), (0.0, 0.0, 0)]
)
def test_each_dropout_has_its_own_mask(hidden: float, attention: float, masks: int) -> None:
    shape = dataclasses.replace(
        SHAPE, hidden_dropout_prob=hidden, attention_probs_dropout_prob=attention
    )
    model = BertPretrainer(shape)
    rows = tensors(single_case()[2])
    traced = tf.function(lambda seed: model(rows, seed).masked).get_concrete_function(
        tf.TensorSpec([2], tf.int64)
    )
    draws = [
        o for o in traced.graph.get_operations() if o.type.startswith("StatelessRandomUniformV")
    ]
    assert len(draws) == masks
    # The seeds of their keys differ.
    assert len({draw.inputs[1].op.inputs[0].name for draw in draws}) == masks
    seeds = {tuple(seed.numpy().tolist()) for seed in model._seeds(tf.constant(SEED))}
    assert len(seeds) == 1 + 3 * shape.num_hidden_layers


def test_dropout_preserves_the_expectation() -> None:
    dropped = _dropout(tf.ones([1000, 1000]), 0.1, tf.constant(SEED)).numpy()
    assert sorted(set(dropped.reshape(-1).tolist())) == pytest.approx([0.0, 1 / 0.9])
    for axis in (0, 1):
        # Six standard deviations of a mean of 1000.
        assert np.abs(dropped.mean(axis) - 1).max() < 0.06
    assert dropped.mean() == pytest.approx(1.0, abs=0.002)


def test_initial_weights_have_the_reference_distribution() -> None:
    model, again, other = (BertPretrainer(SHAPE, seed=seed).values() for seed in (3, 3, 4))
    for name, value in model.items():
        np.testing.assert_array_equal(value, again[name])
        if name.endswith("LayerNorm.weight"):
            assert (value == 1).all()
        elif name.endswith("bias"):
            assert (value == 0).all()
        else:
            assert np.abs(value).max() <= 2 * SHAPE.initializer_range
            assert not np.array_equal(value, other[name])
    large = model["bert.embeddings.word_embeddings.weight"]
    # The standard deviation of the truncated normal is 0.88 times that of the normal.
    assert large.std() == pytest.approx(0.88 * SHAPE.initializer_range, rel=0.03)
    query, key = (
        model[f"bert.encoder.layer.0.attention.self.{part}.weight"] for part in ("query", "key")
    )
    assert not np.array_equal(query, key)


def test_invalid_weights_change_nothing() -> None:
    model = BertPretrainer(SHAPE, seed=1)
    others = BertPretrainer(SHAPE, seed=2).values()
    before = model.values()
    with user_error("checkpoint.incomplete", "weights"):
        model.assign(
            {name: value for name, value in others.items() if name != "bert.pooler.dense.bias"}
        )
    for name, shape in {
        "classifier.weight": (2, 48),
        "bert.encoder.layer.1.output.dense.weight": (96, 48),
        "bert.embeddings.word_embeddings.weight": (169, 48),
        "bert.embeddings.position_embeddings.weight": (65, 48),
    }.items():
        with user_error("checkpoint.shape", "weights"):
            model.assign({**others, name: np.zeros(shape)})
    np.testing.assert_equal(model.values(), before)


def test_shapes_that_only_pytorch_supports_are_errors() -> None:
    alibi = {"position_embedding_type": "alibi"}
    pre_norm = {"norm_position": "pre"}
    for option in (alibi, pre_norm, {"gated_mlp": True}, {"tie_word_embeddings": False}):
        with user_error("model.unsupported", "bert_config"):
            BertPretrainer(dataclasses.replace(SHAPE, **option))


def test_loss_by_hand() -> None:
    assert [float(count) for count in objective.counts(ROWS)] == [2.0, 2.0]
    own = float(objective.loss(LOGITS, ROWS, objective.counts(ROWS)))
    assert own == pytest.approx(HALF / (2 + 1e-5) + (1000 + HALF) / 2, rel=1e-6)
    given = float(
        objective.loss(LOGITS, ROWS, objective.Counts(tf.constant(4.0), tf.constant(5.0)))
    )
    assert given == pytest.approx(HALF / (4 + 1e-5) + (1000 + HALF) / 5, rel=1e-6)


def test_sums_and_metrics_by_hand() -> None:
    found = objective.sums(LOGITS, ROWS)
    assert all(value.dtype == tf.float32 and value.shape == () for value in found)
    # With equal logits, the first one is the answer.
    np.testing.assert_allclose(found, objective.Sums(1, 2, HALF, 1, 2, 1000 + HALF), rtol=1e-6)
    expected = {
        "mlm_accuracy": 0.5,
        "loss": HALF / 2,
        "nsp_accuracy": 0.5,
        "nsp_loss": (1000 + HALF) / 2,
    }
    assert objective.metrics(found) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("case", [single_case, packed_case])
def test_metrics_match_pytorch(case: Callable) -> None:
    ragged, packs, rows = case()
    reference = pytorch_model(NO_DROPOUT)
    model = same_weights(reference)
    pretraining = PreTraining("step")
    batch = plain_batch(ragged, packs, list(range(len(packs))), rows.input_ids.shape[1])
    with torch.no_grad():
        likeliest = reference(batch, None).masked[:, : NO_DROPOUT.vocab_size].argmax(1)
    batch.masked_labels[::3] = likeliest[::3]  # so that some predictions are correct
    rows.masked_labels[rows.masked_weights == 1] = batch.masked_labels.numpy()
    expected = pretraining.metrics(pretraining.sums(reference, batch).tolist(), None)
    found = objective.metrics(objective.sums(model(tensors(rows), None), tensors(rows)))
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    assert 0 < found["mlm_accuracy"] < 1
