"""embedding_sum: error rule, runs of equal ids over chunk borders, bit-equal runs, ids out of range.

Legend: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlbert.ops import api as ops
from mlbert.ops import reference

GENERATOR = torch.Generator().manual_seed(0)


def ids(tokens: int, rows: int) -> Tensor:
    return torch.randint(0, rows, (tokens,), generator=GENERATOR)


def tables(vocab_size: int, positions: int, hidden: int) -> list[Tensor]:
    return [torch.randn(rows, hidden, generator=GENERATOR) for rows in (vocab_size, positions, 2)]


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Each test draws the same numbers, whichever tests ran before it."""
    GENERATOR.manual_seed(0)


@pytest.mark.parametrize(
    ("kernels", "tokens", "vocab_size", "hidden"),
    [
        *(("native", *sizes) for sizes in ((0, 5, 8), (1, 5, 8), (700, 3, 33), (300, 1000, 128))),
        *(("triton", *sizes) for sizes in ((0, 5, 8), (1, 5, 8), (150, 3, 33), (130, 1000, 130))),
    ],
    indirect=["kernels"],
)
def test_error(error_rule_of_kernels, tokens: int, vocab_size: int, hidden: int) -> None:
    arguments = [ids(tokens, vocab_size), ids(tokens, 2), ids(tokens, 64), *tables(vocab_size, 64, hidden)]
    error_rule_of_kernels("embedding_sum", arguments, torch.float32, [3, 4, 5])


@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
@pytest.mark.parametrize(
    ("chunks", "more"),  # the lengths of the runs, in chunks and in ids beyond them
    [
        ((1,), (0,)),
        ((1, 0), (0, 1)),
        ((1, 0), (-1, 1)),
        ((1, 0), (-1, 2)),
        ((0, 2, 0), (1, 0, 3)),
        ((0, 1, 1, 2), (3, -3, 0, 0)),
        ((0, 20, 0), (5, 0, 7)),  # more chunks than are joined at a time
    ],
)
def test_runs_that_meet_chunk_borders(kernels: str, chunks: tuple[int, ...], more: tuple[int, ...]) -> None:
    """Small integers: every order of summation gives the same float32, so the sums must be exact."""
    from mlbert.ops.triton.embedding import CHUNK, sum_rows_by_id

    counts = [CHUNK * whole + rest for whole, rest in zip(chunks, more, strict=True)]
    which = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    which = which[torch.randperm(len(which), generator=GENERATOR)]
    values = torch.randint(-8, 9, (len(which), 5), generator=GENERATOR).float()
    want = torch.zeros(len(counts) + 2, 5).index_add_(0, which, values)
    assert torch.equal(sum_rows_by_id(which, values, len(counts) + 2), want)


def test_bfloat16_result_of_float32_tables(kernels: str) -> None:
    arguments = [ids(50, 20), ids(50, 2), ids(50, 9), *(t.requires_grad_() for t in tables(20, 9, 32))]
    out = ops.embedding_sum(*arguments, dtype=torch.bfloat16)
    assert torch.equal(out, reference.embedding_sum(*arguments).bfloat16())
    out.backward(torch.ones_like(out))
    assert torch.equal(arguments[3].grad[:, 0], torch.bincount(arguments[0], minlength=20).float())


def test_bfloat16_tables(kernels: str) -> None:
    arguments = [ids(50, 20), ids(50, 2), ids(50, 9), *(t.bfloat16() for t in tables(20, 9, 32))]
    assert torch.equal(ops.embedding_sum(*arguments), reference.embedding_sum(*arguments))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("bad", [-1, 64])
def test_id_out_of_range_is_an_error_or_makes_its_token_nan(kernels: str, place: int, bad: int) -> None:
    arguments = [ids(10, 2), ids(10, 2), ids(10, 2), *(t.requires_grad_() for t in tables(64, 64, 16))]
    arguments[place][3] = bad
    if kernels == "native":
        with pytest.raises(IndexError, match=f"id {bad}"):
            ops.embedding_sum(*arguments)
        return
    out = ops.embedding_sum(*arguments)
    assert out[3].isnan().all()
    assert out[[0, 1, 2, 4, 5, 6, 7, 8, 9]].isfinite().all()
    out.backward(torch.ones_like(out))
    assert arguments[3 + (0, 2, 1)[place]].grad.sum() == 9 * 16
