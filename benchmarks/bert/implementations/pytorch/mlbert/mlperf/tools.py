"""Running official tools: the real ones, several at a time, in processes that end with the check."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE

_WORKER = Path(__file__).with_name("tools_worker.py")
_SECONDS = 120.0  # for one tool
_MAX_CHARACTERS = 2**23  # of what a tool printed

Answers = Callable[[Callable[[str], None]], list["Answer"]]


@dataclass(frozen=True)
class Job:
    """One run of a tool."""

    tool: str
    arguments: Sequence[str]
    after: Sequence[int] = field(default=())  # positions of the jobs that must be finished first


@dataclass(frozen=True)
class Answer:
    """What became of it."""

    status: int  # exit status; negative after a signal, 1 where the time was up
    words: str  # everything printed


@contextmanager
def started(
    jobs: Sequence[Job], folder: Path, renamed: Mapping[str, str] | None = None, seconds: float = _SECONDS
) -> Iterator[Answers]:
    """Starts the jobs in ``folder``; gives a function that waits for all answers and tells what is finished.

    Args:
        jobs: in the order of their urgency.
        folder: an empty folder for the tools' own files.
        renamed: texts to replace in the tools' words, in this order.
        seconds: after which a tool counts as hanging.
    """
    asked = {
        "jobs": [{"tool": job.tool, "arguments": list(job.arguments), "after": list(job.after)} for job in jobs],
        "folder": str(folder.resolve()),
        "seconds": seconds,
    }
    command = [sys.executable, "-P", str(_WORKER)]
    # A session of its own, so that nothing of it outlives the check.
    worker = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, cwd=folder, start_new_session=True)
    assert worker.stdin is not None
    assert worker.stdout is not None
    reports = worker.stdout

    def collect(progress: Callable[[str], None]) -> list[Answer]:
        answers = [Answer(1, "ERROR the process of the official tools ended too early")] * len(jobs)
        for line in reports:
            index, status = json.loads(line)
            progress(jobs[index].tool)
            answers[index] = _read(folder / f"{index}.txt", status, seconds, renamed or {})
        return answers

    try:
        with worker.stdin:
            worker.stdin.write(json.dumps(asked).encode())
        yield collect
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        reports.close()
        worker.wait()


def _read(path: Path, status: int | None, seconds: float, renamed: Mapping[str, str]) -> Answer:
    if status is None:
        return Answer(1, f"ERROR no answer within {seconds:.0f} seconds")
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            words = file.read(_MAX_CHARACTERS)
    except OSError as error:
        return Answer(1, f"ERROR its words cannot be read ({error.strerror})")
    for old, new in renamed.items():
        words = words.replace(old, new)
    return Answer(status, words)
