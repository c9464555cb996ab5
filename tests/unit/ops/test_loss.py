"""masked_cross_entropy: error rule, padded columns, ties, no masked token, ignored rows,
gradient in place.
"""

import math

import pytest
import torch
from torch import Tensor

from mlbert.ops import api as ops
from mlbert.ops import reference
from unit.ops.conftest import check_errors
from unit.ops.op_inputs import GENERATOR, randint, randn

DTYPES = [torch.float32, torch.bfloat16]
# Rows, columns, vocabulary.
SHAPES = [(0, 16, 13), (1, 8, 8), (33, 50, 41), (60, 4096, 4090), (7, 30528, 30522), (3, 16, 1)]
# Small shapes, because the interpreter is slow; the last one needs several blocks of columns.
FOR_TRITON = [(0, 8, 8), (7, 50, 41), (3, 16, 1), (2, 4100, 4099)]
CASES = [
    *(("native", shape, dtype) for shape in SHAPES for dtype in DTYPES),
    *(("triton", shape, torch.bfloat16) for shape in FOR_TRITON),
    ("triton", FOR_TRITON[1], torch.float16),
    ("triton", FOR_TRITON[-1], torch.float32),
]


def problem(rows: int, columns: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    logits = 3 * randn(rows, columns)
    logits[:, vocab_size:] = 1e4  # padding, which must be ignored
    return logits, randint(vocab_size, rows)


@pytest.mark.parametrize(("kernels", "shape", "dtype"), CASES, indirect=["kernels"])
def test_error(kernels, shape, dtype):
    check_errors("masked_cross_entropy", lambda: [*problem(*shape), shape[2]], dtype, [0])


@pytest.mark.parametrize("function", [ops.masked_cross_entropy, reference.masked_cross_entropy])
def test_no_masked_tokens(kernels, function):
    logits = torch.randn(0, 16).requires_grad_()
    loss, correct = function(logits, torch.zeros(0, dtype=torch.int64), 13)
    loss.backward()
    assert (loss.item(), correct.item()) == (0.0, 0)
    assert (loss.dtype, correct.dtype) == (torch.float32, torch.int64)
    assert logits.grad.shape == (0, 16)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(33, torch.float32), (33, torch.bfloat16), (4097, torch.bfloat16)]
)
def test_num_correct_and_ties(kernels, vocab_size, dtype):
    logits, labels = problem(60, vocab_size + 7, vocab_size)
    logits = logits.round().to(dtype)  # many ties, some between blocks
    labels = torch.where(
        torch.rand(60, generator=GENERATOR) < 0.5, logits[:, :vocab_size].argmax(1), labels
    )
    want = reference.masked_cross_entropy(logits, labels, vocab_size)[1]
    assert ops.masked_cross_entropy(logits, labels, vocab_size)[1] == want
    tie = torch.tensor([[1.0, 5.0, 5.0, 0.0]], dtype=dtype)
    for label, hits in ((1, 1), (2, 0)):
        for function in (ops.masked_cross_entropy, reference.masked_cross_entropy):
            assert function(tie, torch.tensor([label]), 4)[1].item() == hits


def test_gradient_overwrites_the_logits(kernels):
    leaf, labels = problem(5, 16, 13)
    before = leaf.clone()
    ops.masked_cross_entropy(leaf, labels, 13)
    assert torch.equal(leaf, before), "an evaluation changed the logits"
    logits = leaf.requires_grad_() * 1.0
    loss, _ = ops.masked_cross_entropy(logits, labels, 13)
    (loss / 5).backward(retain_graph=True)
    with pytest.raises(AssertionError, match="once"):
        loss.backward()
    assert torch.equal(logits.detach(), leaf.grad)
    assert leaf.grad[:, 13:].abs().max() == 0
    assert leaf.grad.sum(1).abs().max() < 1e-7


@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
def test_rows_with_label_minus_100_are_ignored(kernels):
    """They fill a batch up to a fixed number of masked tokens."""
    logits, labels = problem(6, 16, 13)
    labels[[1, 5]] = -100
    logits[5] = math.nan
    results = []
    for function, count in ((ops.masked_cross_entropy, 6), (reference.masked_cross_entropy, 5)):
        leaf = logits[:count].clone().requires_grad_()
        loss, correct = function(leaf * 1.0, labels[:count], 13)
        loss.backward()
        results.append((loss.detach(), correct, leaf.grad))
    (*found, gradient), (*wanted, other) = results
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradient[:5], other)
    assert not gradient[[1, 5]].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_logits_give_a_non_finite_loss(kernels, bad):
    logits, labels = problem(5, 16, 13)
    logits[2, 4] = bad
    assert not ops.masked_cross_entropy(logits, labels, 13)[0].isfinite()


@pytest.mark.parametrize("bad", [-1, 13])
def test_label_out_of_range_is_an_error_or_makes_the_loss_nan(kernels, bad):
    logits, labels = problem(5, 16, 13)
    labels[0] = bad
    if kernels == "triton":
        assert ops.masked_cross_entropy(logits, labels, 13)[0].isnan()
    else:
        with pytest.raises(IndexError, match="labels"):
            ops.masked_cross_entropy(logits, labels, 13)
