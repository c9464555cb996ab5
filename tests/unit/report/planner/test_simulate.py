"""Simulated ranks: the shortcut over all of them deals as the program deals to each one."""

import numpy as np
import pytest

from mlbert.data.formats.order import RankSlice, by_length
from mlbert.report.planner import simulate


def test_balance_is_that_of_the_programs_deal(monkeypatch):
    monkeypatch.setattr(simulate, "STEPS", 1)
    ranks, each, group, seed = 16, 6, 4, 3
    tokens = np.random.default_rng(0).integers(5, 513, 1000)
    found = simulate._balance("", tokens, np.ones(1000, np.int64), ranks, each, group, seed)
    lengths = tokens[simulate.Permutation(1000, (seed, 0))(np.arange(ranks * each))]
    partition = by_length(group)
    sums = [
        sum(lengths[part].sum() for part in partition(RankSlice(each, 1, rank, ranks), lambda units: lengths[units]))
        for rank in range(ranks)
    ]
    assert found.mean == pytest.approx(max(sums) / np.mean(sums))
    assert found.sequences == ranks * each


def test_packs_and_exchange_are_even_and_single_sequences_are_not():
    packs, alone, grouped, everywhere = simulate.balances(64, 8, 8)
    assert packs.mean < 1.01
    assert packs.sequences == pytest.approx(64 * 8, rel=0.1)
    assert everywhere.mean < grouped.mean < alone.mean
    assert all(1 <= item.mean <= item.worst for item in (packs, alone, grouped, everywhere))


def test_traffic_falls_with_sharing():
    sent = simulate.traffic(1_000_000, 64, 8)
    assert sent["all"] < sent["node"] < sent["off"] < 8e6
