"""Ceilings of the passes that a step makes besides its kernels;
`step_counts` says what is counted.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from host_batches import made_up_batches
from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import BertForPreTraining
from mlbert.ops import api as ops
from mlbert.ops import cublaslt
from mlbert.ops import forms as registry
from mlbert.ops.fp8_scaling import Products
from mlbert.optim.flat import FlatParameters
from model_loss import loss_of
from step_counts import Counts, counted

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("use_triton")

LAYERS = 4
SHAPE = BertConfig(200, 64, LAYERS, 2, 128, max_position_embeddings=64)
LINEAR_OPS = ("linear", "linear_qkv", "linear_gelu", "feed_forward")


@pytest.fixture(autouse=True)
def fast_ops(use_triton: None) -> Iterator[None]:
    """The forms that a GPU takes."""
    names = ops.select("triton")
    registry.select_each(names | dict.fromkeys(LINEAR_OPS, "cublaslt"))
    # Without products.
    cublaslt.use(SimpleNamespace(version=130000, product=lambda *tensors, **arguments: True))
    yield
    cublaslt.use(None)
    ops.select("auto")


def counts_of(products: Products | None, packs: int, least: int | None = None) -> Counts:
    """Of a step's first passes on packs of 64 tokens,
    of results of `least` elements (default: of a hidden state).
    """
    model = BertForPreTraining(SHAPE, torch.bfloat16, fp8_products=products)
    flat = FlatParameters(model.ordered_parameters())
    flat.keep_copy(None if products else torch.bfloat16)
    (batch,) = made_up_batches(packs, seed=1, vocab_size=200, max_tokens=64)
    model.bert.linears.is_calibrated = True
    model.refresh()
    with counted(least or batch.num_tokens * SHAPE.hidden_size) as counts:
        loss_of(model, batch.to("cpu"), (1, 1)).backward()
    return counts


@pytest.mark.parametrize("products", [None, Products()])
def test_no_pass_over_a_hidden_state_is_wasted(products):
    """Gradients that are never read are not cleared;
    the two readers' gradients of a hidden state are added by the norm.

    What is left does not grow with the layers: the last one's rows go back among all tokens (a fill
    each for context and residual), the embeddings' sum is float32 and has two readers (an add, and
    a cast each way).
    """
    assert counts_of(products, packs=24) == {
        ("fills", "bfloat16"): 2,
        ("adds", "bfloat16"): 1,
        ("casts", "bfloat16"): 1,
        ("casts", "float32"): 1,
    }


def test_no_pass_over_a_weight_is_wasted():
    """Products read the optimizer's copy, or their own in FP8, and write their gradients where they
    are kept, as the embeddings do.

    With FP8 products there is no copy, so the heads convert their three weights.
    """
    least = SHAPE.hidden_size**2
    assert counts_of(None, packs=1, least=least) == {}
    assert counts_of(Products(), packs=1, least=least) == {("casts", "bfloat16"): 3}
