"""Where a step's time goes: kernels (CUDA) or operators (CPU) in a few groups, with the rates that they reach.

A trace of PyTorch's profiler is read as it is exported. A kernel's group is that of the range it was launched in: an op
of ours forward, found by its name; backward, the node whose sequence number that range had; the optimizer. Matrix
products that surround our linear ops and everything outside of a range are sorted by name. On the CPU an operator's own
time stands for the kernel.

The budgets are estimates for one H200 at 448 sequences of Wikipedia's lengths, microseconds a sequence: products at
690 TFLOP/s (bfloat16), attention at 300 forward and 205 TFLOP/s backward, element-wise work at 4.2 TB/s.
"""

from __future__ import annotations

import json
import re
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gpu_check.hardware import device_name, peaks_of, synchronize
from gpu_check.op_cases import OpCases
from gpu_check.op_speed import LAMB_BYTES
from gpu_check.trainer import OPTIMIZER_RANGE, Trainer
from mlbert.config.bert_config import BertConfig
from mlbert.models.flops import BatchWork, training_flops
from mlbert.ops import forms as registry

# Ranges of ours that lie within one another: a backward node, in its evaluation, in the optimizer at most.
MOST_NESTED = 4
GROUPS = ("attention", "GEMM", "norm", "cast", "loss", "optimizer", "embedding", "communication", "copy", "other")
PREFIX = "mlbert::"
_OP_GROUPS = {
    "attention": "attention",
    "dropout_add_layer_norm": "norm",
    "layer_norm_dropout": "norm",
    "fp8_dropout_add_layer_norm_forward": "norm",
    "fp8_dropout_add_layer_norm_backward": "norm",
    "fp8_quantise": "cast",
    "fp8_quantise_sum": "cast",
    "fp8_gelu": "cast",
    "fp8_gelu_backward": "cast",
    "masked_cross_entropy": "loss",
    "embedding_sum": "embedding",
    OPTIMIZER_RANGE.removeprefix(PREFIX): "optimizer",
}
# What a name says; the first that matches. Products' kernels: cuBLAS (nvjet, xmma, gemm), CUTLASS, split-K's second.
_NAMES = (
    (r"nccl|all_reduce|allreduce|all_gather|reduce_scatter|c10d|gloo", "communication"),
    (r"flash|attention|fmha|attn", "attention"),
    (r"gemm|nvjet|cutlass|cublas|splitk|aten::(mm|addmm|bmm|baddbmm|linear|_scaled_mm)\b", "GEMM"),
    (r"memcpy|memset|copy|cat\b|CatArray|aten::(fill_|zero_|_to_copy|clone|contiguous)\b|FillFunctor", "copy"),
    (r"layer_?norm|LayerNorm|norm_(forward|backward)_kernel", "norm"),
    (r"cast_kernel", "cast"),
    (r"softmax|nll_loss|cross_entropy|CrossEntropy", "loss"),
    (r"embedding|index_?select|indexSelect", "embedding"),
)
# Variant -> microseconds a sequence of products, attention, element-wise work, and the rest.
BUDGETS = {
    "bf16, Triton kernels": (668, 150, 161, 35),
    "bf16, also fused epilogues": (678, 150, 92, 35),
    "bf16, best case": (623, 125, 77, 28),
    "FP8 products": (419, 125, 125, 34),
}
BUDGET_CLASSES = (
    ("products", ("GEMM",)),
    ("attention", ("attention",)),
    ("element-wise", ("norm", "cast", "copy", "other")),
    ("loss, optimizer, embedding, communication", ("loss", "optimizer", "embedding", "communication")),
)


class _Ranges:
    """Ranges of host time that belong to groups: (thread, first and last microsecond, group)."""

    def __init__(self, ranges: list[tuple[Any, float, float, str]]) -> None:
        self._by_thread: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
        for thread, start, end, group in sorted(ranges, key=lambda r: (r[1], -r[2])):
            self._by_thread[thread].append((start, end, group))
        self._starts = {thread: [start for start, _, _ in found] for thread, found in self._by_thread.items()}

    def group_at(self, thread: Any, moment: float) -> str:
        """The group of the innermost range around a moment; empty outside of all."""
        last = bisect_right(self._starts.get(thread, []), moment)
        for _, end, group in reversed(self._by_thread.get(thread, [])[max(0, last - MOST_NESTED) : last]):
            if end >= moment:
                return group
        return ""


def group_of_name(name: str) -> str:
    """The group that a kernel's or operator's own name tells."""
    return next((group for pattern, group in _NAMES if re.search(pattern, name, re.IGNORECASE)), "other")


@contextmanager
def named_ops(device: torch.device) -> Iterator[None]:
    """Inside, every selected op runs within a range of its name; the selection is the same again afterwards."""
    chosen = registry.selected(device)

    def within(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with record_function(PREFIX + op):
                return function(*arguments, **options)

        return call

    for op, name in chosen.items():
        registry.register(op, "profiled")(within(op, registry.form(op, name)))
    registry.select_each(dict.fromkeys(chosen, "profiled"), device)
    try:
        yield
    finally:
        registry.select_each(chosen, device)


def group_times(events: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Group -> name -> seconds, from the events of a Chrome trace.

    Kernels where there are any, else operators' own times. What ran longest comes first within a group.
    """
    spans = [e for e in events if e.get("ph") == "X" and "dur" in e]
    host = [e for e in spans if e.get("cat") in ("cpu_op", "user_annotation")]
    ranges = _find_ranges(host)
    found: dict[str, dict[str, float]] = {group: defaultdict(float) for group in GROUPS}
    kernels = [e for e in spans if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if kernels:
        launches = {
            e["args"]["correlation"]: e
            for e in spans
            if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
        }
        callers = {e["args"]["External id"]: e for e in host if "External id" in e.get("args", {})}
        for kernel in kernels:
            arguments = kernel.get("args", {})
            launch = launches.get(arguments.get("correlation")) or callers.get(arguments.get("External id"))
            group = ranges.group_at(launch["tid"], launch["ts"]) if launch else ""
            found[group or group_of_name(kernel["name"])][kernel["name"]] += kernel["dur"] / 1e6
    else:
        for event, own in _own_times(host):
            group = ranges.group_at(event["tid"], event["ts"])
            found[group or group_of_name(event["name"])][event["name"]] += own / 1e6
    return {group: dict(sorted(names.items(), key=lambda item: -item[1])) for group, names in found.items()}


def _find_ranges(host: list[dict[str, Any]]) -> _Ranges:
    """Where our ops and the optimizer run, forward, and the backward nodes of what ran within them."""
    ordered = sorted(host, key=lambda e: e["ts"])
    ranges = [
        (e["tid"], e["ts"], _end(e), group)
        for e in ordered
        if e["name"].startswith(PREFIX) and (group := _OP_GROUPS.get(e["name"].removeprefix(PREFIX)))
    ]
    forward, owners = _Ranges(ranges), {}
    for event in ordered:
        sequence, is_backward = _sequence(event)
        if sequence is not None and not is_backward:
            # The last of the ops that saw a number took it: those before made no node.
            owners[sequence] = forward.group_at(event["tid"], event["ts"])
    for event in ordered:
        sequence, is_backward = _sequence(event)
        if is_backward and owners.get(sequence):
            ranges.append((event["tid"], event["ts"], _end(event), owners[sequence]))
    return _Ranges(ranges)


def _sequence(event: dict[str, Any]) -> tuple[int | None, bool]:
    """Autograd's sequence number of an operator, and whether it is of the backward pass."""
    arguments = event.get("args", {})
    number = arguments.get("Sequence number", -1)
    return (number if number >= 0 else None), arguments.get("Fwd thread id", 0) > 0


def _own_times(host: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float]]:
    """Every event with its time outside of the events within it, microseconds."""
    threads = defaultdict(list)
    for event in host:
        threads[event["tid"]].append(event)
    for events in threads.values():
        events.sort(key=lambda e: (e["ts"], -e["dur"]))
        own = [e["dur"] for e in events]
        open_events: list[int] = []
        for place, event in enumerate(events):
            while open_events and _end(events[open_events[-1]]) <= event["ts"]:
                open_events.pop()
            if open_events:
                own[open_events[-1]] -= event["dur"]
            open_events.append(place)
        yield from zip(events, (max(0.0, t) for t in own), strict=True)


def _end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


def profile_step(trainer: Trainer, config: BertConfig, dtype: torch.dtype, steps: int = 2) -> dict[str, Any]:
    """Profiles some steps after one that does not count, with the selected ops.

    Returns:
        ``groups``: group -> seconds a step, share, rate and unit where the counts are known, largest names;
        ``kernel_seconds`` and ``step_seconds`` (host time while profiled, so longer than usual), each a step;
        ``budgets`` on an H200: microseconds a sequence, measured and estimated.
    """
    device = trainer.device
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with named_ops(device):
        trainer.step()
        synchronize(device)
        with profile(activities=activities) as traced:
            for _ in range(steps):
                trainer.step()
            synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        traced.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return summary(group_times(events), trainer, config, dtype, steps)


def summary(
    times: dict[str, dict[str, float]], trainer: Trainer, config: BertConfig, dtype: torch.dtype, steps: int
) -> dict[str, Any]:
    """`profile_step`'s result from `group_times`' of so many steps."""
    counts = step_counts(trainer, config, dtype)
    total = sum(sum(names.values()) for names in times.values()) / steps
    peaks = peaks_of(device_name(trainer.device))
    groups = {}
    for group, names in times.items():
        seconds = sum(names.values()) / steps
        row: dict[str, Any] = {"seconds": seconds, "share": seconds / total if total else 0.0}
        if group in counts and seconds:
            amount, row["unit"] = counts[group]
            row["rate"] = amount / seconds / 1e12
            if peaks:
                row["share_of_peak"] = row["rate"] / (peaks.memory if row["unit"] == "TB/s" else peaks.bf16)
        row["names"] = {name: value / steps for name, value in list(names.items())[:5]}
        groups[group] = row
    sequences = trainer.batch.num_samples
    result: dict[str, Any] = {"sequences": sequences, "kernel_seconds": total, "groups": groups}
    device = trainer.device
    if device.type == "cuda" and "H200" in device_name(device):
        measured = [1e6 / sequences * sum(groups[g]["seconds"] for g in members) for _, members in BUDGET_CLASSES]
        names = [name for name, _ in BUDGET_CLASSES]
        result["budgets"] = {"classes": names, "measured": measured, "estimates": BUDGETS}
    return result


def step_counts(trainer: Trainer, config: BertConfig, dtype: torch.dtype) -> dict[str, tuple[float, str]]:
    """Group -> (FLOPs or bytes that a step needs at least, unit of the rate), where they are known."""
    batch, layers = trainer.batch, config.num_hidden_layers
    cases = OpCases(config, batch.to(trainer.device), dtype)
    work = BatchWork.of(batch)
    attention = sum(cases.attention(0.1).cost.flops) * layers
    # Model FLOPs count attention's backward pass as twice the forward pass.
    products = training_flops(config, work) - 3 * 4.0 * work.squared_lengths * config.hidden_size * layers
    # The last layer's two norms see only the rows that the heads read.
    rows = 2 * (layers - 1) + 2 * (work.masked + work.sequences) / work.tokens
    heads = sum(cases.layer_norm_dropout().cost.bytes) / work.tokens * work.masked * cases.element / 4
    norm = rows * sum(cases.dropout_add_layer_norm().cost.bytes) + sum(cases.layer_norm_dropout().cost.bytes) + heads
    return {
        "attention": (attention, "TFLOP/s"),
        "GEMM": (products, "TFLOP/s"),
        "norm": (norm, "TB/s"),
        "loss": (sum(cases.masked_cross_entropy().cost.bytes), "TB/s"),
        "optimizer": ((LAMB_BYTES + 4.0) * trainer.flat.numel, "TB/s"),
        "embedding": (sum(cases.embedding_sum().cost.bytes), "TB/s"),
    }
