"""Which of cublasLt's algorithms is the fastest for each product of a step: found by timing, before a run.

    with every product of a warm-up noted  ->  each on operands of its own, by each of the heuristic's first algorithms
    ->  the least median of the launches   ->  rank 0's choices on all ranks, so that all compute the same bits

The heuristic orders algorithms by what it estimates. An algorithm whose results differ from the first one's by more
than rounding is left out. The sum over tokens in a weight gradient's epilogue is compared with a sum of its own. What
was found is kept (`mlbert.ops.registry`), so that a problem is timed once on a kind of device.
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
from mlbert.ops import cublaslt, registry
from mlbert.ops.cublaslt_library import APART, FIRST, LARGEST_ALIGNMENT, CublasLtError, Epilogue, Library, MatmulProblem

CANDIDATES = 8  # as in csrc/mhalib/matmul.c
LAUNCHES = 5
CACHE = "cublaslt"
QUEUED_CYCLES = 4_000_000  # of the device's clock, 2 ms: while they pass, the host queues what is timed
# Of a result's norm, what sums in another order may differ by; in FP8 with few bits they are far less alike.
ALLOWED, ALLOWED_FAST = 2**-7, 2**-5

Times = Sequence[float]  # of launches of the same work
Timer = Callable[[Callable[[], object]], Times]


def tuned(
    device: torch.device,
    is_first: bool,
    over_ranks: Callable[[Tensor], Any],
    say: Callable[[str], object],
    warm_up: Callable[[], None],
) -> None:
    """Runs `warm_up` and chooses an algorithm for each product that it has made by cublasLt; all ranks together.

    Args:
        device: where it computes.
        is_first: whether this rank's choices count.
        over_ranks: raises a tensor of the host to the ranks' largest values, in place.
        say: told how long it took, or that ranks differ.
        warm_up: computes what the run will compute, with the same sizes.
    """
    try:
        library = cublaslt.library()
    except NativeUnavailable:
        warm_up()
        return
    library.noted = {}
    try:
        warm_up()
        problems = with_twins(library.noted)
    finally:
        library.noted = None
    if problems:
        tune(library, problems, device, is_first, over_ranks, say)


def tune(
    library: Library,
    problems: Sequence[MatmulProblem],
    device: torch.device,
    is_first: bool,
    over_ranks: Callable[[Tensor], Any],
    say: Callable[[str], object],
    timer: Timer | None = None,
) -> None:
    """Sets `library.choices` for these problems; arguments as in `tuned`, `timer` in place of the device's clock."""
    started = time.perf_counter()
    if not _same_on_all(problems, over_ranks):
        say("cublasLt: the ranks' products differ, and each runs by the heuristic's first algorithm")
        return
    found = _known(device, say) if is_first else {}
    known = len(found)
    for problem in problems if is_first else ():  # a twin comes before the problem that is compared with it
        if str(problem) not in found:
            found[str(problem)] = choose(library, problem, device, timer or functools.partial(time_launches, device))
        library.choices[problem] = found[str(problem)]
    # As numbers from 0 on, of which those of the other ranks are the least.
    chosen = torch.tensor([found[str(problem)] - APART if is_first else 0 for problem in problems])
    over_ranks(chosen)
    library.choices.update(zip(problems, (chosen + APART).tolist(), strict=True))
    for problem in problems:  # loads their kernels, which must not happen while a graph is recorded
        operands = _Operands(problem, device)
        (operands.multiply_apart if library.choices[problem] == APART else operands.multiply)(library)
    if timed := len(found) - known:
        registry.store(CACHE, device, found)
    others = sum(library.choices[problem] not in (FIRST, 1) for problem in problems)
    seconds = time.perf_counter() - started
    say(f"cublasLt: {len(problems)} products, {timed} timed, {seconds:.1f} s; {others} not by the first algorithm")


def with_twins(noted: Mapping[MatmulProblem, None]) -> list[MatmulProblem]:
    """The problems, before each that sums over tokens in its epilogue the one without; each once."""
    found: dict[MatmulProblem, None] = {}
    for problem in noted:
        if problem.epilogue == Epilogue.BGRADB:
            found[twin(problem)] = None
        found[problem] = None
    return list(found)


def twin(problem: MatmulProblem) -> MatmulProblem:
    """The problem without epilogue."""
    out, left, right, _, _ = problem.alignments
    return problem._replace(epilogue=Epilogue.NONE, alignments=(out, left, right, 0, 0))


def choose(library: Library, problem: MatmulProblem, device: torch.device, timer: Timer) -> int:
    """The fastest choice for one problem; `FIRST` where nothing could be timed."""
    try:
        return fastest(_times(library, problem, _Operands(problem, device), timer))
    except torch.OutOfMemoryError:
        return FIRST
    finally:
        library.choices.pop(problem, None)


def fastest(times: Mapping[int, Times]) -> int:
    """The choice with the least median time, of equals the first in order; `FIRST` where there are no times."""
    return min(times, key=lambda choice: statistics.median(times[choice]), default=FIRST)


def time_launches(device: torch.device, work: Callable[[], object]) -> list[float]:
    """Seconds of each of some launches of work on the device's current stream."""
    work()
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(LAUNCHES):
            work()
            marks.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(marks)]
    torch.cuda._sleep(QUEUED_CYCLES)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(LAUNCHES + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


def _times(library: Library, problem: MatmulProblem, operands: _Operands, timer: Timer) -> dict[int, Times]:
    """Choice -> times of its launches, for each algorithm that computes what the first one does."""
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
            if all(_agree(result, first, allowed) for result, first in zip(results, expected, strict=True)):
                times[choice] = timer(lambda: operands.multiply(library))
        except CublasLtError:  # listed, and yet it does not run
            continue
    if problem.epilogue == Epilogue.BGRADB:
        library.choices[problem] = APART
        times[APART] = timer(lambda: operands.multiply_apart(library))
    return times


class _Operands:
    """Made-up operands of a problem, of the sizes, types and alignments that it has."""

    def __init__(self, problem: MatmulProblem, device: torch.device) -> None:
        self.problem, self._device = problem, device
        rows, columns, inner = problem.rows, problem.columns, problem.inner
        left, right, out = problem.types
        places = problem.alignments
        self.out = self._room((rows, columns), out, places[0])
        self.left = self._random((inner, rows) if problem.left_transposed else (rows, inner), left, places[1])
        self.right = self._random((columns, inner) if problem.right_transposed else (inner, columns), right, places[2])
        sums = problem.epilogue == Epilogue.BGRADB
        self.bias = self._random((rows if sums else columns,), out, places[3]) if places[3] else None
        self.aux = self._random((rows, columns), out, places[4]) if places[4] else None
        self._scale = torch.ones((), device=device) if left.itemsize == 1 else None

    def multiply(self, library: Library) -> bool:
        """The product by the library's choice; whether there is such an algorithm."""
        return self._product(library, self.problem.epilogue, self.bias, self.aux)

    def multiply_apart(self, library: Library) -> bool:
        """The product without its epilogue, and the sum over tokens."""
        assert self.bias is not None
        torch.sum(self.left, 0, dtype=self.bias.dtype, out=self.bias)
        return self._product(library, Epilogue.NONE, None, None)

    def _product(self, library: Library, epilogue: Epilogue, bias: Tensor | None, aux: Tensor | None) -> bool:
        problem = self.problem
        return library.product(
            *(self.out, self.left, self.right),
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
        """What the product has written, but for the pre-activation."""
        sums = self.problem.epilogue in (Epilogue.BGRADB, Epilogue.DGELU_BGRAD)
        return [self.out, self.bias] if sums and self.bias is not None else [self.out]

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype, alignment: int) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        storage = torch.empty(size + 2 * LARGEST_ALIGNMENT, dtype=torch.uint8, device=self._device)
        skipped = -storage.data_ptr() % LARGEST_ALIGNMENT + alignment % LARGEST_ALIGNMENT
        return storage[skipped : skipped + size].view(dtype).view(shape)

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype, alignment: int) -> Tensor:
        room = self._room(shape, dtype, alignment)
        return room.copy_(torch.randn(shape, device=self._device, dtype=torch.bfloat16))


def _agree(result: Tensor, expected: Tensor, allowed: float) -> bool:
    """Whether it differs by no more than this share of its norm; NaN is not."""
    return float((result - expected).norm()) <= allowed * float(expected.norm())


def _known(device: torch.device, say: Callable[[str], object]) -> dict[str, int]:
    found = registry.load(CACHE, device, say)
    return {key: choice for key, choice in found.items() if choice in range(APART, CANDIDATES + 1)}


def _same_on_all(problems: Sequence[MatmulProblem], over_ranks: Callable[[Tensor], Any]) -> bool:
    code = zlib.crc32("\n".join(map(str, problems)).encode())
    extremes = torch.tensor([code, -code])
    over_ranks(extremes)
    return bool(extremes[0] == -extremes[1])
