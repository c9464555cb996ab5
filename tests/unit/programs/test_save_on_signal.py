"""What a signal does to a run that can save a checkpoint."""

import os
import signal

from mlbert.host.exit_statuses import BY_SIGNAL, Terminated
from mlbert.programs.save_on_signal import interrupted_status, signals_save


def test_the_status_is_that_of_the_signal_of_this_run() -> None:
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: None)  # as the run has one
    end = Terminated(signal.SIGUSR1)
    try:
        with signals_save():
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupted_status(end) == BY_SIGNAL + signal.SIGTERM
        with signals_save():
            pass
        assert interrupted_status(end) == BY_SIGNAL + signal.SIGUSR1
    finally:
        signal.signal(signal.SIGUSR1, before)
