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
from same_weights import initialized
from step_counts import counted
from unit.ops.conftest import check_errors
from unit.ops.op_inputs import feed_forward_inputs, linear_qkv_inputs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Tokens, hidden size, columns.
SHAPES = [
    (1, 8, 24),
    (37, 16, 48),
    (64, 32, 64),
    (0, 16, 32),
    (65, 7, 9),
    (13, 20, 44),
]
FORMS = ("linear", "linear_qkv", "linear_gelu", "feed_forward")
SMALL = BertConfig(99, 32, 2, 2, 64, max_position_embeddings=32)

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on PATH")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gelu_layers_error(emulator, shape, exact, dtype):
    inputs = feed_forward_inputs(*shape)
    check_errors("feed_forward", [*inputs, exact], dtype, [0, 1, 2, 3], cublaslt.feed_forward)
    check_errors("linear_gelu", [*inputs[:3], exact], dtype, [0, 1, 2], cublaslt.linear_gelu)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 24), (1, 24), (77, 24), (10, 7)])
def test_linear_qkv_error(emulator, shape, dtype):
    check_errors(
        "linear_qkv", linear_qkv_inputs(*shape), dtype, list(range(7)), cublaslt.linear_qkv
    )


def gradients(function: Callable[..., Tensor], arguments: list[Any]) -> list[Tensor]:
    """Return the output and the gradients of all tensors."""
    inputs = [x.clone().requires_grad_() if isinstance(x, Tensor) else x for x in arguments]
    out = function(*inputs)
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    return [out.detach(), *(x.grad for x in inputs if isinstance(x, Tensor))]


def test_gradients_of_float32_weights_are_not_rounded_to_bfloat16(emulator):
    """With bfloat16 activations, weight gradients are closer to the exact ones than
    if they were rounded.
    """
    x, w1, b1, w2 = feed_forward_inputs(200, 16, 32)
    narrow = [
        x.bfloat16(),
        w1.bfloat16().float(),
        b1.bfloat16().float(),
        w2.bfloat16().float(),
        False,
    ]
    found = gradients(cublaslt.feed_forward, narrow)
    plain = gradients(reference.feed_forward, narrow)
    exact = gradients(
        reference.feed_forward, [x.double() if isinstance(x, Tensor) else x for x in narrow]
    )
    assert [x.dtype for x in found] == [torch.bfloat16, torch.bfloat16, *[torch.float32] * 3]
    for place in (2, 4):
        assert (found[place] - exact[place]).norm() < 0.9 * (plain[place] - exact[place]).norm()


def test_feed_forward_runs_four_products_in_cublaslt(emulator):
    """Forward is one product with an epilogue; backward is two weight gradients
    and one through GELU.

    Without a graph, forward gives the same bits.
    """
    arguments = [x.requires_grad_() for x in feed_forward_inputs(9, 16, 24)]
    out = cublaslt.feed_forward(*arguments, False)
    assert emulator.count("products") == 1
    out.sum().backward()
    assert emulator.count("products") == 4
    with torch.no_grad():
        assert torch.equal(cublaslt.feed_forward(*arguments, False), out)


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
def test_pytorch_replaces_unsupported_products(emulator, refused, dtype):
    emulator.refuse(*refused)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            arguments = [*feed_forward_inputs(9, 16, 24), False]
            check_errors("feed_forward", arguments, dtype, [0, 1, 2, 3], cublaslt.feed_forward)
        check_errors(
            "linear_qkv", linear_qkv_inputs(9, 16), dtype, list(range(7)), cublaslt.linear_qkv
        )
    texts = [str(warning.message) for warning in caught]
    gelu = {Epilogue.GELU_AUX_BIAS, Epilogue.GELU_BIAS, Epilogue.DGELU_BGRAD, 0}
    assert texts or (dtype == torch.float32 and gelu >= set(refused)), (
        "float32 does not use the GELU epilogues"
    )
    assert len(set(texts)) == len(texts), "each warning appears once"
    assert all(
        re.match(r"cublasLt has no algorithm for \d+x\d+x\d+, .*PyTorch's product runs", text)
        for text in texts
    )


def test_non_contiguous_tensors(emulator):
    x, w1, b1, w2 = feed_forward_inputs(9, 16, 24)
    plain = gradients(reference.feed_forward, [x, w1, b1, w2, False])

    def transposed(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, exact: bool) -> Tensor:
        x, w1, w2 = (tensor.t().contiguous().t() for tensor in (x, w1, w2))
        return cublaslt.feed_forward(x, w1, b1, w2, exact).t().contiguous().t()

    torch.testing.assert_close(gradients(transposed, [x, w1, b1, w2, False]), plain)


def test_linear_layers_use_cublaslt_on_cuda(emulator):
    for choice in ("auto", "cublaslt"):
        assert {registry.select(choice, "cuda")[op] for op in FORMS} == {"cublaslt"}
        assert "cublasLt 13.0.0" in registry.describe("cuda")
    assert not any("cublaslt" in names for names in registry.available("cpu").values())


def flat_gradients(micro_batches: int, names: dict[str, str]) -> tuple[Tensor, Counter[str]]:
    """Return the flat gradient after the second of two steps,
    and the last pass's calls of grad hooks by parameter.
    """
    model = initialized(BertForPreTraining(SMALL))
    calls = Counter()
    flat = FlatParameters(model.ordered_parameters())
    for segment, parameter in zip(flat.segments, flat.parameters, strict=True):
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=segment.name: calls.update([name])
        )
    registry.select_each(names)
    for _ in range(2):
        flat.zero_grad()
        for step in range(micro_batches):
            calls.clear()
            batch = made_up_batches(1, seed=3, vocab_size=99, max_tokens=32, step=step)[0].to("cpu")
            loss_of(model, batch, (1, step)).backward()
    return flat.grad, calls


@pytest.mark.parametrize(
    ("micro_batches", "refused"),
    [(1, ()), (3, ()), (1, (Epilogue.BGRADB,)), (3, (Epilogue.BGRADB, Epilogue.NONE))],
)
def test_gradients_are_accumulated_in_the_flat_buffer(emulator, micro_batches, refused):
    """Gradients equal autograd's, including those of tied embeddings,
    and each parameter's hook runs once.
    """
    expected, plain_calls = flat_gradients(micro_batches, {})
    emulator.refuse(*refused)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, calls = flat_gradients(micro_batches, dict.fromkeys(FORMS, "cublaslt"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    # 2 products forward and 5 backward per layer; 1 and 3 in the heads.
    assert refused or emulator.count("products") == 2 * micro_batches * (2 * 7 + 4)
    assert calls.keys() == plain_calls.keys()
    assert set(calls.values()) == {1}


def test_products_read_the_copy_of_the_weights(emulator):
    """With a bfloat16 copy of the weights, results are bit-equal and no weight is cast."""
    results = []
    for dtype in (None, torch.bfloat16):
        model = initialized(BertForPreTraining(SMALL, torch.bfloat16))
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
