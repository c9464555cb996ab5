"""Shared by the op tests: the native implementation or a skip with its reason, and the error rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mlbert import ops
from mlbert.core import native
from mlbert.ops import native_library, reference

Check = Callable[..., None]
MAX_ERROR_RATIO = 2.0
# Where PyTorch happens to be exact, a form may still be off by a quarter of a rounding step.
FLOOR_STEPS = 0.25


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Small tensors on several threads spend their time waiting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def native_ops() -> None:
    """Skips where the kernels can't be compiled."""
    try:
        native_library.library()
    except native.NativeUnavailable as error:
        pytest.skip(f"no native kernels: {error}")


@pytest.fixture
def use_native(native_ops: None) -> None:
    ops.select("native")
    yield
    ops.select("auto")


def run(
    function: Callable[..., Any], arguments: Sequence[Any], dtype: torch.dtype, wanted: Sequence[int]
) -> list[Tensor]:
    """[output, gradient of each wanted argument], with the floating arguments in `dtype`; rounded to bfloat16 first
    where `dtype` is not float32, so that the exact and the fast form see the same numbers."""
    prepared = [
        x.to(dtype).clone().requires_grad_(i in wanted) if isinstance(x, Tensor) and x.is_floating_point() else x
        for i, x in enumerate(arguments)
    ]
    result = function(*prepared)
    out = result[0] if isinstance(result, tuple) else result
    generator = torch.Generator().manual_seed(7)
    gradient = torch.randn(out.shape, generator=generator).bfloat16().to(out.dtype)
    out.backward(gradient)
    return [out.detach(), *(prepared[i].grad for i in wanted)]


def errors(result: Tensor, exact: Tensor) -> tuple[float, float]:
    """Root mean square and largest error."""
    difference = result.double() - exact.double()
    return difference.norm().item() / max(
        1, exact.numel()
    ) ** 0.5, difference.abs().max().item() if exact.numel() else 0.0


@pytest.fixture
def error_rule(use_native: None) -> Check:
    """check(name, arguments, dtype, gradient_of): output and gradients of the public op are at most twice as far from
    the float64 twin as the plain twin at the same precision. `form` stands in for the public op."""

    def check(
        name: str,
        arguments: Sequence[Any],
        dtype: torch.dtype,
        gradient_of: Sequence[int],
        form: Callable[..., Any] | None = None,
    ) -> None:
        arguments = [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]
        exact = run(getattr(reference, name), arguments, torch.float64, gradient_of)
        plain = run(getattr(reference, name), arguments, dtype, gradient_of)
        fast = run(form or getattr(ops, name), arguments, dtype, gradient_of)
        step = torch.finfo(dtype).eps * FLOOR_STEPS
        for place, (e, p, f) in enumerate(zip(exact, plain, fast, strict=True)):
            what = "output" if place == 0 else f"gradient of argument {gradient_of[place - 1]}"
            assert f.shape == e.shape
            assert torch.isfinite(f).all(), what
            scales = e.norm().item() / max(1, e.numel()) ** 0.5, e.abs().max().item() if e.numel() else 0.0
            for kind, error, allowed, scale in zip(("rms", "largest"), errors(f, e), errors(p, e), scales, strict=True):
                assert error <= MAX_ERROR_RATIO * allowed + step * scale, (
                    f"{name}, {what}: {kind} {error} > 2 x {allowed}"
                )

    return check
