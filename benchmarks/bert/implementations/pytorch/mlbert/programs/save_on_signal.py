"""Train until the end, or until Ctrl-C or SIGTERM, which save a checkpoint and end the run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

from mlbert.config.resolution import Resolved
from mlbert.distributed.world import World
from mlbert.host.exit_statuses import BY_SIGNAL, FAILED, SUCCEEDED, SUCCESS, Terminated
from mlbert.training.experiment import run_experiment
from mlbert.training.run_options import RunOptions

_caught: list[int] = []


def train_until_signal(
    resolved: Resolved,
    world: World,
    console: Console,
    options: RunOptions,
    say: Callable[[str], None],
    has_checkpoint: Callable[[], bool],
) -> int:
    """Train, say why if the training does not succeed, and return the exit status.

    Args:
        resolved, world, console, options: see `run_experiment`.
        say: prints a line.
        has_checkpoint: returns True if the run can be resumed.
    """
    try:
        with signals_save():
            outcome = run_experiment(resolved, world, console, options)
    except Terminated as end:
        saved = "a checkpoint is saved" if has_checkpoint() else "nothing was trained yet"
        say(f"interrupted: {saved}. Run the same command to resume.")
        return interrupted_status(end)
    if outcome.status != SUCCESS:
        say(f"stopped: {outcome.reason}")
        return FAILED
    return SUCCEEDED


@contextmanager
def signals_save(
    signums: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
) -> Iterator[None]:
    """On Ctrl-C or SIGTERM let the run save a checkpoint and exit;
    a second signal ends it at once.

    Args:
        signums: the signals that do so.
    """

    def request_save(signum: int, _: FrameType | None) -> None:
        signal.signal(signum, before[signal.Signals(signum)])
        if signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, signal.SIG_IGN):
            raise KeyboardInterrupt  # the run's handler is not installed
        _caught.append(signum)
        os.kill(os.getpid(), signal.SIGUSR1)

    _caught.clear()  # of an earlier run in this process
    before = {signum: signal.signal(signum, request_save) for signum in signums}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def has_caught() -> bool:
    """Return True if a signal has asked the run to save a checkpoint and exit."""
    return bool(_caught)


def interrupted_status(end: Terminated) -> int:
    """Return the exit status for the signal that the user sent, which ``end`` may not name."""
    return BY_SIGNAL + (_caught[0] if _caught else end.signum)
