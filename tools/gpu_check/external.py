"""Measure with programs of the CUDA toolkit: ncu and compute-sanitizer,
which run a part of this program, and nvcc.

None of them changes the GPU's settings; ncu does not lock the clocks.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlbert.host.provenance import tree_root

# Metric -> its name in a row.
METRICS = {
    "gpu__time_duration.sum": "nanoseconds",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute_percent",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "memory_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "launch__registers_per_thread": "registers",
}
NCU = (
    "--clock-control",
    "none",
    "--profile-from-start",
    "off",
    "--launch-count",
    "1",
    "--csv",
    "--page",
    "raw",
    "--print-units",
    "base",
)
SANITIZER = ("--tool", "memcheck", "--error-exitcode", "9", "--print-limit", "20")
COUNT_SECONDS = 45
SANITIZER_SECONDS = 60
BUILD_SECONDS = 70
# Kernels for ncu if there is no profile.
DEFAULT_KERNELS = (
    "attention_forward_kernel",
    "attention_key_value_gradient_kernel",
    "attention_query_gradient_kernel",
    "norm_forward_kernel",
    "norm_backward_kernel",
    "cast_kernel",
)


def run(
    words: Sequence[str], seconds: float, variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str] | str:
    """Run a program and return its result, or the reason why there is none."""
    program = shutil.which(words[0])
    if program is None:
        return f"{words[0]} is not installed"
    options: dict[str, Any] = {
        "capture_output": True,
        "text": True,
        "errors": "replace",
        "check": False,
    }
    try:
        return subprocess.run(
            [program, *words[1:]], timeout=seconds, env={**os.environ, **variables}, **options
        )
    except subprocess.TimeoutExpired:
        return f"{words[0]} took longer than {seconds:.0f} s"


def count_kernel(kernel: str, work: Path, rehearsal: bool) -> dict[str, Any]:
    """Return ncu's counters of the first launch of a kernel in a published step with two layers."""
    words = ["ncu", *NCU, "--metrics", ",".join(METRICS), "--kernel-name", kernel]
    done = run([*words, *part_command("counted", work, rehearsal)], COUNT_SECONDS, {})
    if isinstance(done, str):
        return {"skipped": done}
    found = parse_counters(done.stdout)
    return found or {"skipped": f"ncu: {(done.stderr or done.stdout).strip()[-300:]}"}


def parse_counters(text: str) -> dict[str, Any]:
    """Return `METRICS` from ncu's raw page: a line of names, a line of units, a line of values."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        return {}
    names, _, values = csv.reader(lines[:3])
    found = dict(zip(names, values, strict=False))
    return {
        name: float(found[metric].replace(",", ""))
        for metric, name in METRICS.items()
        if found.get(metric)
    }


def sanitize(work: Path, rehearsal: bool) -> dict[str, Any]:
    """Run every check under compute-sanitizer, with the model's real sizes and a few sequences."""
    words = ["compute-sanitizer", *SANITIZER, *part_command("sanitized", work, rehearsal)]
    # Allocate each tensor separately, so that an access past its end is detected.
    done = run(words, SANITIZER_SECONDS, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    if isinstance(done, str):
        return {"skipped": done}
    summary = re.search(r"ERROR SUMMARY: (\d+) error", done.stdout)
    if summary is None:
        return {"skipped": f"compute-sanitizer: {(done.stderr or done.stdout).strip()[-300:]}"}
    errors = [
        line
        for line in done.stdout.splitlines()
        if re.match(r"=+ (Invalid|Program hit|    at )", line)
    ]
    why = "; ".join(errors[:4])
    return {"passed": summary[1] == "0", "errors": int(summary[1]), **({"why": why} if why else {})}


def build_fmha() -> dict[str, Any]:
    """Compile ``csrc/fmha`` for this machine's GPUs."""
    if shutil.which("nvcc") is None:
        return {"skipped": "nvcc is not installed"}
    script = tree_root() / "tools" / "build_cuda.sh"
    python = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "CUDA_ARCHS": "9.0"}
    done = run(["bash", str(script)], BUILD_SECONDS, python)
    if isinstance(done, str):
        return {"error": done}
    if done.returncode:
        return {"error": done.stderr[-2000:] or f"code {done.returncode}"}
    return {"built": done.stdout.strip()}


def costliest(rows: Mapping[str, Mapping[str, Any]], count: int = 6) -> list[str]:
    """Return the kernels of the profiled steps that took the most time, by their names in ncu."""
    seconds: dict[str, float] = {}
    for row in rows.values():
        for name, taken in row.get("kernels", {}).items():
            if not re.match(r"(Memcpy|Memset|aten::)", name):
                seconds[base_name(name)] = max(taken, seconds.get(base_name(name), 0.0))
    return sorted(seconds, key=lambda name: -seconds[name])[:count] or list(DEFAULT_KERNELS[:count])


def base_name(kernel: str) -> str:
    """Return a kernel's name without result, namespaces, template arguments and parameters."""
    return re.sub(r"<.*|\(.*", "", kernel.removeprefix("void ")).rpartition("::")[2]


def part_command(part: str, work: Path, rehearsal: bool) -> list[str]:
    """Return the command that runs one part in this run's work folder,
    which is called ``run<number>``.
    """
    words = ["--work", str(work.parent), "--run", work.name[-1], "--run-part", part]
    return [
        sys.executable,
        "-m",
        "gpu_check.main",
        *words,
        *(["--cpu-rehearsal"] if rehearsal else []),
    ]
