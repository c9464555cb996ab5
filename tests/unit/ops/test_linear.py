"""linear_qkv, linear_gelu and feed_forward: error rule, adjacent weights used in place,
one backward pass.
"""

import pytest
import torch
from torch import Tensor

from mlbert.ops import api as ops
from mlbert.ops import reference
from mlbert.ops.weights import joined
from unit.ops.conftest import check_errors
from unit.ops.op_inputs import dropout_rows, feed_forward_inputs, linear_qkv_inputs, randn

# Tokens, hidden size, columns.
SHAPES = [
    (1, 8, 24),
    (37, 20, 51),
    (200, 128, 512),
    (0, 16, 32),
    (65, 7, 9),
]
DTYPES = [torch.float32, torch.bfloat16]
# Few cases for Triton: only GELU is a kernel, and the interpreter is slow.
CASES = [
    *(
        ("native", shape, exact, dtype)
        for shape in SHAPES
        for exact in (False, True)
        for dtype in DTYPES
    ),
    *(("triton", SHAPES[1], exact, dtype) for exact in (False, True) for dtype in DTYPES),
    ("triton", (0, 16, 32), False, torch.bfloat16),
]


@pytest.mark.parametrize(("kernels", "shape", "exact", "dtype"), CASES, indirect=["kernels"])
def test_gelu_layers_error(kernels, shape, exact, dtype):
    inputs = feed_forward_inputs(*shape)
    check_errors("linear_gelu", [*inputs[:3], exact], dtype, [0, 1, 2])
    check_errors("feed_forward", [*inputs, exact], dtype, [0, 1, 2, 3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("tokens", "hidden", "columns"), SHAPES)
def test_gated_feed_forward_error(use_native, tokens, hidden, columns, exact, dropout, dtype):
    x, w1, _, w2 = feed_forward_inputs(tokens, hidden, columns)
    both = torch.cat([w1, randn(columns, hidden)])
    inputs = [x, both, w2, exact, dropout, 7, dropout_rows(tokens)]
    check_errors("gated_feed_forward", inputs, dtype, [0, 1, 2])


def test_gated_feed_forward_keeps_one_product(use_native):
    """Not the activations between the products, which backward computes again."""
    x = randn(50, 16).requires_grad_()
    w1 = randn(96, 16)
    w2 = randn(16, 48)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        ops.gated_feed_forward(x, w1, w2, True)
    assert sorted(kept) == sorted([x.numel(), w1.numel(), w2.numel(), 50 * 96])


@pytest.mark.parametrize("choice", ["plain", "native"])
def test_feed_forward_is_bit_equal_to_linear_gelu_and_a_product(native_ops, choice):
    w1 = randn(48, 16)
    b1 = randn(48)
    w2 = randn(16, 48)
    ops.select(choice)

    def apart(x, w1, b1, w2, exact):
        return torch.nn.functional.linear(ops.linear_gelu(x, w1, b1, exact), w2.to(x.dtype))

    results = []
    for function in (ops.feed_forward, apart):
        x, *weights = (
            t.clone().requires_grad_() for t in (torch.linspace(-2, 2, 144).view(9, 16), w1, b1, w2)
        )
        out = function(x.bfloat16(), *weights, False)
        out.backward(torch.ones_like(out))
        results.append([out.detach(), x.grad, *(weight.grad for weight in weights)])
    assert all(map(torch.equal, *results))


def test_gelu_over_its_range(use_native):
    """The error rule applies in every region of tanh and in the tails,
    where 1 + tanh cancels in PyTorch's formula.
    """
    x = torch.linspace(-30, 30, 20001)[:, None]
    weight = torch.ones(1, 1)
    bias = torch.zeros(1)
    exact = reference.linear_gelu(x.double(), weight.double(), bias.double(), False)
    fast = ops.linear_gelu(x, weight, bias, False)
    plain = reference.linear_gelu(x, weight, bias, False)
    assert (fast - exact).abs().max() <= 2 * (plain - exact).abs().max()
    assert (fast - exact).norm() <= 2 * (plain - exact).norm()
    far = torch.tensor([[1e4], [-1e4], [3e38], [-3e38]])
    assert torch.equal(
        ops.linear_gelu(far, weight, bias, False), torch.tensor([[1e4], [-0.0], [3e38], [-0.0]])
    )
    assert ops.linear_gelu(torch.tensor([[float("nan")]]), weight, bias, False).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 77])
def test_linear_qkv_error(use_native, tokens, dtype):
    inputs = linear_qkv_inputs(tokens, 24)
    check_errors("linear_qkv", inputs, dtype, list(range(7)))
    without_biases = inputs[:4]
    check_errors("linear_qkv", without_biases, dtype, list(range(4)))


def test_adjacent_weights_are_not_copied():
    flat = randn(3 * 12)
    parts = tuple(flat[i * 12 : (i + 1) * 12].view(3, 4) for i in range(3))
    assert joined(parts).data_ptr() == flat.data_ptr()
    assert torch.equal(joined(parts), torch.cat(parts))
    for not_adjacent in (tuple(randn(3, 4) for _ in range(3)), (parts[1], parts[0], parts[2])):
        assert torch.equal(joined(not_adjacent), torch.cat(not_adjacent))


def linear_gelu_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return x, which needs a gradient, weight and bias."""
    return randn(3, 4).requires_grad_(), randn(5, 4), randn(5)


def test_linear_gelu_gives_the_same_bits_in_an_evaluation(use_native):
    x, weight, bias = linear_gelu_inputs()
    out = ops.linear_gelu(x, weight, bias, False)
    with torch.no_grad():
        assert torch.equal(ops.linear_gelu(x, weight, bias, False), out)


def test_second_backward_raises(use_native):
    """The gradient overwrites the saved pre-activation."""
    x, weight, bias = linear_gelu_inputs()
    out = ops.linear_gelu(x, weight, bias, False)
    out.sum().backward(retain_graph=True)
    with pytest.raises(AssertionError, match="once"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("kernels", "shape", "dtype"),
    [
        ("native", (37, 50), torch.float32),
        *(("triton", shape, torch.bfloat16) for shape in ((1, 128), (37, 131), (70, 300), (0, 16))),
        ("triton", (37, 131), torch.float32),
    ],
    indirect=["kernels"],
)
@pytest.mark.parametrize("exact", [True, False])
def test_gated_gelu_error(kernels, shape, dtype, exact):
    """Forward, and backward that computes GELU again from the input."""
    tokens, columns = shape
    check_errors("gated_gelu", lambda: [randn(tokens, 2 * columns), exact], dtype, [0])
