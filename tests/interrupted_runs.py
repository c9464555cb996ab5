"""Short runs that a signal interrupts at a given step.

Runs as a program too, for signals that kill.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlbert.cli.main import main
from mlbert.runs.progress import Clock
from mlbert.training import loop
from programs import words_as_dict
from training_settings import train_arguments

STEP_SECONDS = 0.02  # makes a run long enough for the audit to check its speed
SETTINGS = words_as_dict("""
    max_steps=180 target_mlm_accuracy=none eval_iter_start_samples=60 eval_iter_samples=60
    num_eval_examples=8 log_freq=0 save_checkpoint_steps=100
""")


def train(folder: Path, name: str, signum: int = 0, at_step: int = -1, **changes: object) -> int:
    """Train into ``folder/name``, send a signal at a step, and return the exit status."""
    settings = SETTINGS | changes
    arguments = train_arguments(folder, name, **settings)
    if signum == signal.SIGKILL:
        return subprocess.run(
            [sys.executable, __file__, str(signum), str(at_step), *arguments]
        ).returncode
    return _train(arguments, signum, at_step)


def _train(arguments: list[str], signum: int, at_step: int) -> int:
    one_step = loop.train_one_step

    def slow_step(run: loop.Run, clock: Clock) -> bool:
        time.sleep(STEP_SECONDS)
        if run.state.step == at_step:
            os.kill(os.getpid(), signum)
        return one_step(run, clock)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_one_step", slow_step)
        with pytest.raises(SystemExit) as end:
            main(arguments)
    return int(end.value.code or 0)


if __name__ == "__main__":
    sys.exit(_train(sys.argv[3:], int(sys.argv[1]), int(sys.argv[2])))
