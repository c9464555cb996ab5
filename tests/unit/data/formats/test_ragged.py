"""Ragged arrays keep every row."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbert.data.formats import ragged as module
from mlbert.data.formats.ragged import DTYPES, Ragged
from random_set import any_row


def unpacked(rows: Ragged) -> list[tuple]:
    result = []
    for s in range(len(rows)):
        part = slice(rows.offsets[s], rows.offsets[s + 1])
        mask = slice(rows.masked_offsets[s], rows.masked_offsets[s + 1])
        masked = [column[mask].tolist() for column in (rows.masked_positions, rows.masked_labels)]
        result.append((rows.tokens[part].tolist(), int(rows.first_lengths[s]), bool(rows.next_sentence[s]), *masked))
    return result


@given(st.lists(any_row(), max_size=20))
@settings(max_examples=40)
def test_rows_come_back(rows):
    ragged = Ragged.from_rows(rows)
    assert unpacked(ragged) == rows
    assert {name: getattr(ragged, name).dtype for name in DTYPES} == DTYPES


@given(st.lists(any_row(), min_size=1, max_size=20), st.data(), st.integers(1, 9))
@settings(max_examples=40)
def test_taking_in_blocks_is_plain_taking(rows, data, block):
    ragged = Ragged.from_rows(rows)
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=30))
    before, module.BLOCK = module.BLOCK, block
    try:
        assert unpacked(ragged.take(np.asarray(chosen, np.int64))) == [rows[i] for i in chosen]
    finally:
        module.BLOCK = before


def test_labels_go_with_their_sequences():
    plain = Ragged.from_rows([([n, n + 1], 1, False, [], []) for n in range(6)])
    assert plain.labels is plain.take(np.asarray([1])).labels is plain.slice(0, 3).labels is None
    rows = dataclasses.replace(plain, labels=np.arange(6, dtype=np.float32))
    assert rows.take(np.asarray([4, 0, 4])).labels.tolist() == [4, 0, 4]
    assert rows.slice(2, 5).labels.tolist() == [2, 3, 4]
    joined = Ragged.concatenate([rows.slice(4, 6), rows.slice(0, 1)])
    assert (joined.labels.tolist(), joined.labels.dtype) == ([4, 5, 0], np.float32)
    with pytest.raises(AssertionError, match="some sequences have task labels"):
        Ragged.concatenate([plain, rows])


@given(st.lists(any_row(), min_size=1, max_size=12), st.data())
@settings(max_examples=40)
def test_ranges_are_slices_joined_in_order(rows, data):
    ragged = Ragged.from_rows(rows)
    places = st.integers(0, len(rows))
    ranges = [sorted(pair) for pair in data.draw(st.lists(st.tuples(places, places), max_size=6))]
    of_ranges = Ragged.of_ranges((ragged, first, end) for first, end in ranges)
    for found in (of_ranges, Ragged.concatenate([ragged.slice(first, end) for first, end in ranges])):
        assert unpacked(found) == [each for first, end in ranges for each in rows[first:end]]
        assert {name: getattr(found, name).dtype for name in DTYPES} == DTYPES
