"""The two calls: their stages in order, and the seconds of each.

The parts of a stage run at the same time. A stage that is not done after its seconds, and those
that the stages before it have left, is stopped and the next one begins. So a call never takes
longer than the sum, whatever hangs.
"""

from __future__ import annotations

from gpu_check.stage import Stage

# Seconds of each call, and of them for the start, the last rows and the decisions.
LIMITS = {1: 420, 2: 240}
RESERVE = {1: 15, 2: 10}

CALLS = {
    1: (
        Stage(20, ("ceilings",)),
        Stage(
            70,
            (
                "compile-bert",
                "compile-fused",
                "compile-modernbert",
                "compile-opponent-bert",
                "compile-opponent-modernbert",
                "memcheck",
                "racecheck",
            ),
        ),
        Stage(95, ("turns-bert",)),
        Stage(65, ("turns-modernbert",)),
        Stage(30, ("kernels",)),
        Stage(35, ("counters",)),
        Stage(45, ("opponent-bert",)),
        Stage(45, ("opponent-modernbert",)),
    ),
    2: (
        Stage(30, ("compile-bert", "compile-fused", "compile-modernbert")),
        Stage(70, ("winners",)),
        Stage(55, ("large",)),
        Stage(30, ("profile",)),
        Stage(45, ("tests",)),
    ),
}
# Seconds of every stage in a dry run, whose machine may be busy.
DRY_SECONDS = 120
