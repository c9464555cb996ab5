"""Measured times, energy, power and clocks of a device."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mlbert.distributed.capture import CudaCapture
from mlbert.host.provenance import git_state, tree_root

MAX_CALLS = 50  # in one measurement of `queued_seconds`
DRY_WATTS = 100.0
NVML = "libnvidia-ml.so.1"
# Sampled with nvidia-smi, which only reads them. Clocks are never locked,
# because others may use the GPU.
SAMPLED = {
    "watts": "power.draw",
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "celsius": "temperature.gpu",
}
SAMPLE_MILLISECONDS = 100  # between two samples


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the CPU's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


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


def once_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the time of one call, at least a microsecond."""
    started = time.perf_counter()
    call()
    synchronize(device)
    return max(time.perf_counter() - started, 1e-6)


def queued_seconds(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the mean time of a call that is repeated for about ``seconds``, without the host's.

    On CUDA all calls are captured in one graph, so gaps between kernels are a graph's.
    """
    call()
    synchronize(device)
    once = once_seconds(call, device)
    if device.type != "cuda":
        return once
    count = max(1, min(MAX_CALLS, int(seconds / 2 / once)))

    def repeated() -> None:
        for _ in range(count):
            call()

    def called() -> None:
        call()

    capture = CudaCapture(device)
    capture.warm_up(called)
    replay = capture.record(repeated)
    replay()
    synchronize(device)
    started = time.perf_counter()
    replay()
    synchronize(device)
    return (time.perf_counter() - started) / count


class Meter:
    """The energy that the GPU has used, from NVML's counter.

    Without a GPU, in a dry run, it counts `DRY_WATTS` so that every field has a value.

    Attributes:
        reason: why the energy is not measured, or "".
    """

    def __init__(self, device: torch.device) -> None:
        self._is_dry = device.type != "cuda"
        self._nvml: Any = None
        self._handle = ctypes.c_void_p()
        if self._is_dry:
            self.reason = "dry run: not measured"
        else:
            uuid = torch.cuda.get_device_properties(device).uuid
            self.reason = self._open(f"GPU-{uuid}")

    def _open(self, uuid: str) -> str:
        """Find the device's counter. Return why it cannot be read, or ""."""
        try:
            nvml = ctypes.CDLL(NVML)
        except OSError as error:
            return str(error)
        handle = ctypes.byref(self._handle)
        millijoules = ctypes.byref(ctypes.c_ulonglong())
        code = (
            nvml.nvmlInit_v2()
            or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), handle)
            or nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle, millijoules)
        )
        if code:
            return f"NVML does not give the energy of {uuid}: code {code}"
        self._nvml = nvml
        return ""

    def joules(self) -> float | None:
        """Return the joules so far, or None if they are not measured."""
        if self._is_dry:
            return DRY_WATTS * time.monotonic()
        if self._nvml is None:
            return None
        millijoules = ctypes.c_ulonglong()
        self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def joules_since(self, before: float | None) -> float | None:
        """Return the joules since a call of `joules`, or None if they are not measured."""
        now = self.joules()
        return None if now is None or before is None else now - before


def calls_within(seconds: float, call: Callable[[], object], device: torch.device) -> int:
    """Return how many calls take about ``seconds``, at least 1, from the time of one call."""
    return max(1, int(seconds / once_seconds(call, device)))


def measure_calls(
    count: int, call: Callable[[], object], device: torch.device, meter: Meter
) -> tuple[float, float | None]:
    """Return the seconds and the joules of ``count`` calls; None if joules are not measured."""
    joules = meter.joules()
    started = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    taken = time.perf_counter() - started
    return taken, meter.joules_since(joules)


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
