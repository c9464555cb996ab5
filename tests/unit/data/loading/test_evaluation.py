"""The evaluation set: every example exactly once over the ranks, always the same batches."""

from __future__ import annotations

import numpy as np
import pytest

import host_batches
from mlbert.data.loading.batches import HostBatch
from mlbert.data.loading.pretraining import EvalSet
from user_errors import user_error


def numbers(evaluation: EvalSet) -> list[int]:
    return [n for batch in evaluation for n in host_batches.numbers(batch)]


def packs_of(batch: HostBatch) -> int:
    return len(np.unique(batch.arrays()["first_rows"] // 32))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("num_examples", "packs_per_batch"), [(300, 16), (123, 5), (1, 4)])
def test_every_example_once(make_set, world_size, num_examples, packs_per_batch):
    folder = make_set(300)
    seen = []
    for rank in range(world_size):
        evaluation = EvalSet(
            folder, num_examples, packs_per_batch, max_sequences_per_pack=3, rank=rank, world_size=world_size
        )
        evaluation.open()
        mine = numbers(evaluation)
        assert mine == numbers(evaluation)
        assert sum(batch.num_samples for batch in evaluation) == len(mine)
        seen += mine
    assert sorted(seen) == list(range(num_examples))


def test_batches_are_as_few_as_can_be_and_of_one_size(make_set):
    folder = make_set(300)
    whole = EvalSet(folder, 300, 10_000, max_sequences_per_pack=3)
    whole.open()
    (batch,) = whole
    num_packs = packs_of(batch)
    evaluation = EvalSet(folder, 300, 16, max_sequences_per_pack=3)
    evaluation.open()
    packs = [packs_of(batch) for batch in evaluation]
    assert sum(packs) == num_packs
    assert len(packs) == -(-num_packs // 16)
    assert max(packs) <= 16
    assert max(packs) - min(packs) <= 1


@pytest.mark.parametrize(("num_examples", "packs_per_batch"), [(0, 4), (301, 4), (10, 0)])
def test_numbers_that_cannot_work(make_set, num_examples, packs_per_batch):
    folder = make_set(300)
    with user_error("config.range", folder if packs_per_batch else "EVAL_BATCH_SIZE"):
        EvalSet(folder, num_examples, packs_per_batch, max_sequences_per_pack=3)


def test_single_sequences(make_set):
    evaluation = EvalSet(make_set(50), 50, 16, max_sequences_per_pack=1)
    evaluation.open()
    assert [batch.num_samples for batch in evaluation] == [13, 13, 12, 12]
    assert numbers(evaluation) == list(range(50))
