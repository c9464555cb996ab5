"""Guessing without a model, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from mlbert.data.formats.ragged import Ragged
from mlbert.data.prepare.generator import flat
from mlbert.data.prepare.pipeline import baselines

CLS, SEP, MASK = 0, 1, 2


def test_by_hand():
    # 5 is the most frequent; after 3 comes 4 (twice) or 5 (once); before 4 comes always 3.
    train = [[[3, 4], [3, 4, 5, 5, 5]], [[3, 5]]]
    rows = Ragged.from_rows(
        [
            ([CLS, 3, MASK, SEP, 5, SEP], 4, False, [2], [4]),  # left guesses 4: right answer
            ([CLS, MASK, 4, SEP, 5, SEP], 4, False, [1], [3]),  # right neighbour guesses 3: right answer
            ([CLS, MASK, 9, SEP, 5, SEP], 4, False, [1], [5]),  # never seen: the most frequent, right answer
            ([CLS, 3, MASK, SEP, 5, SEP], 4, False, [2], [8]),
        ]
    )
    result = baselines([flat([document]) for document in train], rows, 10)
    assert result["most_frequent_id"] == 5
    assert result["most_frequent_accuracy"] == pytest.approx(1 / 4)
    assert result["bigram_left_accuracy"] == pytest.approx(2 / 4)
    assert result["bigram_right_accuracy"] == pytest.approx(2 / 4)
    assert result["bigram_accuracy"] == pytest.approx(2 / 4)
    assert result["masked_tokens"] == 4


def test_equal_counts_take_the_lowest_id():
    rows = Ragged.from_rows([([CLS, 3, MASK, SEP, 5, SEP], 4, False, [2], [4])])
    result = baselines([flat([[[3, 6, 3, 4]]])], rows, 10)
    assert result["bigram_left_accuracy"] == 1.0
    assert np.isfinite(result["bigram_accuracy"])
