"""How the flat gradient is cut into buckets; what needs several ranks is in tests/dist."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mlbert.distributed.reduce import GradientReducer, cut_buckets, norm_of
from mlbert.distributed.world import World


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 200))
def test_buckets_cover_every_element_and_parameter_once(lengths, least):
    offsets = [sum(lengths[:i]) for i in range(len(lengths))]
    buckets = cut_buckets(offsets, sum(lengths), least)
    assert [i for b in reversed(buckets) for i in b.parameters] == list(range(len(lengths)))
    assert [b.start for b in buckets] == [b.stop for b in buckets[1:]] + [0]
    assert buckets[0].stop == sum(lengths)
    assert all(b.stop - b.start >= least for b in buckets[:-1])


def test_a_single_process_keeps_its_gradient():
    parameter = nn.Parameter(torch.ones(3))
    grad = torch.zeros(3)
    parameter.grad = grad
    reducer = GradientReducer([parameter], grad, [0], World(), cut_buckets([0], 3, 1), None)
    reducer.prepare(last=True)
    (parameter * 2.0).sum().backward()
    reducer.finish()
    assert torch.equal(grad, torch.full((3,), 2.0))
    assert reducer.num_overlapped == 0


@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 10_000, 1 << 20])
def test_norm_is_that_of_float64(numel):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    assert float(norm_of(x)) == pytest.approx(float(x.double().norm()), rel=1e-7)
    for bad in (torch.nan, torch.inf):
        x[numel * 9 // 10 : numel * 9 // 10 + 1] = bad
        assert norm_of(x).isfinite() == (numel == 0)
