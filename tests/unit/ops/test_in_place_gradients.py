"""C kernels and the products around them write gradients into the flat buffer; the reference leaves
that to autograd.
"""

import shutil
from collections import Counter

import pytest
import torch
from torch import Tensor

from host_batches import made_up_batches
from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import BertForPreTraining
from mlbert.ops import forms as registry
from mlbert.optim.flat import FlatParameters
from model_loss import loss_of
from same_weights import initialized

POST_NORM = BertConfig(99, 32, 2, 2, 64, max_position_embeddings=32)
SHAPES = {
    "post-norm": POST_NORM,
    "odd sizes": BertConfig(101, 36, 1, 3, 52, max_position_embeddings=32),
    "erf": POST_NORM.with_options("hidden_act=gelu_erf"),
    "pre-norm, rotary, gated": BertConfig(
        99,
        32,
        2,
        2,
        64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        position_embedding_type="rotary",
        norm_position="pre",
        gated_mlp=True,
    ),
}

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on PATH")


def flat_gradients(
    shape: BertConfig, micro_batches: int, choice: str
) -> tuple[list[Tensor], Counter[str]]:
    """Return the flat gradients of three steps, and how often each parameter's hook ran in the
    last micro-batch.
    """
    registry.select(choice)
    model = initialized(BertForPreTraining(shape))
    flat = FlatParameters(model.ordered_parameters())
    calls = Counter[str]()
    for segment, parameter in zip(flat.segments, flat.parameters, strict=True):
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=segment.name: calls.update([name])
        )
    found = []
    for step in range(3):
        flat.begin_gradients()
        for micro_batch in range(micro_batches):
            calls.clear()
            number = step * micro_batches + micro_batch
            (batch,) = made_up_batches(
                1, seed=3, vocab_size=shape.vocab_size, max_tokens=32, step=number
            )
            loss_of(model, batch.to("cpu"), (1, step)).backward()
            flat.finish_gradients()
        found.append(flat.grad.clone())
    return found, calls


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradients_equal_autograds(shape, micro_batches):
    """Also those of tied embeddings and of buffers that are not zeroed between steps; each
    parameter's hook runs once.
    """
    expected, plain_calls = flat_gradients(shape, micro_batches, "plain")
    found, calls = flat_gradients(shape, micro_batches, "native")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert calls == plain_calls
    assert set(calls.values()) == {1}


def test_no_pass_adds_up_the_gradient_of_the_largest_table():
    """The products write the tied table's gradient, and the embedding adds its rows to that."""
    registry.select("native")
    model = initialized(BertForPreTraining(POST_NORM))
    flat = FlatParameters(model.ordered_parameters())
    table = model.bert.embeddings.word_embeddings.weight
    (batch,) = made_up_batches(1, seed=3, vocab_size=99, max_tokens=32)
    seen = list[Tensor | None]()
    table.register_hook(seen.append)
    flat.begin_gradients()
    loss_of(model, batch.to("cpu"), (1, 0)).backward()
    assert table.grad is not None
    assert bool(table.grad.any())
    assert all(gradient is None for gradient in seen), "autograd got a gradient to add"
