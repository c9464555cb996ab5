"""The Triton embedding sum: error rule, runs of equal ids over chunk borders, bit-equal runs, ids out of range.

Legend: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlbert.ops import reference

embedding = pytest.importorskip("mlbert.ops.triton.embedding", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("use_triton")

GENERATOR = torch.Generator().manual_seed(0)
CHUNK = embedding.CHUNK


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Each test draws the same numbers, whichever tests ran before it."""
    GENERATOR.manual_seed(0)


def ids(tokens: int, rows: int) -> Tensor:
    return torch.randint(0, rows, (tokens,), generator=GENERATOR)


def tables(vocab_size: int, positions: int, hidden: int) -> list[Tensor]:
    return [torch.randn(rows, hidden, generator=GENERATOR) for rows in (vocab_size, positions, 2)]


@pytest.mark.parametrize(("tokens", "vocab_size", "hidden"), [(0, 5, 8), (1, 5, 8), (150, 3, 33), (130, 1000, 130)])
def test_error(error_rule, tokens: int, vocab_size: int, hidden: int) -> None:
    arguments = [ids(tokens, vocab_size), ids(tokens, 2), ids(tokens, 64), *tables(vocab_size, 64, hidden)]
    error_rule("embedding_sum", arguments, torch.float32, [3, 4, 5], form=embedding.embedding_sum)


@pytest.mark.parametrize(
    "counts",
    [
        (CHUNK,),
        (CHUNK, 1),
        (CHUNK - 1, 1),
        (CHUNK - 1, 2),
        (1, 2 * CHUNK, 3),
        (3, CHUNK - 3, CHUNK, 2 * CHUNK),
        (5, 20 * CHUNK, 7),  # more chunks than are joined at a time
    ],
)
def test_runs_that_meet_chunk_borders(counts: tuple[int, ...]) -> None:
    """Small integers: every order of summation gives the same float32, so the sums must be exact."""
    which = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    which = which[torch.randperm(len(which), generator=GENERATOR)]
    values = torch.randint(-8, 9, (len(which), 5), generator=GENERATOR).float()
    want = torch.zeros(len(counts) + 2, 5).index_add_(0, which, values)
    assert torch.equal(embedding.sum_rows_by_id(which, values, len(counts) + 2), want)


def test_bfloat16_result_of_float32_tables() -> None:
    arguments = [ids(50, 20), ids(50, 2), ids(50, 9), *(t.requires_grad_() for t in tables(20, 9, 32))]
    out = embedding.embedding_sum(*arguments, dtype=torch.bfloat16)
    assert torch.equal(out, reference.embedding_sum(*arguments).bfloat16())
    out.backward(torch.ones_like(out))
    assert torch.equal(arguments[3].grad[:, 0], torch.bincount(arguments[0], minlength=20).float())


def test_bfloat16_tables() -> None:
    arguments = [ids(50, 20), ids(50, 2), ids(50, 9), *(t.bfloat16() for t in tables(20, 9, 32))]
    assert torch.equal(embedding.embedding_sum(*arguments), reference.embedding_sum(*arguments))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("bad", [-1, 64])
def test_id_out_of_range_makes_its_token_nan(place: int, bad: int) -> None:
    arguments = [ids(10, 2), ids(10, 2), ids(10, 2), *(t.requires_grad_() for t in tables(64, 64, 16))]
    arguments[place][3] = bad
    out = embedding.embedding_sum(*arguments)
    assert out[3].isnan().all()
    assert out[[0, 1, 2, 4, 5, 6, 7, 8, 9]].isfinite().all()
    out.backward(torch.ones_like(out))
    assert arguments[3 + (0, 2, 1)[place]].grad.sum() == 9 * 16


def test_runs_are_bit_equal() -> None:
    where, what, results = [ids(90, 7), ids(90, 2), ids(90, 16)], tables(7, 16, 8), []
    for _ in range(2):
        leaves = [t.clone().requires_grad_() for t in what]
        out = embedding.embedding_sum(*where, *leaves)
        (out * out).sum().backward()
        results.append([out.detach(), *(t.grad for t in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
