"""embedding_sum: error rule, repeated ids, cost of the gradient, bit-equal runs, ids out of range.

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


@pytest.mark.parametrize(("tokens", "vocab_size", "hidden"), [(0, 5, 8), (1, 5, 8), (700, 3, 33), (300, 1000, 128)])
def test_error(error_rule, tokens: int, vocab_size: int, hidden: int) -> None:
    arguments = [ids(tokens, vocab_size), ids(tokens, 2), ids(tokens, 64), *tables(vocab_size, 64, hidden)]
    error_rule("embedding_sum", arguments, torch.float32, [3, 4, 5])


def test_bfloat16_result_of_float32_tables(use_native) -> None:
    arguments = [ids(50, 20), ids(50, 2), ids(50, 9), *(t.requires_grad_() for t in tables(20, 9, 32))]
    out = ops.embedding_sum(*arguments, dtype=torch.bfloat16)
    assert torch.equal(out, reference.embedding_sum(*arguments).bfloat16())
    out.backward(torch.ones_like(out))
    assert torch.equal(arguments[3].grad[:, 0], torch.bincount(arguments[0], minlength=20).float())


def test_bfloat16_tables_run_plain(use_native) -> None:
    arguments = [ids(50, 20), ids(50, 2), ids(50, 9), *(t.bfloat16() for t in tables(20, 9, 32))]
    assert torch.equal(ops.embedding_sum(*arguments), reference.embedding_sum(*arguments))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("bad", [-1, 64])
def test_id_out_of_range(use_native, place: int, bad: int) -> None:
    arguments = [ids(10, 2), ids(10, 2), ids(10, 2), *tables(64, 64, 16)]
    arguments[place][3] = bad
    with pytest.raises(IndexError, match=f"id {bad}"):
        ops.embedding_sum(*arguments)


def test_runs_are_bit_equal_for_any_thread_count(use_native) -> None:
    where, what, results = [ids(900, 7), ids(900, 2), ids(900, 64)], tables(7, 64, 96), []
    for threads in (2, 2, 1):
        torch.set_num_threads(threads)
        leaves = [t.clone().requires_grad_() for t in what]
        out = ops.embedding_sum(*where, *leaves)
        (out * out).sum().backward()
        results.append([out.detach(), *(t.grad for t in leaves)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_twin_gradient() -> None:
    where = [ids(9, 4), ids(9, 2), ids(9, 5)]
    leaves = [t.double().requires_grad_() for t in tables(4, 5, 3)]
    assert torch.autograd.gradcheck(lambda *t: reference.embedding_sum(*where, *t), leaves)
