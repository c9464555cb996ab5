"""Find cublasLt's fastest algorithm for each product of a step by timing, before a run.

    record the products of a warm-up  ->  time each with the heuristic's first algorithms,
                                          on dummy operands
    ->  take the lowest median  ->  use rank 0's choices on all ranks,
                                    so that all compute the same bits

The heuristic orders algorithms by estimated speed. Algorithms whose results differ from the first
one's by more than rounding are excluded. For an epilogue with GELU or with a sum over tokens, a
product with a separate kernel is timed as well. Results are cached per kind of device
(`mlbert.ops.device_cache`).
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mlbert.host.native import NativeUnavailable
from mlbert.ops import cublaslt, device_cache
from mlbert.ops.cublaslt_library import (
    APART,
    FIRST,
    LARGEST_ALIGNMENT,
    CublasLtError,
    Epilogue,
    Library,
    MatmulProblem,
)

CANDIDATES = 8  # as in csrc/mhalib/matmul.c
LAUNCHES = 5
CACHE = "cublaslt"
QUEUED_CYCLES = 4_000_000  # device clock cycles, 2 ms: time for the host to queue the timed work
# Allowed difference relative to a result's norm, for another order of summation;
# larger for fast FP8 accumulation.
ALLOWED = 2**-7
ALLOWED_FAST = 2**-5

GELU = (Epilogue.GELU_BIAS, Epilogue.GELU_AUX_BIAS)
CAN_BE_APART = (*GELU, Epilogue.DGELU_BGRAD, Epilogue.BGRADB)

Times = Sequence[float]  # seconds of repeated launches
Timer = Callable[[Callable[[], object]], Times]


def tuned(
    device: torch.device,
    is_first: bool,
    over_ranks: Callable[[Tensor], Any],
    say: Callable[[str], object],
    warm_up: Callable[[], None],
) -> None:
    """Run `warm_up` and choose an algorithm for each cublasLt product in it. Call it on all ranks.

    Args:
        device: of the run.
        is_first: whether this rank's choices are used.
        over_ranks: in-place all-reduce MAX of a host tensor.
        say: logs how long it took, or that ranks differ.
        warm_up: computes the same products as the run.
    """
    library, noted = _noted_products(warm_up)
    if library is not None and (problems := with_twins(noted)):
        tune(library, problems, device, is_first, over_ranks, say)


def ruled(warm_up: Callable[[], None]) -> None:
    """Run `warm_up`, and use the heuristic's first algorithm for each cublasLt product in it, with
    GELU's derivative as a separate kernel: what timing mostly finds, without timing.
    """
    library, noted = _noted_products(warm_up)
    if library is None:
        return
    for problem in noted:
        is_apart = problem.epilogue == Epilogue.DGELU_BGRAD
        library.choices[problem] = APART if is_apart else FIRST


def _noted_products(
    warm_up: Callable[[], None],
) -> tuple[Library | None, Mapping[MatmulProblem, None]]:
    """Run `warm_up`. Return the library, None if there is none, and the products it computed."""
    try:
        library = cublaslt.library()
    except NativeUnavailable:
        warm_up()
        return None, {}
    noted: dict[MatmulProblem, None] = {}
    library.noted = noted
    try:
        warm_up()
    finally:
        library.noted = None
    return library, noted


def tune(
    library: Library,
    problems: Sequence[MatmulProblem],
    device: torch.device,
    is_first: bool,
    over_ranks: Callable[[Tensor], Any],
    say: Callable[[str], object],
    timer: Timer | None = None,
) -> None:
    """Set `library.choices` for these problems; arguments as in `tuned`. `timer`: for tests."""
    started = time.perf_counter()
    if not _same_on_all(problems, over_ranks):
        say(
            "cublasLt: the ranks' products differ, "
            "so each runs with the heuristic's first algorithm"
        )
        return
    found = _known(device, say) if is_first else {}
    known = len(found)
    if is_first:
        timer = timer or functools.partial(time_launches, device)
        for problem in problems:  # the variant without epilogue precedes the problem itself
            if str(problem) not in found:
                found[str(problem)] = choose(library, problem, device, timer)
            library.choices[problem] = found[str(problem)]
    # Offset so that choices start at 0; other ranks send 0, so MAX gives rank 0's.
    sent = torch.tensor([found[str(problem)] - APART if is_first else 0 for problem in problems])
    over_ranks(sent)
    library.choices.update(zip(problems, (sent + APART).tolist(), strict=True))
    for problem in problems:  # loads their kernels, which must not happen during graph capture
        operands = _Operands(problem, device)
        if library.choices[problem] == APART:
            operands.multiply_apart(library)
        else:
            operands.multiply(library)
    timed = len(found) - known
    if timed:
        device_cache.store(CACHE, device, found)
    chosen = [library.choices[problem] for problem in problems]
    apart = chosen.count(APART)
    not_first = sum(choice > 1 for choice in chosen)
    seconds = time.perf_counter() - started
    say(
        f"cublasLt: {len(problems)} products, {timed} timed, {seconds:.1f} s; "
        f"{apart} apart from their epilogue, {not_first} not with the first algorithm"
    )


def with_twins(noted: Mapping[MatmulProblem, None]) -> list[MatmulProblem]:
    """Return the distinct problems; before each whose epilogue can be apart,
    the product that remains.
    """
    found: dict[MatmulProblem, None] = {}
    for problem in noted:
        if problem.epilogue in CAN_BE_APART:
            found[twin(problem)] = None
        found[problem] = None
    return list(found)


def twin(problem: MatmulProblem) -> MatmulProblem:
    """Return the problem without epilogue, or with only the bias of one with GELU."""
    *operands, bias, _ = problem.alignments
    if problem.epilogue in GELU:
        return problem._replace(epilogue=Epilogue.BIAS, alignments=(*operands, bias, 0))
    return problem._replace(epilogue=Epilogue.NONE, alignments=(*operands, 0, 0))


def choose(library: Library, problem: MatmulProblem, device: torch.device, timer: Timer) -> int:
    """Return the fastest choice for a problem, or `FIRST` if memory is insufficient to time it."""
    try:
        return fastest(_times(library, problem, _Operands(problem, device), timer))
    except torch.OutOfMemoryError:
        return FIRST
    finally:
        library.choices.pop(problem, None)


def fastest(times: Mapping[int, Times]) -> int:
    """Return the choice with the lowest median time, the first of equals; `FIRST` without times."""
    return min(times, key=lambda choice: statistics.median(times[choice]), default=FIRST)


def time_launches(
    device: torch.device, work: Callable[[], object], launches: int = LAUNCHES
) -> list[float]:
    """Return the seconds of each launch of work on the device's current stream,
    after one that is not timed.
    """
    work()
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(launches):
            work()
            marks.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(marks)]
    torch.cuda._sleep(QUEUED_CYCLES)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(launches + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


def _times(
    library: Library, problem: MatmulProblem, operands: _Operands, timer: Timer
) -> dict[int, Times]:
    """Return choice -> times, for each algorithm that agrees with the first one."""
    times: dict[int, Times] = {}
    expected: list[Tensor] = []
    allowed = ALLOWED_FAST if problem.fast else ALLOWED
    for choice in range(1, CANDIDATES + 1):
        library.choices[problem] = choice
        operands.out.zero_()
        try:
            if not operands.multiply(library):
                break
            results = operands.results()
            expected = expected or [result.clone() for result in results]
            pairs = zip(results, expected, strict=True)
            # False for NaN.
            if all(float((a - b).norm()) <= allowed * float(b.norm()) for a, b in pairs):
                times[choice] = timer(lambda: operands.multiply(library))
        except CublasLtError:  # listed by the heuristic, but fails
            continue
    if problem.epilogue in CAN_BE_APART:
        library.choices[problem] = APART
        times[APART] = timer(lambda: operands.multiply_apart(library))
    return times


class _Operands:
    """Random operands with a problem's sizes, dtypes and alignments."""

    def __init__(self, problem: MatmulProblem, device: torch.device) -> None:
        self.problem = problem
        self._device = device
        rows = problem.rows
        columns = problem.columns
        inner = problem.inner
        left_type, right_type, out_type = problem.types
        at_out, at_left, at_right, at_bias, at_aux = problem.alignments
        left_shape = (inner, rows) if problem.left_transposed else (rows, inner)
        right_shape = (columns, inner) if problem.right_transposed else (inner, columns)
        self.out = self._room((rows, columns), out_type, at_out)
        self.left = self._random(left_shape, left_type, at_left)
        self.right = self._random(right_shape, right_type, at_right)
        self.bias = None
        if at_bias:
            length = rows if problem.epilogue == Epilogue.BGRADB else columns
            self.bias = self._random((length,), out_type, at_bias)
        self.aux = self._random((rows, columns), out_type, at_aux) if at_aux else None
        self._scale = torch.ones((), device=device) if left_type.itemsize == 1 else None

    def multiply(self, library: Library) -> bool:
        """Compute the product with the library's choice. Return whether that algorithm exists."""
        return self._product(library, self.problem.epilogue, self.bias, self.aux)

    def multiply_apart(self, library: Library) -> None:
        """Compute the product without its epilogue, and GELU,
        its derivative or the sum over tokens.
        """
        assert self.bias is not None
        if self.problem.epilogue in GELU:
            cublaslt.bias_gelu_apart(library, self.left, self.right, self.bias)
        elif self.problem.epilogue == Epilogue.DGELU_BGRAD:
            assert self.aux is not None
            cublaslt.gelu_backward_apart(library, self.left, self.right, self.aux)
        else:
            torch.sum(self.left, 0, dtype=self.bias.dtype, out=self.bias)
            self._product(library, Epilogue.NONE, None, None)

    def _product(
        self, library: Library, epilogue: Epilogue, bias: Tensor | None, aux: Tensor | None
    ) -> bool:
        problem = self.problem
        return library.product(
            self.out,
            self.left,
            self.right,
            left_transposed=problem.left_transposed,
            right_transposed=problem.right_transposed,
            epilogue=epilogue,
            bias=bias,
            aux=aux,
            inverse_left=self._scale,
            inverse_right=self._scale,
            fast=problem.fast,
            adds=problem.adds,
        )

    def results(self) -> list[Tensor]:
        """Return the outputs of the product, except the pre-activation."""
        sums = self.problem.epilogue in (Epilogue.BGRADB, Epilogue.DGELU_BGRAD)
        return [self.out, self.bias] if sums and self.bias is not None else [self.out]

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype, alignment: int) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        storage = torch.empty(size + 2 * LARGEST_ALIGNMENT, dtype=torch.uint8, device=self._device)
        skip = -storage.data_ptr() % LARGEST_ALIGNMENT + alignment % LARGEST_ALIGNMENT
        return storage[skip : skip + size].view(dtype).view(shape)

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype, alignment: int) -> Tensor:
        return self._room(shape, dtype, alignment).copy_(
            torch.randn(shape, device=self._device, dtype=torch.bfloat16)
        )


def _known(device: torch.device, say: Callable[[str], object]) -> dict[str, int]:
    found = device_cache.load(CACHE, device, say)
    return {key: choice for key, choice in found.items() if choice in range(APART, CANDIDATES + 1)}


def _same_on_all(problems: Sequence[MatmulProblem], over_ranks: Callable[[Tensor], Any]) -> bool:
    code = zlib.crc32("\n".join(map(str, problems)).encode())
    extremes = torch.tensor([code, -code])
    over_ranks(extremes)
    return bool(extremes[0] == -extremes[1])
