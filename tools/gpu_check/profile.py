"""Profile a step: the time of kernels (CUDA) or operators (CPU) in a few groups.

The profile is a trace exported by PyTorch's profiler. A kernel's group follows from its name, the
only thing known of kernels that a graph launches.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_check.hardware import synchronize

MOST_KERNELS = 20  # per profile
GROUPS = (
    "attention",
    "GEMM",
    "norm",
    "cast",
    "loss",
    "optimizer",
    "embedding",
    "communication",
    "copy",
    "other",
)
# The first matching pattern counts. Kernels of products are from cuBLAS (nvjet, xmma, gemm),
# CUTLASS and split-K.
_NAMES = (
    (r"nccl|all_reduce|allreduce|all_gather|reduce_scatter|c10d|gloo", "communication"),
    (
        r"flash|attention|fmha|attn|rotary|(query|key_value)_gradient_kernel",
        "attention",
    ),
    (
        r"gemm|nvjet|cutlass|cublas|splitk|product_kernel|aten::(mm|addmm|bmm|baddbmm|linear|_scaled_mm)\b",
        "GEMM",
    ),
    (
        r"memcpy|memset|copy|expand_kernel|cat\b|CatArray|aten::(fill_|zero_|_to_copy|clone|contiguous)\b|FillFunctor",
        "copy",
    ),
    (r"layer_?norm|norm_(forward|backward)_kernel|sum_partials_kernel|add_dropout_kernel", "norm"),
    (r"(cast|gelu|transpose)_kernel", "cast"),
    (r"softmax|nll_loss|cross_?entropy|loss_(forward|sum|backward)_kernel", "loss"),
    (
        r"(first|second|one)_pass_kernel|sum_squares_kernel|owner_sums_kernel|begin_kernel",
        "optimizer",
    ),
    (r"embedding|index_?select|indexSelect", "embedding"),
)


def group_of_name(name: str) -> str:
    """Return the group of a kernel or operator with this name."""
    return next(
        (group for pattern, group in _NAMES if re.search(pattern, name, re.IGNORECASE)), "other"
    )


def group_times(events: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return group -> name -> seconds, the longest first, from the events of a Chrome trace.

    A trace without kernels, as on a CPU, is evaluated by operators,
    including the operators that they call.
    """
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    kernels = [
        event for event in spans if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    found: dict[str, dict[str, float]] = {group: defaultdict(float) for group in GROUPS}
    for event in kernels or (event for event in spans if event.get("cat") == "cpu_op"):
        found[group_of_name(event["name"])][event["name"]] += event["dur"] / 1e6
    return {
        group: dict(sorted(names.items(), key=lambda item: -item[1]))
        for group, names in found.items()
    }


def profile_step(
    step: Callable[[], object], device: torch.device, steps: int = 2
) -> dict[str, Any]:
    """Profile some steps, or replays of their graph, after a step that is not profiled.

    Returns:
        ``groups``: group -> seconds per step, share, and the longest names;
        ``kernels``: name -> seconds per step of the longest kernels;
        ``kernel_seconds`` and ``step_seconds`` (host time, longer than usual because of profiling)
            per step.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    step()
    synchronize(device)
    started = time.perf_counter()
    with profile(activities=activities) as traced:
        for _ in range(steps):
            step()
        synchronize(device)
    step_seconds = (time.perf_counter() - started) / steps
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        traced.export_chrome_trace(str(path))
        times = group_times(json.loads(path.read_text())["traceEvents"])
    every = {name: seconds / steps for names in times.values() for name, seconds in names.items()}
    total = sum(every.values())
    groups = {}
    for group, names in times.items():
        seconds = sum(names.values()) / steps
        longest = {name: value / steps for name, value in list(names.items())[:5]}
        share = seconds / total if total else 0.0
        groups[group] = {"seconds": seconds, "share": share, "names": longest}
    kernels = dict(sorted(every.items(), key=lambda item: -item[1])[:MOST_KERNELS])
    return {
        "step_seconds": step_seconds,
        "kernel_seconds": total,
        "groups": groups,
        "kernels": kernels,
    }
