"""A small BERT trained in FP8 follows the bfloat16 loss curve."""

from __future__ import annotations

import pytest
import torch

from mlbert.data.synthetic import SyntheticSource
from mlbert.models import BertConfig, BertForPreTraining, DropoutState
from mlbert.ops.fp8 import Products
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb

SHAPE = BertConfig(
    vocab_size=200,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=128,
    max_position_embeddings=64,
)
STEPS = 60
# Largest distance of the two curves, in nats of a loss that falls by 6; other weights at the start are 0.07 to 0.3 off.
BOUND = 0.03


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors on several threads spend their time waiting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def losses(products: Products | None, seed: int = 3) -> list[float]:
    """Sixty updates on the same few samples, which the model learns by heart, with dropout."""
    model = BertForPreTraining(SHAPE, torch.bfloat16, fp8_products=products)
    model.initialize(seed)
    flat = FlatParameters(model.ordered_parameters())
    optimizer = Lamb(flat, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, max_grad_norm=1.0)
    source = SyntheticSource(packs_per_step=4, seed=1, vocab_size=200, max_tokens=64)
    (batch,) = source.batches_of(0)
    curve = []
    for step in range(STEPS):
        flat.zero_grad()
        loss = model(batch, DropoutState(seed, step)).loss(batch.num_masked, batch.num_samples)
        loss.backward()
        assert not optimizer.step(0.03).skipped
        if model.bert.scaling:
            model.bert.scaling.update(lambda amax: amax)
        curve.append(float(loss.detach()))
    return curve


def test_fp8_follows_the_bfloat16_curve():
    expected = losses(None)
    assert expected[0] - expected[-1] > 5, "the comparison needs a loss that falls"
    for products in (Products(), Products(input_gradient=False, weight_gradient=False)):
        found = losses(products)
        assert found != expected, "FP8 products ran"
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < BOUND
