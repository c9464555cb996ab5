"""The layout of shards: every element belongs to one rank, and blocks are as large as asked for."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mlbert.distributed.groups import RankGroup, ShardGroups
from mlbert.distributed.sharding import PART_MULTIPLE, ShardedReducer, ShardLayout


def layouts(numel: int, size: int, block_elements: int) -> list[ShardLayout]:
    return [
        ShardLayout(numel, ShardGroups(inside=RankGroup(rank, size)), block_elements)
        for rank in range(size)
    ]


@given(units=st.integers(1, 40), size=st.integers(1, 8), block_elements=st.integers(1, 3000))
def test_every_element_belongs_to_one_rank(units, size, block_elements):
    unit = size * PART_MULTIPLE if size > 1 else 1
    numel = units * unit
    buffer = torch.arange(units * unit)
    ranks = layouts(numel, size, block_elements)
    length = next(n for n in itertools.count(unit, unit) if n >= block_elements)
    for layout in ranks:
        assert layout.multiple(layout.groups) == unit
        assert layout.size == size
        sizes = [stop - start for start, stop in layout.blocks]
        assert sizes[1:] == [length] * (len(sizes) - 1)
        assert 0 < sizes[0] <= length
        assert list(itertools.accumulate(sizes)) == [stop for _, stop in layout.blocks]
        edges = [0, *itertools.accumulate(size // layout.size for size in sizes)]
        assert layout.spans == list(itertools.pairwise(edges))
        shard = layout.take(buffer)
        assert (shard is buffer) == (size == 1)
        assert len(shard) * size == numel
        for (start, stop), (first, last) in zip(layout.parts, layout.spans, strict=True):
            assert torch.equal(shard[first:last], buffer[start:stop])
    assert torch.equal(torch.cat([layout.take(buffer) for layout in ranks]).sort().values, buffer)


def test_buckets_hold_the_parameters_that_overlap_them():
    layout = layouts(10 * 64, 2, 200)[1]
    found = [
        (bucket.start, bucket.stop, list(bucket.parameters))
        for bucket in layout.buckets([0, 128, 130, 384, 601])
    ]
    assert found == [(384, 640, [3, 4]), (128, 384, [1, 2]), (0, 128, [0])]
    (_, _, spanning), *_ = [
        (b.start, b.stop, list(b.parameters)) for b in layout.buckets([0, 100, 390])
    ]
    assert spanning == [1, 2]


@pytest.mark.parametrize("inside", [1, 2])
@pytest.mark.parametrize("between", [1, 2])
def test_only_a_sum_of_two_collectives_has_steps(inside, between):
    layout = ShardLayout(64, ShardGroups(RankGroup(0, inside), RankGroup(0, between)), 64)
    world = SimpleNamespace(world_size=inside * between)
    reducer = ShardedReducer(
        [nn.Parameter(torch.zeros(64))], torch.zeros(64), [0], world, layout, clip_before=None
    )
    assert reducer._has_steps() == (inside == between == 2)
