"""The Triton cross-entropy: error rule, padded columns, ties, no masked token, ignored rows, gradient in place.

Legend: M masked tokens, V vocabulary.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mlbert.ops import reference

loss = pytest.importorskip("mlbert.ops.triton.loss", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("use_triton")

GENERATOR = torch.Generator().manual_seed(0)
# The last two need several blocks of columns.
SHAPES = [(0, 8, 8), (1, 8, 8), (7, 50, 41), (3, 16, 1), (2, 4100, 4099)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Each test draws the same numbers, whichever tests ran before it."""
    GENERATOR.manual_seed(0)


def problem(rows: int, columns: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    logits = 3 * torch.randn(rows, columns, generator=GENERATOR)
    logits[:, vocab_size:] = 1e4  # would win if it took part
    return logits, torch.randint(0, vocab_size, (rows,), generator=GENERATOR)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.bfloat16) for shape in SHAPES), (SHAPES[2], torch.float16), (SHAPES[-1], torch.float32)],
)
def test_error(error_rule, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    draw = lambda: [*problem(*shape), shape[2]]  # noqa: E731
    error_rule("masked_cross_entropy", draw, dtype, [0], form=loss.masked_cross_entropy)


def test_one_row() -> None:
    """The error of a single number is chance, so it has a bound of its own: two rounding steps."""
    logits, labels = problem(1, 40, 33)
    exact, _ = reference.masked_cross_entropy(logits.double(), labels, 33)
    assert loss.masked_cross_entropy(logits, labels, 33)[0].item() == pytest.approx(exact.item(), rel=2.4e-7)


def test_nothing_masked() -> None:
    logits = torch.randn(0, 16).requires_grad_()
    total, correct = loss.masked_cross_entropy(logits, torch.zeros(0, dtype=torch.int64), 13)
    total.backward()
    assert (total.item(), correct.item()) == (0.0, 0)
    assert (total.dtype, correct.dtype) == (torch.float32, torch.int64)
    assert logits.grad.shape == (0, 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [33, 4097])
def test_num_correct_and_ties(dtype: torch.dtype, vocab_size: int) -> None:
    logits, labels = problem(60, vocab_size + 7, vocab_size)
    logits = logits.round().to(dtype)  # many ties, some between blocks
    labels = torch.where(torch.rand(60, generator=GENERATOR) < 0.5, logits[:, :vocab_size].argmax(1), labels)
    want = reference.masked_cross_entropy(logits, labels, vocab_size)[1]
    assert loss.masked_cross_entropy(logits, labels, vocab_size)[1] == want
    tie = torch.tensor([[1.0, 5.0, 5.0, 0.0]], dtype=dtype)
    for label, hits in ((1, 1), (2, 0)):
        assert loss.masked_cross_entropy(tie, torch.tensor([label]), 4)[1].item() == hits


def test_gradient_takes_the_place_of_the_logits() -> None:
    leaf, labels = problem(5, 16, 13)
    leaf.requires_grad_()
    logits = leaf * 1.0
    total, _ = loss.masked_cross_entropy(logits, labels, 13)
    (total / 5).backward()
    assert torch.equal(logits.detach(), leaf.grad)
    assert leaf.grad[:, 13:].abs().max() == 0
    assert leaf.grad.sum(1).abs().max() < 1e-7


def test_evaluation_leaves_the_logits_alone() -> None:
    logits, labels = problem(5, 16, 13)
    before = logits.clone()
    loss.masked_cross_entropy(logits, labels, 13)
    assert torch.equal(logits, before)


def test_second_backward_is_refused() -> None:
    logits, labels = problem(5, 16, 13)
    total, _ = loss.masked_cross_entropy(logits.requires_grad_() * 1.0, labels, 13)
    total.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="once"):
        total.backward()


def test_ignored_rows_take_no_part() -> None:
    """Label -100 fills a batch up to its fixed number of masked tokens, as in PyTorch."""
    logits, labels = problem(6, 16, 13)
    labels[[1, 5]] = -100
    logits[5] = math.nan
    results = []
    for function, rows in ((loss.masked_cross_entropy, [0, 1, 2, 3, 4, 5]), (reference.masked_cross_entropy, range(5))):
        leaf = logits[list(rows)].clone().requires_grad_()
        total, correct = function(leaf * 1.0, labels[list(rows)], 13)
        total.backward()
        results.append((total.detach(), correct, leaf.grad))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    torch.testing.assert_close(results[0][2][:5], results[1][2])
    assert results[0][2][[1, 5]].abs().max() == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_logits_are_not_hidden(bad: float) -> None:
    logits, labels = problem(5, 16, 13)
    logits[2, 4] = bad
    assert not loss.masked_cross_entropy(logits, labels, 13)[0].isfinite()


@pytest.mark.parametrize("bad", [-1, 13])
def test_label_out_of_range_makes_the_loss_nan(bad: int) -> None:
    logits, labels = problem(5, 16, 13)
    labels[0] = bad
    assert loss.masked_cross_entropy(logits, labels, 13)[0].isnan()


def test_runs_are_bit_equal() -> None:
    logits, labels = problem(31, 104, 99)
    results = []
    for _ in range(2):
        leaf = logits.clone().requires_grad_()
        total, _ = loss.masked_cross_entropy(leaf * 1.0, labels, 99)
        total.backward()
        results.append((total.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
