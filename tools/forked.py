"""Run a function in a forked process, which has everything imported already,
and capture its output.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ERROR_STATUS = 70  # after an exception


def run_forked(
    work: Callable[[], object], output: Path, seconds: float
) -> tuple[int | None, resource.struct_rusage]:
    """Run ``work`` in a new process group with its output in a file,
    and kill the group at its end or the time limit.

    Returns the exit status, which is negative after a signal and None after the time limit,
    and the resources used.
    """
    child = os.fork()
    if child == 0:
        _run_child(work, output)
    deadline = time.monotonic() + seconds
    wait = 0.002
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended or time.monotonic() > deadline:
            break
        time.sleep(wait)
        wait = min(wait * 1.5, 0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        _, _, usage = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status) if ended else None, usage


def _run_child(work: Callable[[], object], output: Path) -> None:
    """Run the function in this process, then exit. Never returns."""
    status = ERROR_STATUS
    try:
        os.setsid()
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        work()
        status = 0
    except SystemExit as end:
        if end.code is None:
            status = 0
        else:
            status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
