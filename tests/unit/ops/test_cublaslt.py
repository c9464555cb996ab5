"""Linear layers with cublasLt, without a GPU: `cublaslt_emulator.c` replaces NVIDIA's library."""

import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from host_batches import made_up_batches
from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import BertForPreTraining
from mlbert.ops import cublaslt, proof, reference
from mlbert.ops import forms as registry
from mlbert.ops.cublaslt_library import Epilogue
from mlbert.optim.flat import FlatParameters
from model_loss import loss_of
from step_counts import counted
from unit.ops.op_inputs import feed_forward_inputs, linear_qkv_inputs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 8, 24), (37, 16, 48), (64, 32, 64), (0, 16, 32), (65, 7, 9), (13, 20, 44)]  # tokens, hidden, columns
FORMS = ("linear", "linear_qkv", "linear_gelu", "feed_forward")

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on PATH")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gelu_layers_error(emulator, error_rule, shape, exact, dtype):
    inputs = feed_forward_inputs(*shape)
    error_rule("feed_forward", [*inputs, exact], dtype, [0, 1, 2, 3], cublaslt.feed_forward)
    error_rule("linear_gelu", [*inputs[:3], exact], dtype, [0, 1, 2], cublaslt.linear_gelu)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 24), (1, 24), (77, 24), (10, 7)])
def test_linear_qkv_error(emulator, error_rule, shape, dtype):
    error_rule("linear_qkv", linear_qkv_inputs(*shape), dtype, list(range(7)), cublaslt.linear_qkv)


def gradients(function: Callable[..., Tensor], arguments: list[Any]) -> list[Tensor]:
    """Return the output and the gradients of all tensors."""
    inputs = [x.clone().requires_grad_() if isinstance(x, Tensor) else x for x in arguments]
    out = function(*inputs)
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    return [out.detach(), *(x.grad for x in inputs if isinstance(x, Tensor))]


def test_gradients_of_float32_weights_are_not_rounded_to_bfloat16(emulator):
    """With bfloat16 activations, weight gradients are closer to the exact ones than if they were rounded."""
    x, w1, b1, w2 = feed_forward_inputs(200, 16, 32)
    narrow = [x.bfloat16(), w1.bfloat16().float(), b1.bfloat16().float(), w2.bfloat16().float(), False]
    found = gradients(cublaslt.feed_forward, narrow)
    plain = gradients(reference.feed_forward, narrow)
    exact = gradients(reference.feed_forward, [x.double() if isinstance(x, Tensor) else x for x in narrow])
    assert [x.dtype for x in found] == [torch.bfloat16, torch.bfloat16, *[torch.float32] * 3]
    for place in (2, 4):
        assert (found[place] - exact[place]).norm() < 0.9 * (plain[place] - exact[place]).norm()


def test_feed_forward_runs_four_products_in_cublaslt(emulator):
    """Forward is one product with an epilogue; backward is two weight gradients and one through GELU."""
    arguments = [x.requires_grad_() for x in feed_forward_inputs(9, 16, 24)]
    out = cublaslt.feed_forward(*arguments, False)
    assert emulator.count("products") == 1
    out.sum().backward()
    assert emulator.count("products") == 4


@pytest.mark.parametrize(
    "refused",
    [
        (Epilogue.NONE,),
        (Epilogue.BIAS, Epilogue.BGRADB),
        (Epilogue.GELU_AUX_BIAS, Epilogue.GELU_BIAS),
        (0, Epilogue.DGELU_BGRAD),
        (Epilogue.DGELU_BGRAD, Epilogue.BGRADB, Epilogue.NONE, Epilogue.GELU_AUX_BIAS),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pytorch_replaces_unsupported_products(emulator, error_rule, refused, dtype):
    emulator.refuse(*refused)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            arguments = [*feed_forward_inputs(9, 16, 24), False]
            error_rule("feed_forward", arguments, dtype, [0, 1, 2, 3], cublaslt.feed_forward)
        error_rule("linear_qkv", linear_qkv_inputs(9, 16), dtype, list(range(7)), cublaslt.linear_qkv)
    texts = [str(warning.message) for warning in caught]
    gelu = {Epilogue.GELU_AUX_BIAS, Epilogue.GELU_BIAS, Epilogue.DGELU_BGRAD, 0}
    assert texts or (dtype == torch.float32 and gelu >= set(refused)), "float32 does not use the GELU epilogues"
    assert len(set(texts)) == len(texts), "each warning appears once"
    assert all(re.match(r"cublasLt has no algorithm for \d+x\d+x\d+, .*PyTorch's product runs", text) for text in texts)


def test_evaluation_equals_training_without_a_graph(emulator):
    x, w1, b1, w2 = (t.requires_grad_() for t in feed_forward_inputs(9, 16, 24))
    with torch.no_grad():
        evaluation = cublaslt.feed_forward(x, w1, b1, w2, False)
    training = cublaslt.feed_forward(x, w1, b1, w2, False)
    assert torch.equal(evaluation, training)
    assert not evaluation.requires_grad


def test_non_contiguous_tensors(emulator):
    x, w1, b1, w2 = feed_forward_inputs(9, 16, 24)
    plain = gradients(reference.feed_forward, [x, w1, b1, w2, False])

    def transposed(*arguments: Any) -> Tensor:
        x, w1, b1, w2, exact = arguments
        out = cublaslt.feed_forward(x.t().contiguous().t(), w1.t().contiguous().t(), b1, w2.t().contiguous().t(), exact)
        return out.t().contiguous().t()

    for found, wanted in zip(gradients(transposed, [x, w1, b1, w2, False]), plain, strict=True):
        torch.testing.assert_close(found, wanted)


def test_linear_layers_use_cublaslt_on_cuda(emulator):
    for choice in ("auto", "cublaslt", "flash"):
        chosen = registry.select(choice, "cuda")
        assert {chosen[op] for op in FORMS} == {"cublaslt"}
        assert "cublasLt 13.0.0" in registry.describe("cuda")
    assert all("cublaslt" in registry.available("cuda")[op] for op in FORMS)
    assert not any("cublaslt" in names for names in registry.available("cpu").values())


SMALL = BertConfig(99, 32, 2, 2, 64, max_position_embeddings=32)


def test_model_with_cublaslt_equals_the_plain_model(emulator):
    batch = made_up_batches(2, seed=3, vocab_size=99, max_tokens=32)[0].to("cpu")
    results = []
    for names in ({}, dict.fromkeys(FORMS, "cublaslt")):
        model = BertForPreTraining(SMALL)
        model.initialize(seed=1)
        registry.select_each(names)
        loss = loss_of(model, batch, (1, 2))
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    # 2 products forward and 5 backward per layer; 1 and 3 in the heads.
    assert emulator.count("products") == 2 * 7 + 4
    for plain, found in zip(*results, strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-6)


def flat_gradients(micro_batches: int, names: dict[str, str], hook_calls: Counter[str]) -> Tensor:
    """Return the flat gradient after the second of two steps, and count the last backward pass's calls of grad hooks.

    Args:
        micro_batches: per step.
        names: op -> implementation.
        hook_calls: receives the calls by parameter.
    """
    model = BertForPreTraining(SMALL)
    model.initialize(seed=1)
    flat = FlatParameters(model.ordered_parameters())
    for segment, parameter in zip(flat.segments, flat.parameters, strict=True):
        parameter.register_post_accumulate_grad_hook(lambda _, name=segment.name: hook_calls.update([name]))
    registry.select_each(names)
    for _ in range(2):
        flat.zero_grad()
        for step in range(micro_batches):
            hook_calls.clear()
            batch = made_up_batches(1, seed=3, vocab_size=99, max_tokens=32, step=step)[0].to("cpu")
            loss_of(model, batch, (1, step)).backward()
    return flat.grad


@pytest.mark.parametrize(
    ("micro_batches", "refused"), [(1, ()), (3, ()), (1, (Epilogue.BGRADB,)), (3, (Epilogue.BGRADB, Epilogue.NONE))]
)
def test_gradients_are_accumulated_in_the_flat_buffer(emulator, micro_batches, refused):
    """Gradients equal autograd's, including those of tied embeddings, and each parameter's hook runs once."""
    plain_calls: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    expected = flat_gradients(micro_batches, {}, plain_calls)
    emulator.refuse(*refused)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = flat_gradients(micro_batches, dict.fromkeys(FORMS, "cublaslt"), calls)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert calls.keys() == plain_calls.keys()
    assert set(calls.values()) == {1}


def test_products_read_the_copy_of_the_weights(emulator):
    """With a bfloat16 copy of the weights, results are bit-equal and no weight is cast."""
    results = []
    for dtype in (None, torch.bfloat16):
        model = BertForPreTraining(SMALL, torch.bfloat16)
        model.initialize(seed=1)
        flat = FlatParameters(model.ordered_parameters())
        flat.keep_copy(dtype)
        if flat.padded_copy is not None:
            flat.padded_copy.copy_(flat.padded_data)
        batch = made_up_batches(2, seed=3, vocab_size=99, max_tokens=32)[0].to("cpu")
        registry.select_each(dict.fromkeys(FORMS, "cublaslt"))
        with counted(SMALL.hidden_size**2) as counts:
            loss_of(model, batch, (1, 2)).backward()
        results.append((flat.grad, counts["casts", "bfloat16"]))
    assert torch.equal(results[0][0], results[1][0])
    weights = 4 * SMALL.num_hidden_layers + 3  # three in the heads
    assert results[0][1] - results[1][1] == weights


@pytest.mark.parametrize("op", [*FORMS, "fp8_product"])
def test_library_with_wrong_results_fails_verification(emulator, monkeypatch, op):
    cpu = torch.device("cpu")
    assert proof.check(op, "cublaslt", cpu, torch.bfloat16) == ""
    assert emulator.count("products") > 0
    product = emulator.library.product

    def flipped(out: Tensor, left: Tensor, right: Tensor, **arguments: Any) -> bool:
        done = product(out, left, right, **arguments)
        out.copy_(out.flip(0))
        return done

    monkeypatch.setattr(emulator.library, "product", flipped)
    assert "error" in proof.check(op, "cublaslt", cpu, torch.bfloat16)
