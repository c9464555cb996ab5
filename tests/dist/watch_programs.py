"""Ranks under the watch, one of which comes to grief at step 4."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from mlbert.dist.watch import Stage, Watch
from mlbert.dist.world import World

HANG_SECONDS = 3.0
BAD_STEP = 4


def train(world: World, folder: str, what: str, victim: int) -> int:
    """Six steps; at the fifth one rank dies, hangs, fails or is told to end. The number of steps done."""
    watch = Watch(
        world, lambda story: Path(folder, f"story_{world.rank}.txt").write_text(story), hang_seconds=HANG_SECONDS
    )
    step = 0
    with watch.guard():
        for step in range(6):
            watch.mark(step, Stage.READ)
            if step == BAD_STEP and world.rank == victim:
                come_to_grief(what)
            watch.mark(step, Stage.COUNT)
            world.all_reduce_sum(torch.ones(8))
            watch.mark(step, Stage.UPDATE)
    return step + 1


def come_to_grief(what: str) -> None:
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hangs":
        time.sleep(1000)
    if what == "fails":
        raise ValueError("record 17 is damaged")
    assert what == "nothing"
