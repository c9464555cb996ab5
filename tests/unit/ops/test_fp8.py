"""FP8 linears: rounding, delayed scales, the fast product against its plain twin, and the error against float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlbert import ops
from mlbert.ops import fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Half a step of the mantissa: 3 bits and 2 bits. A product's error is below the sum of its operands'.
STEP = {E4M3: 2**-4, E5M2: 2**-3}
SHAPES = [(1, 16, 16), (5, 16, 48), (33, 64, 32), (513, 32, 96)]  # tokens, input, output


@pytest.fixture(params=["plain", "auto", "triton"])
def choice(request: pytest.FixtureRequest) -> str:
    """The forms of quantising and of the product; auto is torch._scaled_mm unless there is no compiler."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
        request.getfixturevalue("use_triton")
    ops.select(request.param)
    yield request.param
    ops.select("auto")


def scaling_of(products: fp8.Products | None = None) -> fp8.Scaling:
    return fp8.Scaling(1, products or fp8.Products())


def example(tokens: int, width: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens + columns)
    x = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(columns, width, generator=generator) * 0.02).requires_grad_()
    bias = (torch.randn(columns, generator=generator) * 0.1).requires_grad_()
    d_out = (torch.randn(tokens, columns, generator=generator) * 1e-6).to(dtype)
    return x, weight, bias, d_out


def outcome(function, x: Tensor, *tensors: Tensor, d_out: Tensor) -> list[Tensor]:
    """Output, gradient of x and of the tensors."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, *tensors)]
    out = function(*leaves)
    out.backward(d_out.to(out.dtype))
    return [out.detach().float(), *(leaf.grad.float() for leaf in leaves)]


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_quantise_rounds_clamps_and_keeps_nan(choice: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([[0.0, 1.0, -0.3, 1e9, -torch.inf, torch.nan, 1.1, 3.0]])
    amax = torch.zeros(())
    rows, columns = fp8.quantise(x, torch.tensor(2.0), amax, dtype)
    expected = (x * 2).clamp(-largest, largest).to(dtype).float()
    torch.testing.assert_close(rows.float(), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(columns.float(), expected.t(), rtol=0, atol=0, equal_nan=True)
    assert columns.is_contiguous()
    assert rows.float()[0, 3] == largest


def test_amax_is_raised_never_lowered(choice: str) -> None:
    amax = torch.tensor(3.0)
    for top, expected in ((2.0, 3.0), (5.0, 5.0), (4.0, 5.0)):
        fp8.quantise(torch.tensor([[top, -1.0]]), torch.tensor(1.0), amax, E4M3)
        assert float(amax) == expected
    fp8.quantise(torch.zeros(0, 16), torch.tensor(1.0), amax, E4M3)
    assert float(amax) == 5.0


@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3)])
@pytest.mark.parametrize("shape", SHAPES)
def test_fast_product_equals_plain(shape: tuple[int, int, int], types: tuple[torch.dtype, torch.dtype]) -> None:
    rows, inner, columns = shape
    a, b = torch.randn(rows, inner).to(types[0]), torch.randn(columns, inner).to(types[1])
    arguments = (a, b, torch.tensor(0.25), torch.tensor(8.0), torch.float32)
    found = {}
    for name in ("plain", "auto"):
        ops.select(name)
        found[name] = fp8.product(*arguments)
    exact = (a.double() @ b.double().t()) * 2.0
    assert relative(found["auto"].double(), exact) <= max(2 * relative(found["plain"].double(), exact), 1e-6)


@pytest.mark.parametrize(("amax", "largest", "expected"), [(1.0, 448.0, 256.0), (448.0, 448.0, 1.0), (449, 448, 0.5)])
def test_scales_are_powers_of_two(amax: float, largest: float, expected: float) -> None:
    assert float(fp8.scale_for(torch.tensor(amax), largest)) == expected


def test_scale_of_tiny_and_huge_magnitudes_is_finite() -> None:
    for amax in (1e-45, 1e-38, 3e38):
        scale = fp8.scale_for(torch.tensor(amax), 448.0)
        assert scale.isfinite()
        assert scale.reciprocal().isfinite()
        assert scale > 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("calibrated", [False, True])
def test_linear_is_within_the_formats_rounding(choice: str, shape: tuple[int, int, int], calibrated: bool) -> None:
    x, weight, bias, d_out = example(*shape)
    scaling = scaling_of()

    def run() -> list[Tensor]:
        return outcome(lambda *t: fp8.linear(*t, scaling.slot(0)), x, weight, bias, d_out=d_out)

    found = run()
    if calibrated:
        scaling.update(lambda amax: amax)
        found = run()
    exact = outcome(torch.nn.functional.linear, x.float(), weight, bias, d_out=d_out)
    bounds = [2 * STEP[E4M3], STEP[E5M2] + STEP[E4M3], STEP[E5M2] + STEP[E4M3], 2**-8]
    for name, ours, right, bound in zip(("out", "d_x", "d_weight", "d_bias"), found, exact, bounds, strict=True):
        assert relative(ours, right) <= bound, name
    assert found[2].dtype == torch.float32


def test_first_step_scales_by_itself() -> None:
    """Gradients of size 1e-6 would all be 0 in E5M2 without a scale."""
    x, weight, bias, d_out = example(8, 16, 16)
    scaling = scaling_of()
    _, d_x, d_weight, _ = outcome(lambda *t: fp8.linear(*t, scaling.slot(0)), x, weight, bias, d_out=d_out)
    assert d_x.abs().max() > 0
    assert d_weight.abs().max() > 0


def test_switches_are_per_product(choice: str) -> None:
    """A product that is switched off gives what bfloat16 gives."""
    x, weight, bias, d_out = example(24, 32, 48)
    off = fp8.Products(False, False, False)
    plain = outcome(lambda *t: fp8.linear(*t, scaling_of(off).slot(0)), x, weight, bias, d_out=d_out)
    for index, switch in enumerate(("forward", "input_gradient", "weight_gradient")):
        products = fp8.Products(**{**vars(off), switch: True})
        found = outcome(lambda *t, p=products: fp8.linear(*t, scaling_of(p).slot(0)), x, weight, bias, d_out=d_out)
        same = [torch.equal(a, b) for a, b in zip(found, plain, strict=True)]
        assert same == [i != index for i in range(3)] + [True], switch


def test_qkv_and_gelu_equal_their_parts(choice: str) -> None:
    x, weight, bias, d_out = example(7, 16, 48)
    weights, biases = weight.chunk(3), bias.chunk(3)
    joined = outcome(lambda *t: fp8.linear(*t, scaling_of().slot(0)), x, weight, bias, d_out=d_out)
    split = outcome(
        lambda x, *t: fp8.linear_qkv(x, t[:3], t[3:], scaling_of().slot(0)), x, *weights, *biases, d_out=d_out
    )
    assert torch.equal(split[0], joined[0])
    assert torch.equal(split[1], joined[1])
    assert torch.equal(torch.cat(split[2:5]), joined[2])
    assert torch.equal(torch.cat(split[5:]), joined[3])
    gelu = fp8.linear_gelu(x, weight, bias, False, scaling_of().slot(0))
    reference = ops.linear_gelu(x.float(), weight, bias, False)
    assert relative(gelu.detach().float(), reference.detach()) <= 2 * STEP[E4M3]


def test_delayed_scales_follow_the_history() -> None:
    scaling = scaling_of()
    with pytest.raises(AssertionError, match="16s"):
        fp8.linear(torch.ones(2, 8), torch.ones(8, 8), None, scaling.slot(0))
    tops = [2.0, 4.0] + [1.0] * fp8.HISTORY
    scales = []
    for top in tops:
        fp8.quantise(torch.full((1, 16), top), scaling.scale[0, fp8.INPUT], scaling.amax[0, fp8.INPUT], E4M3)
        scaling.update(lambda amax: amax)
        scales.append(float(scaling.scale[0, fp8.INPUT]))
    assert scales == [128.0] + [64.0] * fp8.HISTORY + [256.0]
    assert float(scaling.scale[0, fp8.WEIGHT]) == 1.0, "what was never seen keeps its scale"
    scaling.amax[0, fp8.INPUT] = torch.inf
    scaling.update(lambda amax: amax)
    assert float(scaling.scale[0, fp8.INPUT]) == 256.0, "a step that overflowed is passed over"


def test_evaluation_leaves_no_trace() -> None:
    x, weight, bias, _ = example(8, 16, 16)
    scaling = scaling_of()
    with torch.no_grad():
        fp8.linear(x, weight, bias, scaling.slot(0))
    assert not scaling.amax.any()


def test_state_restores_the_scales() -> None:
    x, weight, bias, d_out = example(8, 16, 16)
    first, second = scaling_of(), scaling_of()
    outcome(lambda *t: fp8.linear(*t, first.slot(0)), x, weight, bias, d_out=d_out)
    first.update(lambda amax: amax)
    second.load_state({key: value.clone() for key, value in first.state().items()})
    runs = [outcome(lambda *t, s=s: fp8.linear(*t, s.slot(0)), x, weight, bias, d_out=d_out) for s in (first, second)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    untouched = scaling_of()
    untouched.load_state({})
    assert not untouched.calibrated
