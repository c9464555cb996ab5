"""Measure time and energy of cublasLt's algorithms for the matrix products of a training step.

The products are recorded in a step of the published configuration, with their types, layouts,
epilogues and alignments. Two layers are enough to contain all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpu_check.hardware import Meter, calls_within, measure_calls, synchronize
from gpu_check.published_step import PublishedStep
from mlbert.ops import cublaslt
from mlbert.ops.cublaslt_library import APART, Library, MatmulProblem
from mlbert.ops.cublaslt_tuning import choose

# Keys: whether the left and the right operand are transposed.
DIRECTIONS = {(False, True): "forward", (False, False): "dgrad", (True, False): "wgrad"}


def products_of(published: PublishedStep) -> list[MatmulProblem]:
    """Return the distinct products of a step; FP8 products also with the other accumulation."""
    library = cublaslt.library()
    library.noted = {}
    try:
        published.step()
        noted = list(library.noted)
    finally:
        library.noted = None
    found: dict[MatmulProblem, None] = {}
    for problem in noted:
        found[problem] = None
        if is_fp8(problem):
            found[problem._replace(fast=not problem.fast)] = None
    return list(found)


def name_of(problem: MatmulProblem) -> str:
    """Return direction, sizes, precision and epilogue.

    FP8 operands all have one layout; their types differ.
    """
    direction = DIRECTIONS[problem.left_transposed, problem.right_transposed]
    precision = "bf16"
    if is_fp8(problem):
        if torch.float8_e5m2 not in problem.types:
            direction = "forward"
        elif problem.types[2] is torch.float32:
            direction = "wgrad"
        else:
            direction = "dgrad"
        precision = f"fp8 {'fast' if problem.fast else 'slow'}"
    sizes = f"{problem.rows}x{problem.columns}x{problem.inner}"
    return (
        f"{direction} {sizes} {precision} {problem.epilogue.name}{' adds' if problem.adds else ''}"
    )


def is_fp8(problem: MatmulProblem) -> bool:
    """Return True if the operands are in FP8."""
    return problem.types[0].itemsize == 1


def largest_of(problems: list[MatmulProblem], number: int) -> list[MatmulProblem]:
    """Return the products with the most FLOPs."""

    def flops(problem: MatmulProblem) -> int:
        return problem.rows * problem.columns * problem.inner

    return sorted(problems, key=flops, reverse=True)[:number]


def measure(
    library: Library, problem: MatmulProblem, device: torch.device, seconds: float
) -> dict[str, Any]:
    """Return milliseconds and millijoules of each algorithm that the run's tuning tries.

    Each algorithm runs for about ``seconds``, so that its energy can be read.
    """
    found: dict[int, dict[str, float]] = {}
    before = library.choices.get(problem)
    meter = Meter(device)

    def timer(work: Callable[[], object]) -> list[float]:
        work()
        synchronize(device)
        count = calls_within(seconds, work, device)
        all_seconds, used = measure_calls(count, work, device, meter)
        taken = all_seconds / count
        times = {"ms": 1e3 * taken}
        if used is not None:
            times["millijoules"] = 1e3 * used / count
        found[library.choices[problem]] = times
        return [taken]

    choose(library, problem, device, timer)
    if before is not None:
        library.choices[problem] = before
    if not found:
        return {"skipped": "cublasLt has no algorithm for it"}
    row: dict[str, Any] = {
        "algorithms": found,
        "by_time": min(found, key=lambda choice: found[choice]["ms"]),
        "apart": APART,
    }
    if meter.reason:
        row["energy"] = meter.reason
    if all("millijoules" in times for times in found.values()):
        row["by_joules"] = min(found, key=lambda choice: found[choice]["millijoules"])
    return row
