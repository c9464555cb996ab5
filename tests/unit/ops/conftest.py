"""Fixtures for the op tests: seeds, implementations or a skip with its reason, the error rule,
an emulated cublasLt.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from emulated_cublaslt import Emulator, compile_emulator
from mlbert.host import native
from mlbert.ops import api as ops
from mlbert.ops import cublaslt, native_library, reference
from mlbert.ops.comparison import ErrorRule, draws_for, pytorchs_own
from mlbert.ops.dropout import attention_keep_mask
from unit.ops import op_inputs


@pytest.fixture(autouse=True)
def reseed(restore_selection: None) -> None:
    """Make the inputs and ops of a test independent of the tests that ran before it."""
    op_inputs.GENERATOR.manual_seed(0)


@pytest.fixture(scope="session")
def native_ops() -> None:
    """Skip the test if the native kernels cannot be compiled."""
    try:
        native_library.library()
    except native.NativeUnavailable as error:
        pytest.skip(f"no native kernels: {error}")


@pytest.fixture
def use_native(native_ops: None) -> None:
    ops.select("native")


@pytest.fixture(params=["native", "triton"])
def kernels(request: pytest.FixtureRequest) -> str:
    """Select and return native or, in a process that interprets Triton kernels, triton."""
    request.getfixturevalue("native_ops" if request.param == "native" else "use_triton")
    if request.param == "native" and os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("native kernels are tested in the process that started this one")
    assert ops.select(request.param)["attention"] == request.param
    return request.param


@pytest.fixture(params=["plain", "auto", "triton"])
def choice(request: pytest.FixtureRequest) -> str:
    """Select and return a choice for the FP8 ops; with a compiler,
    auto uses torch._scaled_mm for products.
    """
    if request.param == "triton":
        request.getfixturevalue("use_triton")
    ops.select(request.param)
    return request.param


def run(
    function: Callable[..., Any], arguments: Sequence[Any], dtype, gradient_of: Sequence[int]
) -> list[Tensor]:
    """Return the output and the gradients of these arguments,
    with all floating-point arguments cast to `dtype`.
    """
    prepared = [
        x.to(dtype).clone().requires_grad_(i in gradient_of)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for i, x in enumerate(arguments)
    ]
    result = function(*prepared)
    out = result[0] if isinstance(result, tuple) else result
    generator = torch.Generator().manual_seed(7)
    gradient = torch.randn(out.shape, generator=generator).bfloat16().to(out.dtype)
    out.backward(gradient)
    return [out.detach(), *(prepared[i].grad for i in gradient_of)]


def check_errors(
    name: str, arguments, dtype, gradient_of: Sequence[int], form: Callable[..., Any] | None = None
):
    """Assert that the output and some gradients of an op, or of a form,
    obey the rule of `mlbert.ops.comparison`.

    `arguments` may be a function that draws them, for ops where one draw gives too few numbers.
    """
    names = ["output", *(f"gradient of argument {place}" for place in gradient_of)]

    def results(
        function: Callable[..., Any], drawn: Sequence[Any], precision: torch.dtype
    ) -> dict[str, Tensor]:
        return dict(zip(names, run(function, drawn, precision, gradient_of), strict=True))

    rule = ErrorRule(torch.finfo(dtype).eps)
    draw = 0
    draws = 1
    while draw < draws:
        drawn = arguments() if callable(arguments) else arguments
        # Round first, so that all precisions compute with the same numbers.
        drawn = [
            x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in drawn
        ]
        exact = results(getattr(reference, name), drawn, torch.float64)
        fast = results(form or getattr(ops, name), drawn, dtype)
        for what, value in fast.items():
            assert value.shape == exact[what].shape
            assert torch.isfinite(value).all(), what
        rule.add(
            exact, fast, [results(function, drawn, dtype) for function in pytorchs_own(name, dtype)]
        )
        draws = (
            draws_for(min(value.numel() for value in exact.values())) if callable(arguments) else 1
        )
        draw += 1
    verdict = rule.verdict()
    assert verdict.passed, f"{name}, {verdict.why}"


def check_attention_mask(
    attention: Callable[..., Tensor],
    length: int,
    num_heads: int,
    head_size: int,
    dtype: torch.dtype,
    probability: float = 0.1,
    window: int | None = None,
) -> None:
    """Assert that attention uses the dropout mask of each head.

    With equal scores and one-hot values, the output is the mask, `head_size` keys at a time. With
    one-hot gradients of the output, the gradient of V is the transposed mask, `head_size` queries
    at a time.
    """
    key = 0xF1234567
    _, cu_seqlens, _, rows = op_inputs.packed_qkv([17, length], num_heads, head_size)
    want = attention_keep_mask(key, rows[17:], num_heads, length, probability)
    if window is not None:
        distance = torch.arange(length)[:, None] - torch.arange(length)
        want &= distance.abs() <= window
    for first in range(0, length, head_size):
        places = torch.arange(first, min(first + head_size, length))
        one_hot = torch.zeros(17 + length, num_heads, head_size, dtype=dtype)
        one_hot[17 + places, :, places - first] = 1.0
        qkv = torch.stack(
            [torch.zeros_like(one_hot), torch.zeros_like(one_hot), one_hot], 1
        ).requires_grad_()
        out = attention(qkv, cu_seqlens, length, probability, key, rows, None, window)
        out.backward(one_hot)
        assert torch.equal((out[17:] != 0).transpose(0, 1)[:, :, : len(places)], want[:, :, places])
        assert torch.equal(
            (qkv.grad[17:, 2] != 0).permute(1, 2, 0)[:, : len(places)], want[:, places]
        )


@pytest.fixture(scope="session")
def emulator_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("emulator") / "libcublaslt_emulator.so"
    compile_emulator(path)
    return path


@pytest.fixture
def emulator(emulator_path: Path) -> Iterator[Emulator]:
    """Replace cublasLt with the emulator.

    Warnings are errors, so that no fallback goes unnoticed.
    """
    emulator = Emulator(emulator_path)
    cublaslt.use(emulator.library)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield emulator
    cublaslt.use(None)
    emulator.refuse()
    emulator.offer(1)
    emulator.library.close()
    assert emulator.count("living") == 0, "descriptors or handles were not destroyed"
