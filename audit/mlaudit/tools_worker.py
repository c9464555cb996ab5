"""Run official tools, each in a process forked after their shared modules have been imported.

This program needs only the standard library and is run by its path with ``python -P``; otherwise
modules of this package would shadow others of the same name. It reads ``{"jobs": [{"tool",
"arguments", "after"}], "folder", "seconds"}`` from standard input. Job i runs in ``folder/i`` like
``python -m mlperf_logging.<tool> <arguments>``, once the jobs in ``after`` have finished, and its
output goes to ``folder/i.txt``. For each finished job the program prints a line
``[i, exit status]``, with null after a timeout.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Iterable
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from typing import Any

_TOKEN = ":::MLLOG "
_PARSER = "mlperf_logging.compliance_checker.mlp_parser.ruleset_500"
_MODULES = {"compliance_checker": "mlp_compliance"}  # the others are named like their tool


def text_from_token(lines: Iterable[str]) -> list[str]:
    """Return the same as the parser's `strip_and_dedup`,
    which needs time quadratic in the length of a line.
    """
    return [_TOKEN + line.rpartition(_TOKEN)[2] for line in lines if _TOKEN in line]


def _run_tool(tool: str, arguments: list[str], place: str) -> None:
    os.mkdir(place)
    os.chdir(place)
    words = os.open(f"{place}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(words, 1)
    os.dup2(words, 2)
    sys.argv = [tool, *arguments]
    runpy.run_module(f"mlperf_logging.{tool}", run_name="__main__", alter_sys=True)


def _run_all(jobs: list[dict[str, Any]], folder: str, seconds: float) -> None:
    fork = multiprocessing.get_context("fork")
    num_at_once = len(os.sched_getaffinity(0))
    waiting = list(range(len(jobs)))
    finished = set[int]()
    running: dict[int, tuple[ForkProcess, float]] = {}
    while waiting or running:
        ready = [index for index in waiting if finished.issuperset(jobs[index]["after"])]
        for index in ready[: num_at_once - len(running)]:
            job = jobs[index]
            arguments = (job["tool"], job["arguments"], os.path.join(folder, str(index)))
            process = fork.Process(target=_run_tool, args=arguments, daemon=True)
            process.start()
            running[index] = (process, time.monotonic() + seconds)
            waiting.remove(index)
        left = min(deadline for _, deadline in running.values()) - time.monotonic()
        wait([process.sentinel for process, _ in running.values()], timeout=max(left, 0))
        for index, (process, deadline) in list(running.items()):
            if process.is_alive() and time.monotonic() < deadline:
                continue
            status = None if process.is_alive() else process.exitcode
            process.kill()
            process.join()
            del running[index]
            finished.add(index)
            print(json.dumps([index, status]), flush=True)


def main() -> None:
    """Run the jobs read from standard input."""
    asked = json.load(sys.stdin)
    for tool in {job["tool"] for job in asked["jobs"]}:
        with contextlib.suppress(Exception):  # the tool reports it when it runs
            importlib.import_module(f"mlperf_logging.{tool}.{_MODULES.get(tool, tool)}")
    with contextlib.suppress(ImportError):
        vars(importlib.import_module(_PARSER))["strip_and_dedup"] = text_from_token
    _run_all(asked["jobs"], asked["folder"], asked["seconds"])


if __name__ == "__main__":
    main()
