"""Peak rates of devices, and measured times, power and clocks.

Peaks are the vendors' published figures without sparsity. For a device that is not in the table,
shares of the peak are left out.
"""

from __future__ import annotations

import platform
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mlbert.host.provenance import git_state, tree_root

MAX_CALLS = 50  # in one measurement of `median_seconds`
# Sampled with nvidia-smi, which only reads them. Clocks are never locked,
# because others may use the GPU.
SAMPLED = {
    "watts": "power.draw",
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "celsius": "temperature.gpu",
}
SAMPLE_MILLISECONDS = 100  # between two samples


@dataclass(frozen=True)
class Peaks:
    """TFLOP/s of dense products in bfloat16 and FP8 (0 without FP8), and TB/s of the memory."""

    bf16: float
    fp8: float
    memory: float


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the CPU's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def peaks_of(name: str) -> Peaks | None:
    """Return the data sheet's figures for a device of this name,
    or None if it is not in the table.
    """
    # Pattern of the name -> figures of the data sheet.
    known = (
        (r"\bB200\b", Peaks(2250.0, 4500.0, 8.0)),
        (r"\bH200\b(?! NVL)", Peaks(989.5, 1979.0, 4.8)),
        (r"\bH100\b(?! PCIe| NVL)", Peaks(989.5, 1979.0, 3.35)),
        (r"\bA100\b.*80GB", Peaks(312.0, 0.0, 2.039)),
        (r"\bA100\b.*40GB", Peaks(312.0, 0.0, 1.555)),
    )
    return next((peaks for pattern, peaks in known if re.search(pattern, name)), None)


def rated(rate: float, unit: str, device: torch.device, *, is_fp8: bool = False) -> dict[str, Any]:
    """Return a row's rate in TFLOP/s or TB/s, its unit,
    and its share of the device's peak if that is known.
    """
    result: dict[str, Any] = {"rate": rate, "unit": unit}
    if peaks := peaks_of(device_name(device)):
        if unit == "TB/s":
            peak = peaks.memory
        else:
            peak = peaks.fp8 if is_fp8 else peaks.bf16
        result["share_of_peak"] = rate / peak
    return result


def synchronize(device: torch.device) -> None:
    """Wait for all work on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def environment_facts(device: torch.device) -> dict[str, object]:
    """Return the device, the versions and the commit that produced a record."""
    facts: dict[str, object] = {"device": device_name(device), "torch": torch.__version__}
    facts["python"] = platform.python_version()
    facts["cuda"] = torch.version.cuda or "none"
    try:
        import triton

        facts["triton"] = triton.__version__
    except ImportError:
        facts["triton"] = "not installed"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["multiprocessors"] = properties.multi_processor_count
        facts["memory_bytes"] = properties.total_memory
        facts["compute_capability"] = f"{properties.major}.{properties.minor}"
    commit, dirty = git_state(tree_root())
    facts["commit"] = f"{commit}{', changed' if dirty else ''}"
    return facts


def median_seconds(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the median time of a call, measured for about ``seconds`` after two untimed calls.

    If ``seconds`` is 0, a single call is timed. On CUDA, time is measured between events in the
    stream, so it includes gaps between kernels but not Python's overhead before the first one.
    """
    if seconds:
        call()
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    if not seconds:
        return time.perf_counter() - started
    count = max(1, min(MAX_CALLS, int(seconds / max(time.perf_counter() - started, 1e-6))))
    if device.type != "cuda":
        times = []
        for _ in range(count):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return statistics.median(times)
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(count)
    ]
    for start, end in events:
        start.record()
        call()
        end.record()
    synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


@contextmanager
def sampled_power() -> Iterator[dict[str, Any]]:
    """Sample power and clocks during the block; the yielded dictionary gets the `power_summary` at
    its end.
    """
    found: dict[str, Any] = {}
    program = shutil.which("nvidia-smi")
    if program is None:
        yield {"skipped": "nvidia-smi is not installed"}
        return
    query = [f"--query-gpu={','.join(SAMPLED.values())}", "--format=csv,noheader,nounits"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [program, *query, f"-lms={SAMPLE_MILLISECONDS}"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield found
        finally:
            process.terminate()
            process.wait()
            output.seek(0)
            found.update(power_summary(output.read()))


def power_summary(text: str) -> dict[str, Any]:
    """Return the median of each of `SAMPLED` over nvidia-smi's complete lines,
    and the lowest clock.
    """
    rows = [line.split(", ") for line in text.splitlines()]
    samples = [
        [float(cell) for cell in row]
        for row in rows
        if len(row) == len(SAMPLED) and all(re.fullmatch(r"[\d.]+", cell) for cell in row)
    ]
    if not samples:
        return {"skipped": f"nvidia-smi: {text.strip()[-200:] or 'no sample'}"}
    columns = dict(zip(SAMPLED, zip(*samples, strict=True), strict=True))
    medians: dict[str, Any] = {name: statistics.median(values) for name, values in columns.items()}
    return {**medians, "least_sm_mhz": min(columns["sm_mhz"]), "samples": len(samples)}
