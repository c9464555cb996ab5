"""FP8 linear layers on a GPU: hardware products against the plain implementation."""

import pytest
import torch
from torch import Tensor

from mlbert.ops import api as ops
from mlbert.ops import forms as registry
from mlbert.ops import fp8, fp8_scaling

pytestmark = pytest.mark.usefixtures("fp8_gpu")


@pytest.mark.parametrize("tokens", [1, 17, 512, 4099])
def test_linear_matches_plain(tokens):
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = ((tokens, 1024), (4096, 1024), (4096,), (tokens, 4096))
    x, weight, bias, d_out = (
        torch.randn(*shape, generator=generator, device="cuda") for shape in shapes
    )
    results: dict[str, list[Tensor]] = {}
    for choice in ("plain", "triton"):
        ops.select(choice, "cuda")
        scaling = fp8_scaling.FP8Scaling(2, fp8_scaling.Products()).cuda()
        for _ in range(2):  # scaled by each tensor's maximum, then by the previous step's scales
            leaves = [
                x.bfloat16().requires_grad_(),
                weight.clone().requires_grad_(),
                bias.clone().requires_grad_(),
            ]
            out = fp8.linear(leaves[0], leaves[1:2], leaves[2:], scaling, 1)
            out.backward(d_out.bfloat16() * 1e-6)
            scaling.end_step(lambda amax: amax)
        results[choice] = [out.detach(), *(leaf.grad for leaf in leaves)]
    for found, expected in zip(results["triton"], results["plain"], strict=True):
        assert (found.float() - expected.float()).norm() <= 0.01 * expected.float().norm()


@pytest.mark.parametrize(
    ("exact", "name"), [(False, "triton"), (True, "triton"), (False, "fused"), (False, "gluon")]
)
@pytest.mark.parametrize("tokens", [0, 1, 17, 4099])
def test_feed_forward_matches_plain(tokens, exact, name):
    """Both feed-forward layers with GELU and LayerNorm, forward and backward."""
    if name not in registry.available("cuda")["fp8_product_gelu"]:
        pytest.skip(f"no {name} kernels for this GPU")
    generator = torch.Generator("cuda").manual_seed(2)
    shapes = (
        (tokens, 1024),
        (tokens, 1024),
        (4096, 1024),
        (4096,),
        (1024, 4096),
        (1024,),
        (1024,),
        (1024,),
    )
    values = [torch.randn(*shape, generator=generator, device="cuda") for shape in shapes]
    for index in (2, 4):
        values[index] *= 0.02
    rows = torch.arange(tokens, dtype=torch.int32, device="cuda")
    results: dict[str, list[Tensor]] = {}
    for choice in ("plain", name):
        ops.select(choice, "cuda")
        scaling = fp8_scaling.FP8Scaling(3, fp8_scaling.Products(fast=name != "triton")).cuda()
        for _ in range(2):
            x, residual = (value.bfloat16().requires_grad_() for value in values[:2])
            w1, b1, w2, gain, shift, b2 = (value.clone().requires_grad_() for value in values[2:])
            norm = (gain, shift, 1e-12, 0.1, 5, rows, b2)
            small = fp8.quantize(x.detach(), scaling, 0, fp8_scaling.INPUT)
            out, copy, _ = fp8.feed_forward(
                x, residual, small, (w1, b1, w2), exact, norm, scaling, 0, 2
            )
            torch.autograd.backward([out, copy], [torch.ones_like(out) * 1e-6] * 2)
            scaling.end_step(lambda amax: amax)
        leaves = (x, residual, w1, b1, w2, gain, shift, b2)
        results[choice] = [
            out.detach(),
            *scaling.derived_state().values(),
            *(leaf.grad for leaf in leaves),
        ]
    for number, (found, expected) in enumerate(zip(results[name], results["plain"], strict=True)):
        # Gradients are rounded to e5m2 twice, an error of 0.05,
        # and some numbers round the other way.
        limit = 0.02 if number < 3 else 0.06
        assert (found.float() - expected.float()).norm() <= limit * expected.float().norm()


def test_product_with_bias():
    a, b = (torch.randn(n, 64, device="cuda").to(torch.float8_e4m3fn) for n in (17, 48))
    bias = torch.randn(48, device="cuda").bfloat16()
    one = torch.ones((), device="cuda")
    found = fp8.product(a, b, (one, one), torch.bfloat16, fast=True, bias=bias)
    expected = a.float() @ b.float().t() + bias.float()
    assert (found.float() - expected).norm() <= 0.005 * expected.norm()
