"""Time every matrix product of a training step (forward, dgrad and wgrad) with cublasLt's
algorithms.

The products are recorded in a step of the published configuration, with their types, layouts,
epilogues and alignments. Two layers are enough to contain all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gpu_check.hardware import rated
from gpu_check.published_step import PublishedStep
from gpu_check.rows import Row
from mlbert.host.native import NativeUnavailable
from mlbert.ops import cublaslt
from mlbert.ops.cublaslt_library import APART, Epilogue, Library, MatmulProblem
from mlbert.ops.cublaslt_tuning import choose, time_launches, twin

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


def rows(make: Callable[[], PublishedStep]) -> list[Row]:
    """Return a row for each product, or a row with the reason if cublasLt is not available."""
    try:
        library = cublaslt.library()
    except NativeUnavailable as error:
        reason = str(error)
        return [("cublasLt", lambda: {"skipped": reason})]
    published = make()
    device = published.device
    problems = products_of(published)
    return [
        (f"GEMM {name_of(problem)}", partial(measure, library, problem, device))
        for problem in problems
    ]


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


def measure(library: Library, problem: MatmulProblem, device: torch.device) -> dict[str, Any]:
    """Return milliseconds of the heuristic's first algorithm, the fastest one,
    and a separate epilogue.
    """
    found = _times(library, problem, device)
    if not found:
        return {"skipped": "cublasLt has no algorithm for it"}
    row: dict[str, Any] = {
        "first_ms": 1e3 * found.get(1, min(found.values())),
        "best_ms": 1e3 * min(found.values()),
    }
    row["algorithm"] = min(found, key=lambda choice: found[choice])
    if APART in found:
        row["apart_ms"] = 1e3 * found[APART]
    if problem.epilogue != Epilogue.NONE and (plain := _times(library, twin(problem), device)):
        row["without_epilogue_ms"] = 1e3 * min(plain.values())
    rate = 2.0 * problem.rows * problem.columns * problem.inner / min(found.values()) / 1e12
    fastest = {"forward_seconds": min(found.values())}
    return row | fastest | rated(rate, "TFLOP/s", device, is_fp8=is_fp8(problem))


def _times(library: Library, problem: MatmulProblem, device: torch.device) -> dict[int, float]:
    """Return the median seconds of each choice that `mlbert.ops.cublaslt_tuning` tries."""
    found: dict[int, float] = {}
    before = library.choices.get(problem)

    def timer(work: Callable[[], object]) -> list[float]:
        seconds = time_launches(device, work)
        found[library.choices[problem]] = statistics.median(seconds)
        return seconds

    choose(library, problem, device, timer)
    if before is not None:
        library.choices[problem] = before
    return found
