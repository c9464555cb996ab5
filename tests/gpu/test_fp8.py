"""FP8 linears on a GPU: the hardware's products against their plain twin, and no wait for the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlbert import ops
from mlbert.ops import fp8
from mlbert.ops.precision import FP8_CAPABILITY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < FP8_CAPABILITY,
        reason="needs a CUDA device of compute capability 8.9 or higher",
    ),
]


@pytest.mark.parametrize("tokens", [1, 17, 512, 4099])
def test_linear_equals_its_plain_twin(tokens: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    x, weight, bias, d_out = (
        torch.randn(*shape, generator=generator, device="cuda")
        for shape in ((tokens, 1024), (4096, 1024), (4096,), (tokens, 4096))
    )
    results: dict[str, list[Tensor]] = {}
    for choice in ("plain", "triton"):
        ops.select(choice, "cuda")
        scaling = fp8.Scaling(2, fp8.Products()).cuda()
        for _ in range(2):  # by each tensor's own maximum, then by the scales of the step before
            leaves = [x.bfloat16().requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_()]
            out = fp8.linear(*leaves, scaling.slot(1))
            out.backward(d_out.bfloat16() * 1e-6)
            scaling.update(lambda amax: amax)
        results[choice] = [out.detach(), *(leaf.grad for leaf in leaves)]
    ops.select("auto")
    for found, expected in zip(results["triton"], results["plain"], strict=True):
        assert (found.float() - expected.float()).norm() <= 0.01 * expected.float().norm()


def test_a_step_never_waits_for_the_device() -> None:
    ops.select("auto", "cuda")
    scaling = fp8.Scaling(1, fp8.Products()).cuda()
    x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(256, 128, device="cuda", requires_grad=True)
    for step in range(3):
        if step:
            torch.cuda.set_sync_debug_mode("error")
        try:
            fp8.linear(x, weight, None, scaling.slot(0)).sum().backward()
            scaling.update(lambda amax: amax)
        finally:
            torch.cuda.set_sync_debug_mode("default")
