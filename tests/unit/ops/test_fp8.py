"""FP8 linear layers: rounding, delayed scales, the fast product against plain,
and the error against float32.
"""

import dataclasses

import pytest
import torch
from torch import Tensor

from mlbert.ops import api as ops
from mlbert.ops import forms as registry
from mlbert.ops import fp8, fp8_scaling, reference

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
# Half a rounding step, with 3 and 2 bits of mantissa.
# A product's error is below the sum of its operands'.
ROUNDING = {E4M3: 2**-4, E5M2: 2**-3}
SHAPES = [(1, 16, 16), (5, 16, 48), (33, 64, 32), (513, 32, 96)]  # tokens, input, output


def make_scaling(products: fp8_scaling.Products | None = None) -> fp8_scaling.FP8Scaling:
    return fp8_scaling.FP8Scaling(1, products or fp8_scaling.Products())


def example(
    tokens: int, width: int, columns: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens + columns)
    x = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(columns, width, generator=generator) * 0.02).requires_grad_()
    bias = (torch.randn(columns, generator=generator) * 0.1).requires_grad_()
    d_out = (torch.randn(tokens, columns, generator=generator) * 1e-6).to(dtype)
    return x, weight, bias, d_out


def run_layer(function, x: Tensor, *tensors: Tensor, d_out: Tensor) -> list[Tensor]:
    """Return the output and the gradients of x and of the tensors, all in float32."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, *tensors)]
    out = function(*leaves)
    out.backward(d_out.to(out.dtype))
    return [out.detach().float(), *(leaf.grad.float() for leaf in leaves)]


def quantize(x: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype) -> fp8_scaling.Quantized:
    """Quantise with the selected implementation and a given scale."""
    return registry.implementation("fp8_quantize", x)(x, scale=scale, amax=amax, dtype=dtype)


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_quantize_rounds_clamps_and_keeps_nan(choice, dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor([[0.0, 1.0, -0.3, 1e9, -torch.inf, torch.nan, 1.1, 3.0]])
    amax = torch.zeros(())
    rows, columns = quantize(x, torch.tensor(2.0), amax, dtype)
    expected = (x * 2).clamp(-largest, largest).to(dtype).float()
    torch.testing.assert_close(rows.float(), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(columns[:, :1].float(), expected.t(), rtol=0, atol=0, equal_nan=True)
    assert not columns[:, 1:].float().any(), "padding up to 16 tokens must be zero"
    assert columns.is_contiguous()
    assert rows.float()[0, 3] == largest


def test_amax_only_grows(choice):
    amax = torch.tensor(3.0)
    for top, expected in ((2.0, 3.0), (5.0, 5.0), (4.0, 5.0)):
        quantize(torch.tensor([[top, -1.0]]), torch.tensor(1.0), amax, E4M3)
        assert float(amax) == expected
    quantize(torch.zeros(0, 16), torch.tensor(1.0), amax, E4M3)
    assert float(amax) == 5.0


@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3)])
@pytest.mark.parametrize("shape", SHAPES)
def test_fast_product_equals_plain(shape, types):
    rows, inner, columns = shape
    a = torch.randn(rows, inner).to(types[0])
    b = torch.randn(columns, inner).to(types[1])
    exact = (a.double() @ b.double().t()) * 2.0
    errors = {}
    for name in ("plain", "auto"):
        ops.select(name)
        found = fp8.product(a, b, (torch.tensor(0.25), torch.tensor(8.0)), torch.float32)
        errors[name] = relative(found.double(), exact)
    assert errors["auto"] <= max(2 * errors["plain"], 1e-6)


def test_scales_are_finite_powers_of_two():
    for amax, largest, expected in ((1.0, 448.0, 256.0), (448.0, 448.0, 1.0), (449.0, 448.0, 0.5)):
        assert float(fp8_scaling.scale_for(torch.tensor(amax), largest)) == expected
    for amax in (1e-45, 1e-38, 3e38):
        scale = fp8_scaling.scale_for(torch.tensor(amax), 448.0)
        assert scale.isfinite()
        assert scale.reciprocal().isfinite()
        assert scale > 0


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, table: fp8_scaling.FP8Scaling, row: int
) -> Tensor:
    return fp8.linear(x, (weight,), () if bias is None else (bias,), table, row)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("calibrated", [False, True])
def test_linear_error_is_within_rounding(choice, shape, calibrated):
    x, weight, bias, d_out = example(*shape)
    scaling = make_scaling()

    def run() -> list[Tensor]:
        return run_layer(lambda *t: linear(*t, scaling, 0), x, weight, bias, d_out=d_out)

    found = run()
    if calibrated:
        scaling.end_step(lambda amax: amax)
        found = run()
    exact = run_layer(torch.nn.functional.linear, x.float(), weight, bias, d_out=d_out)
    bounds = [
        2 * ROUNDING[E4M3],
        ROUNDING[E5M2] + ROUNDING[E4M3],
        ROUNDING[E5M2] + ROUNDING[E4M3],
        2**-8,
    ]
    for name, ours, right, bound in zip(
        ("out", "d_x", "d_weight", "d_bias"), found, exact, bounds, strict=True
    ):
        assert relative(ours, right) <= bound, name
    assert found[2].dtype == torch.float32


def test_each_product_can_be_switched_off(choice):
    """A product that is switched off equals the bfloat16 product."""
    x, weight, bias, d_out = example(24, 32, 48)
    off = fp8_scaling.Products(False, False, False)
    plain = run_layer(lambda *t: linear(*t, make_scaling(off), 0), x, weight, bias, d_out=d_out)
    for index, switch in enumerate(("forward", "input_gradient", "weight_gradient")):
        one_on = {switch: True}
        products = dataclasses.replace(off, **one_on)
        found = run_layer(
            lambda *t, p=products: linear(*t, make_scaling(p), 0), x, weight, bias, d_out=d_out
        )
        same = [torch.equal(a, b) for a, b in zip(found[:3], plain, strict=False)]
        assert same == [i != index for i in range(3)], switch
        assert relative(found[3], plain[3]) < 1e-6


def test_linear_layers_can_be_switched_off():
    x, weight, _, d_out = example(24, 32, 48)
    scaling = fp8_scaling.FP8Scaling(8, fp8_scaling.Products(linears=(True, False, True, True)))
    exact = run_layer(
        lambda *t: torch.nn.functional.linear(t[0], t[1].to(t[0].dtype)), x, weight, d_out=d_out
    )
    for index in range(8):
        found = run_layer(lambda *t, i=index: linear(*t, None, scaling, i), x, weight, d_out=d_out)
        assert all(torch.equal(*pair) for pair in zip(found, exact, strict=True)) == (
            index in (1, 5)
        )


def test_qkv_equals_its_parts(choice):
    x, weight, bias, d_out = example(7, 16, 48)
    weights = weight.chunk(3)
    biases = bias.chunk(3)
    joined = run_layer(lambda *t: linear(*t, make_scaling(), 0), x, weight, bias, d_out=d_out)
    split = run_layer(
        lambda x, *t: fp8.linear(x, t[:3], t[3:], make_scaling(), 0),
        x,
        *weights,
        *biases,
        d_out=d_out,
    )
    assert all(map(torch.equal, [*split[:2], torch.cat(split[2:5]), torch.cat(split[5:])], joined))


@pytest.mark.parametrize(
    ("dropout", "with_bias", "two_gradients"),
    [(0.0, False, True), (0.1, True, False), (0.1, True, True)],
)
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (17, 48), (19, 1027)])
def test_norm_passes_equal_autograd(choice, shape, dropout, with_bias, two_gradients):
    """The forward and backward ops equal autograd of the reference in float32, up to rounding."""
    generator = torch.Generator().manual_seed(shape[0])
    draw = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    x, residual, d_out, d_copy = (draw(*shape).bfloat16() for _ in range(4))
    weight, bias, x_bias = (draw(shape[1]) for _ in range(3))
    rows = torch.randint(0, 2**31 - 1, shape[:1], dtype=torch.int32, generator=generator)
    leaves = [t.float().clone().requires_grad_() for t in (residual, x, x_bias, weight, bias)]
    exact_residual, exact_x, exact_x_bias, exact_weight, exact_bias = leaves
    key = 2**31 + 7
    exact = reference.dropout_add_layer_norm(
        exact_x,
        exact_residual,
        exact_weight,
        exact_bias,
        1e-12,
        dropout,
        key,
        rows,
        exact_x_bias if with_bias else None,
    )
    exact.backward(d_out.float() + (d_copy.float() if two_gradients else 0.0))

    scale = torch.tensor(64.0)
    amax = torch.zeros(())
    d_scale = torch.tensor(1024.0)
    d_amax = torch.zeros(())
    forward = registry.implementation("fp8_dropout_add_layer_norm_forward", x)
    out, small, saved = forward(
        x,
        residual,
        weight,
        bias,
        1e-12,
        dropout,
        key,
        rows,
        x_bias if with_bias else None,
        scale,
        amax,
    )
    backward = registry.implementation("fp8_dropout_add_layer_norm_backward", x)
    second = d_copy if two_gradients else None
    found = backward(d_out, second, saved, weight, dropout, key, rows, d_scale, d_amax)

    torch.testing.assert_close(out.float(), exact.detach(), rtol=2**-8, atol=1e-5)
    assert torch.equal(small.rows.float(), (out.float() * scale).clamp(-448, 448).to(E4M3).float())
    bound = {"rtol": 2**-6, "atol": 2**-6}  # the sum that backward reads is rounded to bfloat16
    torch.testing.assert_close(found.residual.float(), exact_residual.grad, **bound)
    torch.testing.assert_close(
        found.x.rows.float() / d_scale, exact_x.grad, rtol=2**-3 + 2**-6, atol=2**-6
    )
    sums = (exact_x.grad.sum(0), exact_weight.grad, exact_bias.grad)
    for ours, wanted in zip(found.sums.chunk(3), sums, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, wanted, rtol=2**-6, atol=2**-6 * max(1, shape[0]) ** 0.5)
    for copies, dtype in ((small, E4M3), (found.x, E5M2)):
        assert copies.rows.dtype == copies.columns.dtype == dtype
        padding = fp8_scaling.padded_tokens(shape[0]) - shape[0]
        assert torch.equal(
            copies.columns.float(), torch.nn.functional.pad(copies.rows.float().t(), (0, padding))
        )
    if shape[0]:
        assert float(amax) == float(out.abs().max())
        assert float(d_amax) == pytest.approx(float(exact_x.grad.abs().max()), rel=2**-6)


def test_copies_of_weights_follow_updates_in_the_same_memory(monkeypatch):
    """An evaluation and the next step read the copies of the present weights."""
    x, weight, _, d_out = example(8, 16, 32)
    scaling = make_scaling()
    buffers = set()
    form = fp8.registry.implementation("fp8_quantize", weight)

    def recording(x: Tensor, **arguments: object) -> fp8_scaling.Quantized:
        copies = form(x, **arguments)
        if x.shape == weight.shape and x.dtype == weight.dtype:
            buffers.add((copies.rows.data_ptr(), copies.columns.data_ptr()))
        return copies

    monkeypatch.setitem(
        fp8.registry._implementations["fp8_quantize"], ops.select("auto")["fp8_quantize"], recording
    )

    def evaluate() -> Tensor:
        with torch.no_grad():
            return linear(x, weight, None, scaling, 0)

    for _ in range(3):
        assert torch.equal(evaluate(), evaluate())
        run_layer(lambda x: linear(x, weight, None, scaling, 0), x, d_out=d_out)
        assert float(scaling.amax[0, fp8_scaling.WEIGHT]) == float(weight.detach().abs().max())
        before = evaluate()
        weight.data.neg_()
        scaling.end_step(lambda amax: amax)
        assert relative(evaluate().float(), -before.float()) < ROUNDING[E4M3], (
            "the evaluation used old weights"
        )
    assert len(buffers) <= 2, "only the first maximum may use other memory"


def test_delayed_scales_follow_the_history():
    scaling = make_scaling()
    with pytest.raises(AssertionError, match="multiples of 16"):
        linear(torch.ones(2, 8), torch.ones(8, 8), None, scaling, 0)
    scales = []
    for top in [2.0, 4.0] + [1.0] * fp8_scaling.HISTORY:
        x = torch.full((1, 16), top)
        quantize(x, scaling.scale[0, fp8_scaling.INPUT], scaling.amax[0, fp8_scaling.INPUT], E4M3)
        scaling.end_step(lambda amax: amax)
        scales.append(float(scaling.scale[0, fp8_scaling.INPUT]))
    assert scales == [128.0] + [64.0] * fp8_scaling.HISTORY + [256.0]
    assert float(scaling.scale[0, fp8_scaling.WEIGHT]) == 1.0, (
        "the scale of an unused tensor changed"
    )
    scaling.amax[0, fp8_scaling.INPUT] = torch.inf
    scaling.end_step(lambda amax: amax)
    assert float(scaling.scale[0, fp8_scaling.INPUT]) == 256.0, "an overflow changed the scale"
