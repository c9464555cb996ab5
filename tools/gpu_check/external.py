"""Measure with programs of the CUDA toolkit, ncu and compute-sanitizer, which run a command.

None of them changes the GPU's settings; ncu does not lock the clocks.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

# Metric -> its name in a row.
METRICS = {
    "gpu__time_duration.sum": "nanoseconds",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute_percent",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "memory_percent",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "l2_percent",
    "lts__t_bytes.sum": "l2_bytes",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": "shared_memory_wavefronts",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": "tensor_pipe_percent",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue_percent",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "stall_memory",
    "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio": "stall_shared",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": "stall_barrier",
    "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio": "stall_tensor",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "launch__registers_per_thread": "registers",
}
NCU = (
    "--clock-control",
    "none",
    "--profile-from-start",
    "off",
    "--csv",
    "--page",
    "raw",
    "--print-units",
    "base",
)
SANITIZER = ("--error-exitcode", "9", "--print-limit", "20")


def run(
    words: Sequence[str], seconds: float, variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str] | str:
    """Run a program and return its result, or the reason why there is none."""
    program = shutil.which(words[0])
    if program is None:
        return f"{words[0]} is not installed"
    try:
        return subprocess.run(
            [program, *words[1:]],
            timeout=seconds,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{words[0]} took longer than {seconds:.0f} s"


def count_kernels(kernels: Sequence[str], command: Sequence[str], seconds: float) -> dict[str, Any]:
    """Return ncu's counters of the first launches of kernels in a command's profiled range."""
    names = f"regex:^({'|'.join(kernels)})"
    words = ["ncu", *NCU, "--launch-count", str(len(kernels)), "--kernel-name", names]
    done = run([*words, "--metrics", ",".join(METRICS), *command], seconds, {})
    if isinstance(done, str):
        return {"skipped": done}
    found = parse_counters(done.stdout)
    if not found:
        return {"skipped": f"ncu: {(done.stderr or done.stdout).strip()[-300:]}"}
    return {"kernels": found}


def parse_counters(text: str) -> dict[str, dict[str, float]]:
    """Return kernel -> `METRICS` from ncu's raw page: a line of names, one of units, and values."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        return {}
    names, _, *launches = csv.reader(lines)
    found: dict[str, dict[str, float]] = {}
    for values in launches:
        row = dict(zip(names, values, strict=False))
        kernel = row.get("Kernel Name", "")
        found[kernel] = {
            name: float(row[metric].replace(",", ""))
            for metric, name in METRICS.items()
            if row.get(metric)
        }
    return found


def sanitize(command: Sequence[str], seconds: float, tool: str = "memcheck") -> dict[str, Any]:
    """Run a command under a tool of compute-sanitizer, memcheck or racecheck."""
    # Allocate each tensor separately, so that an access past its end is detected.
    variables = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = run(["compute-sanitizer", "--tool", tool, *SANITIZER, *command], seconds, variables)
    if isinstance(done, str):
        return {"skipped": done}
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", done.stdout)
    if summary is None:
        return {"skipped": f"compute-sanitizer: {(done.stderr or done.stdout).strip()[-300:]}"}
    errors = [
        line
        for line in done.stdout.splitlines()
        if re.match(r"=+ (Invalid|Program hit|    at )", line)
    ]
    passed = summary[1] == "0"
    return {"passed": passed, "errors": int(summary[1]), "first_errors": errors[:4]}
