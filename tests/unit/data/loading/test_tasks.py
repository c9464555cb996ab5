"""Batches of a task: each row once an epoch on any number of ranks,
pairs cut as the reference cuts them.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbert.data.formats.order import RankSlice
from mlbert.data.formats.tasks import TaskRows
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.loading.tasks import (
    TaskEvalSet,
    TaskSource,
    budget_of,
    encode,
    steps_per_epoch,
    truncated,
)
from user_errors import user_error

TOKENIZER = load_tokenizer("bert-base-uncased")


def task_rows(count: int, pairs: bool = True) -> TaskRows:
    first = [f"row {n}" for n in range(count)]
    texts = (first, ["is the same as many others"] * count) if pairs else (first,)
    return TaskRows(
        Path("rows.csv"), texts, np.arange(count, dtype=np.float32), ("a", "b"), "sha256:0"
    )


@given(a=st.integers(0, 40), b=st.integers(0, 40), room=st.integers(0, 60))
def test_pairs_are_cut_token_by_token_from_the_longer(a: int, b: int, room: int) -> None:
    first = a
    second = b
    while first + second > room:
        first, second = (first - 1, second) if first > second else (first, second - 1)
    assert truncated(a, b, room) == (first, second)


def test_a_pair_is_two_segments() -> None:
    encoded = encode(task_rows(2), TOKENIZER, 64)
    ids = encoded.tokens[: encoded.offsets[1]].tolist()
    assert TOKENIZER.decode(ids) == "[CLS] row 0 [SEP] is the same as many others [SEP]"
    assert encoded.first_lengths.tolist() == [4, 4]
    single = encode(task_rows(1, pairs=False), TOKENIZER, 64)
    assert TOKENIZER.decode(single.tokens.tolist()) == "[CLS] row 0 [SEP]"
    assert single.first_lengths.tolist() == [4]
    assert encode(task_rows(3), TOKENIZER, 8).lengths.tolist() == [8, 8, 8]


def test_more_classes_than_16_bits_count() -> None:
    rows = replace(task_rows(2), labels=None, label_lists=[[3, 70_000], [65_536]])
    encoded = encode(rows, TOKENIZER, 64)
    assert encoded.masked_labels.tolist() == [3, 70_000, 65_536]
    assert encode(task_rows(2), TOKENIZER, 64).tokens.dtype == np.uint16
    words = [["row", " zero"], ["row"]]
    tagged = replace(rows, label_lists=[[1, 70_000], [2]], words=words)
    assert encode(tagged, TOKENIZER, 64).masked_labels.tolist() == [1, 70_000, 2]


def test_rows_that_are_cut_are_counted() -> None:
    lines: list[str] = []
    rows = task_rows(3)
    whole = int(encode(rows, TOKENIZER, 64, lines.append).lengths[0])
    encode(rows, TOKENIZER, whole, lines.append)
    assert lines == []
    made = TaskEvalSet(
        [rows, task_rows(2, pairs=False)],
        TOKENIZER,
        max_seq_length=whole - 1,
        batch_size=2,
        warn=lines.append,
    )
    made.open()
    expected = f"warning: rows.csv: 3 of 3 rows are longer than {whole - 1} tokens and are cut"
    assert lines == [expected]


def source(
    count: int, units: int, world: int = 1, rank: int = 0, accumulation: int = 1, **changes
) -> TaskSource:
    share = RankSlice(units, accumulation, rank, world)
    options = {"max_seq_length": 32, "share": share, "drop_last": False, "seed": 3, **changes}
    made = TaskSource(task_rows(count), TOKENIZER, **options)
    made.open()
    return made


def labels_of(made: TaskSource, steps: range) -> list[list[float]]:
    return [
        [x for batch in made.batches_of(n) for x in batch.arrays()["labels"].tolist()]
        for n in steps
    ]


@pytest.mark.parametrize(("world", "accumulation"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("seed", [3, None])
def test_every_row_once_an_epoch_whatever_the_split(
    world: int, accumulation: int, seed: int | None
) -> None:
    whole = source(45, 8, seed=seed)
    parts = [source(45, 8 // world, world, rank, accumulation, seed=seed) for rank in range(world)]
    assert {made.steps_per_epoch for made in (whole, *parts)} == {6}
    epochs = []
    for epoch in range(2):
        steps = range(6 * epoch, 6 * epoch + 6)
        by_step = zip(*(labels_of(part, steps) for part in parts), strict=True)
        together = [[label for labels in of_ranks for label in labels] for of_ranks in by_step]
        assert together == labels_of(whole, steps)
        assert [len(step) for step in together] == [8] * 5 + [5]
        epochs.append([label for step in together for label in step])
        assert sorted(epochs[-1]) == list(range(45))
    assert (epochs[0] == epochs[1] == list(range(45))) == (seed is None)


def test_incomplete_batches_are_dropped() -> None:
    share = RankSlice(4, 2, 0, 2)
    assert [steps_per_epoch(n, share, drop_last=False) for n in (7, 8, 11, 12, 3)] == [
        1,
        1,
        1,
        2,
        0,
    ]
    assert [steps_per_epoch(n, share, drop_last=True) for n in (8, 15, 16)] == [1, 1, 2]
    with user_error("data.too-small", "rows.csv"):
        source(5, 8, drop_last=True)


def test_a_source_resumes_where_it_was() -> None:
    made = source(20, 8)
    again = source(20, 8)
    for _ in range(4):
        made.next_step()
    state = made.state_dict()
    again.load_state_dict(state)
    expected = labels_of(made, range(4, 5))[0]
    assert [x for batch in again.next_step() for x in batch.arrays()["labels"].tolist()] == expected
    for one in (made, again):
        one.close()
    with user_error("run.other-settings", "rows.csv"):
        source(20, 8, seed=4).load_state_dict(state)


def test_batches_are_within_the_budget() -> None:
    batches = source(20, 6, accumulation=3).batches_of
    assert all(budget_of(2, 32).holds(batch) for step in range(4) for batch in batches(step))


@pytest.mark.parametrize("world", [1, 3])
def test_an_evaluation_is_all_rows_in_order(world: int) -> None:
    found = []
    for rank in range(world):
        parts = [task_rows(10), task_rows(7)]
        made = TaskEvalSet(
            parts, TOKENIZER, max_seq_length=32, batch_size=4, rank=rank, world_size=world
        )
        assert made.num_examples == 17
        made.open()
        found += [x for batch in made for x in batch.arrays()["labels"].tolist()]
        assert found == [x for batch in made for x in batch.arrays()["labels"].tolist()] or rank
    assert found == [*range(10), *range(7)]
