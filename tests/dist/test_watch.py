"""A rank that dies, hangs or fails ends the others soon, and its name is told."""

from __future__ import annotations

import pytest

from harness import run_ranks
from mlbert.dist.watch import EXIT_CODE, Stage, Watch
from mlbert.dist.world import World
from watch_programs import BAD_STEP, HANG_SECONDS


def stories(folder):
    return {path.stem: path.read_text() for path in folder.glob("story_*.txt")}


@pytest.mark.parametrize(
    ("what", "victim"), [("dies", 2), ("dies", 0), ("hangs", 1), ("hangs", 0), ("fails", 1), ("fails", 0)]
)
def test_the_lost_rank_is_named_and_the_others_end(tmp_path, what, victim):
    results = run_ranks(
        "watch_programs:train", 3, tmp_path, check=False, folder=str(tmp_path), what=what, victim=victim
    )
    assert all(result.returncode != 0 for result in results)
    told = stories(tmp_path)
    teller = 1 if (what, victim) == ("dies", 0) else 0
    assert set(told) == {f"story_{teller}"}
    story = told[f"story_{teller}"]
    assert story.startswith(f"rank {victim} on ")
    assert f"after step {BAD_STEP}" in story
    assert {"dies": "died", "hangs": "hangs", "fails": "ValueError: record 17 is damaged"}[what] in story
    if what == "hangs":
        assert "READ" in story
    assert results[teller].returncode == (1 if (what, victim) == ("fails", 0) else EXIT_CODE)
    assert story in results[teller].output


def test_a_run_that_ends_well_is_left_alone(tmp_path):
    results = run_ranks("watch_programs:train", 3, tmp_path, folder=str(tmp_path), what="nothing", victim=0)
    assert [result.value for result in results] == [6, 6, 6]
    assert stories(tmp_path) == {}


def test_one_process_needs_no_watch():
    told = []
    watch = Watch(World(), told.append, hang_seconds=HANG_SECONDS)
    with watch.guard():
        assert list(watch.each([1, 2], 0, Stage.COMPUTE, Stage.REDUCE)) == [1, 2]
    with pytest.raises(RuntimeError, match="own"), watch.guard():
        raise RuntimeError("own")
    assert told == []
