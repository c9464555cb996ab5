"""Computing the order of a text epoch may take longer than the hang timeout; other reads may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import RankResult, run_ranks
from mlbert.distributed.lifecycle import LOST_RANK
from text_programs import SEQUENCES_PER_RANK, STEPS_PER_EPOCH
from text_sets import random_texts, write_texts

RANKS = 2


def read_texts(tmp_path: Path, what: str, victim: int, check: bool) -> tuple[str, list[RankResult]]:
    """Return the logged status and the results of all ranks."""
    texts = random_texts(RANKS * SEQUENCES_PER_RANK * STEPS_PER_EPOCH)
    write_texts(
        tmp_path / "set", texts, size_limit=1000
    )  # small shards: the next epoch begins while the last one is read
    results = run_ranks(
        "text_programs:read_texts", RANKS, tmp_path, check=check, folder=str(tmp_path), what=what, victim=victim
    )
    (story,) = tmp_path.glob("story_*.txt")
    return story.read_text(), results


@pytest.mark.parametrize("victim", range(RANKS))
def test_epoch_order_may_take_longer_than_the_hang_timeout(tmp_path: Path, victim: int) -> None:
    story, results = read_texts(tmp_path, "order", victim, check=True)
    assert [result.value for result in results] == [2 * STEPS_PER_EPOCH] * RANKS
    assert story == "success: None"


@pytest.mark.parametrize("victim", range(RANKS))
def test_other_slow_reads_are_reported_as_hangs(tmp_path: Path, victim: int) -> None:
    story, results = read_texts(tmp_path, "hang", victim, check=False)
    assert [result.returncode for result in results] == [LOST_RANK] * RANKS
    assert story.startswith(f"aborted: rank {victim} on ")
    assert f"hangs after step {STEPS_PER_EPOCH} (READ, " in story
