"""Guessing without a model: the accuracies equal those counted by hand."""

import numpy as np
import pytest

from mlbert.data.formats.ragged import Ragged
from mlbert.data.prepare.baselines import baselines
from mlbert.data.prepare.generator import flat

CLS = 0
SEP = 1
MASK = 2


def test_baselines_by_hand():
    # 5 is the most frequent; after 3 comes 4 (twice) or 5 (once); before 4 comes always 3.
    train = [[[3, 4], [3, 4, 5, 5, 5]], [[3, 5]]]
    rows = Ragged.from_rows(
        [
            # The left neighbor guesses 4: right.
            ([CLS, 3, MASK, SEP, 5, SEP], 4, False, [2], [4]),
            # The right neighbor guesses 3: right.
            ([CLS, MASK, 4, SEP, 5, SEP], 4, False, [1], [3]),
            # Never seen, so the guess is the most frequent one: right.
            ([CLS, MASK, 9, SEP, 5, SEP], 4, False, [1], [5]),
            ([CLS, 3, MASK, SEP, 5, SEP], 4, False, [2], [8]),
        ]
    )
    result = baselines([flat([document]) for document in train], rows, 10)
    assert (result["most_frequent_id"], result["masked_tokens"]) == (5, 4)
    assert result["most_frequent_accuracy"] == pytest.approx(1 / 4)
    for guess in ("bigram_left", "bigram_right", "bigram"):
        assert result[f"{guess}_accuracy"] == pytest.approx(2 / 4), guess
    result = baselines([flat([document]) for document in train], rows, 10, never_guessed=[5])
    assert (result["most_frequent_id"], result["most_frequent_accuracy"]) == (3, 1 / 4)
    assert result["bigram_right_accuracy"] == pytest.approx(1 / 4)  # the third guess was 5
    # Equal counts: the lowest id.
    result = baselines([flat([[[3, 6, 3, 4]]])], rows.slice(0, 1), 10)
    assert result["bigram_left_accuracy"] == 1.0
    assert np.isfinite(result["bigram_accuracy"])
