"""Rows of static shape: every sequence can be read back, and sequences that do not fit are errors."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbert.data.formats.packing import pack_lengths
from mlbert.data.formats.ragged import Ragged
from random_set import random_rows
from sequences_of_rows import sequences_of
from stored_sets import make_rows, names
from tf2_bert.store_rows import RowShape, row_shape, rows_of, zero_rows
from user_errors import user_error

LENGTH = 64


@given(count=st.integers(0, 30), most=st.integers(1, 4), empty=st.integers(0, 3), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_rows_preserve_every_sequence(count: int, most: int, empty: int, seed: int) -> None:
    ragged, per_row = random_rows(count, seed), np.ones(count, np.int64)
    if most > 1 and count:
        packs = pack_lengths(ragged.lengths.astype(np.int32), LENGTH, most, 1)
        ragged, per_row = ragged.take(packs.order), np.diff(packs.offsets)
    shape = RowShape(LENGTH, 20, most)
    rows = rows_of(ragged, per_row, len(per_row) + empty, shape)
    assert names(sequences_of(rows)) == names(ragged)
    assert rows.next_sentence_weights.sum(1).tolist() == per_row.tolist() + [0] * empty
    assert rows.masked_weights.sum() == len(ragged.masked_labels)
    for field, found in rows._asdict().items():
        width = {"m": 20, "f": most, "n": most}.get(field[0], LENGTH)
        assert found.shape == (len(per_row) + empty, width)
        assert found.dtype == (np.float32 if field.endswith("weights") else np.int32)
        assert not found[len(per_row) :].any()


def test_row_that_does_not_fit_is_an_error() -> None:
    ragged = Ragged.from_rows([([1, 2, 3, 4], 2, True, [1], [9]), ([5, 6, 7], 3, False, [1, 2], [8, 9])])
    for shape, variable in (
        (RowShape(6, 4, 3), "MAX_SEQ_LENGTH"),
        (RowShape(8, 2, 3), "MAX_PREDICTIONS_PER_SEQ"),
        (RowShape(8, 4, 1), "MAX_SEQUENCES_PER_PACK"),
    ):
        with user_error("data.too-long", variable):
            rows_of(ragged, np.array([2]), 1, shape)


def test_number_of_predictions_per_row() -> None:
    """With the published data, 3 sequences in 512 tokens need a third of the slots of 3 full sequences."""
    assert row_shape(512, 1, 512, 76) == RowShape(512, 76, 1)
    assert row_shape(512, 3, 512, 76) == RowShape(512, 79, 3)
    assert row_shape(512, 2, 128, 20) == RowShape(512, 40, 2)  # no sequence has more than 20
    assert row_shape(512, 3, 512, 200) == RowShape(512, 203, 3)  # masked at a higher rate


@given(st.lists(st.integers(5, 128), min_size=1, max_size=3).filter(lambda lengths: sum(lengths) <= 128))
def test_benchmark_masking_never_overflows(lengths: list[int]) -> None:
    masked = [min(20, max(1, round(0.15 * length))) for length in lengths]
    assert sum(masked) <= row_shape(128, 3, 128, 20).predictions


def test_zero_rows_have_nonzero_weights() -> None:
    rows = zero_rows(2, RowShape(8, 3, 2))
    shapes = {name: (found.shape, found.dtype) for name, found in rows._asdict().items()}
    real = rows_of(make_rows(np.array([5, 6])), np.array([1, 1]), 2, RowShape(8, 3, 2))
    assert shapes == {name: (found.shape, found.dtype) for name, found in real._asdict().items()}
    assert (rows.masked_weights.sum(1) > 0).all()
    assert rows.next_sentence_weights.sum(1).tolist() == [1, 1]
    assert (rows.sequence_ids == 1).all()
