"""Every implementation of every op on a GPU against plain, on real and awkward shapes."""

import warnings
from typing import Any

import pytest
import torch

from awkward_batches import awkward_batches, awkward_lengths
from gpu_check.op_cases import Case, OpCases
from gpu_check.op_checks import check_case, check_cast, check_dropout_rate, check_lamb
from mlbert.config.bert_config import BertConfig
from mlbert.distributed.capture import CudaCapture
from mlbert.ops import forms as registry
from mlbert.programs.bench.step_time import make_batch

OPS = ("attention", "dropout_add_layer_norm", "layer_norm_dropout", "masked_cross_entropy", "embedding_sum")
LINEAR = ("linear_qkv", "linear_gelu", "feed_forward")


def cases_of(config: BertConfig, batch: Any, dtype: torch.dtype, op: str) -> list[Case]:
    cases = OpCases(config, batch, dtype)
    if op == "attention":
        return [cases.attention(0.1), cases.attention(0.0), cases.attention(0.1, alibi=True)]
    return [getattr(cases, op)()]


def assert_all_forms_agree(cases: list[Case], dtype: torch.dtype) -> None:
    """Check all implementations except plain; PyTorch's FlashAttention only if no dropout mask is needed."""
    for case in cases:
        for form in registry.available("cuda")[case.op]:
            if form == "plain" or (
                form == "flash" and (case.name != "attention without dropout" or dtype.itemsize > 2)
            ):
                continue
            result = check_case(case, form, dtype)
            assert result["passed"], f"{case.name}, {form}: {result}"


def test_triton_is_available():
    forms = registry.available("cuda")
    assert [op for op in OPS if "triton" not in forms[op]] == []


def test_cublaslt_supports_the_model_shapes(large, device):
    """On the model's shapes every product has an algorithm; a fallback would warn."""
    assert [op for op in LINEAR if "cublaslt" not in registry.available("cuda")[op]] == []
    batch = make_batch(large, 24, None, seed=1).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for op in LINEAR:
            (case,) = cases_of(large, batch, torch.bfloat16, op)
            assert check_case(case, "cublaslt", torch.bfloat16)["passed"]


def test_cublaslt_in_a_graph(large, device):
    """A replay with changed inputs is bit-equal to running without a graph."""
    (case,) = cases_of(large, make_batch(large, 8, None, seed=1).to(device), torch.bfloat16, "feed_forward")
    x, *weights, exact = case.arguments(0)
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
    assert all(torch.equal(graphed, plain) for graphed, plain in zip(captured, results, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("op", OPS + LINEAR)
def test_real_shapes(op, dtype, large, device):
    batch = make_batch(large, 24, None, seed=1).to(device)
    assert_all_forms_agree(cases_of(large, batch, dtype, op), dtype)


@pytest.mark.parametrize("name", awkward_lengths(512))
@pytest.mark.parametrize("op", OPS + LINEAR)
def test_awkward_shapes(op, name, large, device):
    batch = awkward_batches(large, device)[name]
    assert_all_forms_agree(cases_of(large, batch, torch.bfloat16, op), torch.bfloat16)


@pytest.mark.parametrize("form", ["plain", "triton", "flash"])
def test_dropout_rate(form, large, device):
    batch = make_batch(large, 24, None, seed=1).to(device)
    result = check_dropout_rate(form, OpCases(large, batch, torch.bfloat16))
    assert result["passed"], result


def test_lamb(large, device):
    result = check_lamb(large, device)
    assert result["implementation"] == "triton"
    assert result["passed"], result


def test_casts(large, device):
    result = check_cast(OpCases(large, make_batch(large, 24, None, seed=1).to(device), torch.bfloat16))
    assert result["passed"], result
