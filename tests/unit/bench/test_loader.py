"""The loader's benchmark counts what the source gives."""

from __future__ import annotations

import pytest

from mlbert.bench.loader import loader_rate
from stored_sets import make_rows, random_lengths, write_set


@pytest.mark.parametrize("most", [1, 3])
def test_rates_and_mean_length(tmp_path, most):
    rows = make_rows(random_lengths(300))
    folder = write_set(tmp_path / "set", rows)
    found = loader_rate(folder, packs_per_step=10, max_sequences_per_pack=most, seconds=0.1)
    assert found["sequences_per_second"] > 0
    assert found["tokens_per_second"] == pytest.approx(found["sequences_per_second"] * found["mean_length"])
    assert found["mean_length"] == pytest.approx(rows.lengths.mean(), rel=0.1)
