"""Every matrix product of a training step, in all ways that cublasLt offers: forward, dgrad and wgrad.

The products are the ones that a step of the published configuration computes, with their types, layouts, epilogues and
alignments; its two layers have the products of all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gpu_check.hardware import peaks_of
from gpu_check.product import Product
from mlbert.host.native import NativeUnavailable
from mlbert.ops import cublaslt
from mlbert.ops.cublaslt_library import APART, Epilogue, Library, MatmulProblem
from mlbert.ops.cublaslt_tuning import choose, time_launches, twin

DIRECTIONS = {(False, True): "forward", (False, False): "dgrad", (True, False): "wgrad"}  # by transposed operands


def products_of(product: Product) -> list[MatmulProblem]:
    """Return the distinct products of a step, and FP8 ones also with the other accumulation."""
    library = cublaslt.library()
    library.noted = {}
    try:
        product.step()
        noted = list(library.noted)
    finally:
        library.noted = None
    found: dict[MatmulProblem, None] = {}
    for problem in noted:
        found[problem] = None
        if is_fp8(problem):
            found[problem._replace(fast=not problem.fast)] = None
    return list(found)


def rows(make: Callable[[], Product], peaks_name: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return name -> measurement of each product; one row that says why if there is no cublasLt."""
    try:
        library = cublaslt.library()
    except NativeUnavailable as error:
        reason = str(error)
        return {"cublasLt": lambda: {"skipped": reason}}
    product = make()
    found = products_of(product)
    device = product.device
    return {f"GEMM {name_of(problem)}": partial(measure, library, problem, device, peaks_name) for problem in found}


def name_of(problem: MatmulProblem) -> str:
    """Return direction, sizes and precision; of FP8 operands, all are laid out alike, and the types say which is
    which."""
    direction = DIRECTIONS[problem.left_transposed, problem.right_transposed]
    precision = "bf16"
    if is_fp8(problem):
        gradient = torch.float8_e5m2 in problem.types
        direction = "forward" if not gradient else "wgrad" if problem.types[2] is torch.float32 else "dgrad"
        precision = f"fp8 {'fast' if problem.fast else 'slow'}"
    sizes = f"{problem.rows}x{problem.columns}x{problem.inner}"
    return f"{direction} {sizes} {precision} {problem.epilogue.name}{' adds' if problem.adds else ''}"


def is_fp8(problem: MatmulProblem) -> bool:
    """Return whether the operands are in FP8."""
    return problem.types[0].itemsize == 1


def measure(library: Library, problem: MatmulProblem, device: torch.device, peaks_name: str) -> dict[str, Any]:
    """Return milliseconds with the heuristic's first algorithm, with the fastest one, and apart from the epilogue."""
    found = _times(library, problem, device)
    if not found:
        return {"skipped": "cublasLt has no algorithm for it"}
    row: dict[str, Any] = {"first_ms": 1e3 * found.get(1, min(found.values())), "best_ms": 1e3 * min(found.values())}
    row["algorithm"] = min(found, key=lambda choice: found[choice])
    if APART in found:
        row["apart_ms"] = 1e3 * found[APART]
    if problem.epilogue != Epilogue.NONE and (plain := _times(library, twin(problem), device)):
        row["without_epilogue_ms"] = 1e3 * min(plain.values())
    rate = 2.0 * problem.rows * problem.columns * problem.inner / min(found.values()) / 1e12
    row |= {"forward_seconds": min(found.values()), "rate": rate, "unit": "TFLOP/s"}
    if peaks := peaks_of(peaks_name):
        row["share_of_peak"] = rate / (peaks.fp8 if is_fp8(problem) else peaks.bf16)
    return row


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
