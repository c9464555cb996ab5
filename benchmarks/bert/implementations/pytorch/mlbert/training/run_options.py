"""Options of a run that are not settings: those of programs around a training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlbert.runs.events import Events
from mlbert.runs.progress import Pace


@dataclass(frozen=True)
class RunOptions:
    """Options of programs with their own schedule or listener.

    Attributes:
        pace: schedule by the clock, if any.
        listener: receives the events, too.
        mlperf_log: write an MLPerf log.
        on_inspected: called when data and starting weights have been found.
        extends: continue the run in the folder, although it is finished.
        replaces: remove the run in the folder.
        saves_last_step: save the last step's checkpoint, too.
        patience: end the run after so many evaluations without a better one, with the weights of
            the best; None: train to the end. For runs of one process.
    """

    pace: Pace | None = None
    listener: Events | None = None
    mlperf_log: bool = True
    on_inspected: Callable[[], None] = lambda: None
    extends: bool = False
    replaces: bool = False
    saves_last_step: bool = False
    patience: int | None = None
