"""The choice of cublasLt's algorithms: by time, cached per device, the same on all ranks."""

import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mlbert.ops import cublaslt, cublaslt_library, cublaslt_tuning
from mlbert.ops.cublaslt_library import APART, FIRST, Epilogue, MatmulProblem
from mlbert.ops.cublaslt_tuning import Times, fastest, time_launches, tuned, with_twins

pytestmark = pytest.mark.usefixtures("own_cache")
CPU = torch.device("cpu")
TIMES = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=5)


@pytest.fixture(autouse=True)
def host_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit alignments to that of PyTorch's host allocations;
    a GPU's are above what cublasLt checks.
    """
    for module in (cublaslt_library, cublaslt_tuning):
        monkeypatch.setattr(module, "LARGEST_ALIGNMENT", 64)


@pytest.fixture
def several_algorithms(emulator) -> Any:
    """Return an emulator with five algorithms per problem, the last of which is wrong."""
    emulator.offer(5)
    return emulator


@given(st.dictionaries(st.integers(APART, 8), TIMES, min_size=1))
def test_fastest_has_the_lowest_median(times):
    medians = {choice: statistics.median(values) for choice, values in times.items()}
    assert medians[fastest(times)] == min(medians.values())
    assert fastest({}) == FIRST


class Clock:
    """Replace `time_launches`: the seconds of each algorithm, from 1 on,
    and of a product apart from its epilogue.
    """

    def __init__(self, emulator: Any, seconds: dict[int, float], apart: float = 9.0) -> None:
        self.emulator = emulator
        self.seconds = seconds
        self.apart = apart
        self.calls = 0

    def __call__(self, device: torch.device, work: Callable[[], object]) -> Times:
        self.calls += 1
        before = self.emulator.library.choices.copy()
        is_done = work()
        choices = list(before.values())
        is_apart = APART in choices and choices[-1] == APART
        assert is_apart or is_done
        return [self.apart if is_apart else self.seconds[self.emulator.algorithm + 1]] * 3


def linear_step(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Warm up with one linear layer, forward and backward."""
    cublaslt.linear_qkv(x, *weight.chunk(3), *bias.chunk(3)).sum().backward()


def feed_forward_step(x: Tensor, w1: Tensor, b1: Tensor) -> None:
    """Warm up with both feed-forward layers, forward and backward,
    then forward without gradients.
    """
    cublaslt.feed_forward(x, w1, b1, w1.detach().t(), False).sum().backward()
    cublaslt.feed_forward(*(t.detach() for t in (x, w1, b1, w1.t())), False)


def operands() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=draw) for shape in ((32, 16), (48, 16), (48,)))
    return x.bfloat16().requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


def tune_step(
    monkeypatch, clock, is_first=True, over_ranks=lambda _: None, step=linear_step
) -> tuple[dict, str]:
    """Return epilogue -> choice for the products of a step, and the log messages."""
    monkeypatch.setattr(cublaslt_tuning, "time_launches", clock)
    library = cublaslt.library()
    messages = []
    library.choices.clear()
    tuned(CPU, is_first, over_ranks, messages.append, functools.partial(step, *operands()))
    assert library.noted is None
    return {problem.epilogue.name: choice for problem, choice in library.choices.items()}, " ".join(
        messages
    )


def test_fastest_correct_algorithm_is_chosen(several_algorithms, monkeypatch):
    """The last algorithm is faster but wrong."""
    clock = Clock(several_algorithms, {1: 5.0, 2: 4.0, 3: 2.0, 4: 3.0, 5: 0.1})
    chosen, message = tune_step(monkeypatch, clock)
    assert chosen == {"BIAS": 3, "NONE": 3, "BGRADB": 3}
    assert message.startswith("cublasLt: 3 products, 3 timed")
    linear_step(*operands())
    assert several_algorithms.algorithm == 2, "the run does not use the choice"


@pytest.mark.parametrize(
    ("step", "apart"),
    [(linear_step, ["BGRADB"]), (feed_forward_step, ["GELU_AUX_BIAS", "DGELU_BGRAD", "GELU_BIAS"])],
)
def test_epilogue_runs_in_a_separate_kernel_if_that_is_faster(
    several_algorithms, monkeypatch, step, apart
):
    inputs = operands()
    step(*inputs)
    before = [x.grad.clone() for x in inputs]
    clock = Clock(several_algorithms, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, apart=0.5)
    chosen, message = tune_step(monkeypatch, clock, step=step)
    assert chosen == {"BIAS": 1, "NONE": 1, **dict.fromkeys(apart, APART)}
    assert f"{len(apart)} apart from their epilogue" in message
    several_algorithms.refuse(*(Epilogue[name] for name in apart))
    again = operands()
    step(*again)
    for one, other in zip(before, again, strict=True):
        assert (one - other.grad).norm() <= 2**-7 * one.norm()


def test_times_are_cached(several_algorithms, monkeypatch, own_cache):
    clock = Clock(several_algorithms, {1: 2.0, 2: 1.0, 3: 3.0, 4: 3.0})
    first, _ = tune_step(monkeypatch, clock)
    calls = clock.calls
    again, message = tune_step(monkeypatch, clock)
    assert (again, clock.calls) == (first, calls)
    assert "0 timed" in message
    (file,) = own_cache.glob("mlbert/cublaslt-*.json")
    file.write_bytes(file.read_bytes().replace(b": 2", b": 3"))
    damaged, message = tune_step(monkeypatch, clock)
    assert (damaged, clock.calls) == (first, 2 * calls)
    assert "is damaged" in message


def test_all_ranks_use_the_choices_of_rank_0(emulator, monkeypatch):
    """Only the first of two ranks times algorithms.

    If the ranks' products differ, nothing is chosen.
    """
    emulator.offer(3)
    sent: list[Tensor] = []
    clock = Clock(emulator, {1: 2.0, 2: 1.0})
    first, _ = tune_step(monkeypatch, clock, over_ranks=lambda x: sent.append(x.clone()))
    calls = clock.calls

    def receive(x: Tensor) -> None:
        torch.maximum(x, sent.pop(0), out=x)

    other, _ = tune_step(monkeypatch, clock, is_first=False, over_ranks=receive)
    assert other == first == {"BIAS": 2, "NONE": 2, "BGRADB": 2}
    assert clock.calls == calls
    none, message = tune_step(monkeypatch, clock, over_ranks=lambda x: x[:1].add_(1))
    assert none == {}
    assert "differ" in message


def test_unsupported_product_runs_apart(emulator, monkeypatch):
    emulator.refuse(Epilogue.BGRADB)
    with pytest.warns(RuntimeWarning, match="no algorithm"):
        chosen, _ = tune_step(monkeypatch, Clock(emulator, {1: 1.0}))
    assert chosen == {"BIAS": 1, "NONE": 1, "BGRADB": APART}


@pytest.mark.parametrize("alignments", [(64, 64, 64, 64, 0), (4, 2, 16, 4, 0), (64, 8, 32, 8, 0)])
def test_operands_match_the_problem(emulator, alignments):
    """The operands made for timing pose the same problem, so the choice applies to it."""
    types = torch.bfloat16, torch.bfloat16, torch.float32
    problem = MatmulProblem(
        24, 16, 32, types, True, False, Epilogue.BGRADB, False, True, alignments
    )
    library = emulator.library
    library.noted = {}
    assert cublaslt_tuning._Operands(problem, CPU).multiply(library)
    assert list(library.noted) == [problem]
    assert [p.epilogue for p in with_twins(library.noted)] == [Epilogue.NONE, Epilogue.BGRADB]
    library.noted = None


def test_each_launch_is_timed():
    counter = itertools.count()
    times = time_launches(CPU, lambda: next(counter))
    assert len(times) == cublaslt_tuning.LAUNCHES == next(counter) - 1
    assert all(seconds >= 0 for seconds in times)
