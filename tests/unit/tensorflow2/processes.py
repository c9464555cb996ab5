"""Processes forked from a server that has imported TensorFlow,
which takes longer than most programs here.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from dist.harness import Rank

PRELOADED = ("tf2_bert.main", "tf2_bert.experiment", "tf2_bert.workers")


def start(
    function: Callable[..., object], folder: Path, *arguments: object, **environment: str
) -> Rank:
    """Call a function with these arguments in a new process,
    and write its output to a file in the folder.
    """
    output = Path(tempfile.mkstemp(dir=folder)[1])
    return Rank(function, arguments, {**os.environ, **environment}, output, PRELOADED)


def assert_success(*processes: Rank) -> None:
    """Wait for the processes, and fail with their output unless all of them succeed."""
    outputs = [process.communicate(200) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
