"""embedding_sum: error rule, runs of equal ids across chunks, dtypes, ids out of range."""

import pytest
import torch
from torch import Tensor

from mlbert.ops import api as ops
from mlbert.ops import reference
from unit.ops.conftest import check_errors
from unit.ops.op_inputs import GENERATOR, randint, randn


def inputs(tokens: int, vocab_size: int, positions: int, hidden: int) -> list[Tensor]:
    """Return token ids, segments, positions, and the tables for tokens, positions and segments."""
    ids = [randint(bound, tokens) for bound in (vocab_size, 2, positions)]
    return [*ids, *(randn(rows, hidden) for rows in (vocab_size, positions, 2))]


@pytest.mark.parametrize(
    ("kernels", "tokens", "vocab_size", "hidden"),
    [
        *(("native", *sizes) for sizes in ((0, 5, 8), (1, 5, 8), (700, 3, 33), (300, 1000, 128))),
        *(("triton", *sizes) for sizes in ((0, 5, 8), (1, 5, 8), (150, 3, 33), (130, 1000, 130))),
    ],
    indirect=["kernels"],
)
def test_error(kernels, tokens, vocab_size, hidden):
    check_errors("embedding_sum", inputs(tokens, vocab_size, 64, hidden), torch.float32, [3, 4, 5])


@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
@pytest.mark.parametrize(
    ("chunks", "more"),  # lengths of the runs: in chunks, and additional ids
    [
        ((1,), (0,)),
        ((1, 0), (0, 1)),
        ((1, 0), (-1, 1)),
        ((1, 0), (-1, 2)),
        ((0, 2, 0), (1, 0, 3)),
        ((0, 1, 1, 2), (3, -3, 0, 0)),
        ((0, 20, 0), (5, 0, 7)),  # more chunks than are summed at a time
    ],
)
def test_runs_across_chunks(kernels, chunks, more):
    """Sums of small integers are exact in float32 in any order."""
    from mlbert.ops.triton.embedding import CHUNK, sum_rows_by_id

    counts = [CHUNK * whole + rest for whole, rest in zip(chunks, more, strict=True)]
    which = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    which = which[torch.randperm(len(which), generator=GENERATOR)]
    values = torch.randint(-8, 9, (len(which), 5), generator=GENERATOR).float()
    want = torch.zeros(len(counts) + 2, 5).index_add_(0, which, values)
    assert torch.equal(sum_rows_by_id(which, values, len(counts) + 2), want)
    buffer = torch.ones(len(counts) + 2, 5)
    assert sum_rows_by_id(which, values, len(counts) + 2, buffer) is buffer
    assert torch.equal(buffer, want + 1)


def test_bfloat16_result_and_tables(kernels):
    arguments = inputs(50, 20, 9, 32)
    for table in arguments[3:]:
        table.requires_grad_()
    out = ops.embedding_sum(*arguments, dtype=torch.bfloat16)
    assert torch.equal(out, reference.embedding_sum(*arguments).bfloat16())
    out.backward(torch.ones_like(out))
    assert torch.equal(arguments[3].grad[:, 0], torch.bincount(arguments[0], minlength=20).float())
    arguments[3:] = [table.detach().bfloat16() for table in arguments[3:]]
    assert torch.equal(ops.embedding_sum(*arguments), reference.embedding_sum(*arguments))


@pytest.mark.parametrize(("place", "table_of_place"), [(0, 3), (1, 5), (2, 4)], ids=[0, 1, 2])
@pytest.mark.parametrize("bad", [-1, 64])
def test_id_out_of_range_is_an_error_or_makes_its_token_nan(kernels, place, table_of_place, bad):
    arguments = inputs(10, 64, 64, 16)
    for table in arguments[3:]:
        table.requires_grad_()
    arguments[place][3] = bad
    if kernels == "native":
        with pytest.raises(IndexError, match=f"id {bad}"):
            ops.embedding_sum(*arguments)
        return
    out = ops.embedding_sum(*arguments)
    assert out[3].isnan().all()
    assert out[[0, 1, 2, 4, 5, 6, 7, 8, 9]].isfinite().all()
    out.backward(torch.ones_like(out))
    assert arguments[table_of_place].grad.sum() == 9 * 16
