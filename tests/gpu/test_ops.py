"""Every implementation of every op on a GPU against plain, on real and awkward shapes."""

import warnings
from typing import Any

import pytest
import torch

from awkward_batches import awkward_batches, awkward_lengths
from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import Batch
from mlbert.distributed.capture import CudaCapture
from mlbert.ops import forms as registry
from mlbert.programs.bench.sides import make_batch
from op_cases import OpCases
from op_checks import check_case, check_lamb, check_rows

OPS = (
    "attention",
    "dropout_add_layer_norm",
    "layer_norm_dropout",
    "masked_cross_entropy",
    "embedding_sum",
)
LINEAR = ("linear_qkv", "linear_gelu", "feed_forward")


def failures(
    config: BertConfig, batch: Batch, dtype: torch.dtype, op: str
) -> dict[str, dict[str, Any]]:
    """Return the failed checks of an op's implementations except plain."""
    rows = check_rows(config, OpCases(config, batch, dtype))
    results = {name: check() for name, check in rows if name.startswith(op)}
    assert results, f"no check of {op}"
    return {name: result for name, result in results.items() if not result["passed"]}


def test_triton_is_available(large, device):
    forms = registry.available("cuda")
    assert [op for op in OPS if "triton" not in forms[op]] == []
    assert check_lamb(large, device)["implementation"] == "triton"


def test_cublaslt_supports_the_model_shapes(large, device):
    """On the model's shapes every product has an algorithm; a fallback would warn."""
    assert [op for op in LINEAR if "cublaslt" not in registry.available("cuda")[op]] == []
    batch = make_batch(large, 24, None, seed=1).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        cases = OpCases(large, batch, torch.bfloat16)
        for op in LINEAR:
            assert check_case(getattr(cases, op)(), "cublaslt", torch.bfloat16)["passed"]


def test_cublaslt_in_a_graph(large, device):
    """A replay with changed inputs is bit-equal to running without a graph."""
    cases = OpCases(large, make_batch(large, 8, None, seed=1).to(device), torch.bfloat16)
    x, *weights, exact = cases.feed_forward().arguments(0)
    function = registry.form("feed_forward", "cublaslt")
    inputs = [tensor.clone().requires_grad_() for tensor in (x, *weights)]
    results: list[torch.Tensor] = []

    def step() -> None:
        out = function(*inputs, exact)
        results[:] = [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    capture = CudaCapture(device)
    capture.warm_up(step)
    replay = capture.record(step)
    captured = list(results)
    with torch.no_grad():
        inputs[0].copy_(x.flip(0))
    replay()
    step()
    torch.cuda.synchronize()
    assert all(
        torch.equal(graphed, plain) for graphed, plain in zip(captured, results, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("op", [*OPS, *LINEAR, "LAMB", "cast_transpose"])
def test_real_shapes(op, dtype, large, device):
    assert failures(large, make_batch(large, 24, None, seed=1).to(device), dtype, op) == {}


@pytest.mark.parametrize("name", awkward_lengths(512))
@pytest.mark.parametrize("op", OPS + LINEAR)
def test_awkward_shapes(op, name, large, device):
    assert failures(large, awkward_batches(large, device)[name], torch.bfloat16, op) == {}
