"""The stages of a step, as a rank reports them to the health monitor."""

from __future__ import annotations

from enum import IntEnum


class Stage(IntEnum):
    """Stages after the same number of steps, in order of time:
    the rank in the lowest one keeps the others waiting.

    In SUM, REDUCE and COUNT a rank waits for the others. A batch is read at the start of the step
    before it, or ahead of that while the device evaluates. PREPARE_EPOCH replaces READ and
    READ_AHEAD while the source prepares an epoch; no rank marks it.
    """

    SETUP = 0
    PREPARE_EPOCH = 1
    EVALUATE = 2
    SUM = 3
    READ_AHEAD = 4
    CHECKPOINT = 5
    READ = 6
    COMPUTE = 7
    REDUCE = 8
    COUNT = 9
