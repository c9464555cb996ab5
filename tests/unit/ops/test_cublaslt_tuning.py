"""cublasLt's fastest algorithm for a product: what times choose, once for a device, the same on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mlbert.ops import cublaslt, cublaslt_library, cublaslt_tuning
from mlbert.ops.cublaslt_library import APART, FIRST, Epilogue, MatmulProblem
from mlbert.ops.cublaslt_tuning import Times, fastest, time_launches, tuned, with_twins

CPU = torch.device("cpu")
TIMES = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=5)
ALGORITHMS = 5


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # All that is allocated here is aligned as well as this; on a GPU, better than what cublasLt looks at.
    for module in (cublaslt_library, cublaslt_tuning):
        monkeypatch.setattr(module, "LARGEST_ALIGNMENT", 64)


@pytest.fixture
def offered(emulator) -> Any:
    """cublasLt with several algorithms for each problem, of which the last one computes something else."""
    emulator.offer(ALGORITHMS)
    return emulator


@given(st.dictionaries(st.integers(APART, 8), TIMES, min_size=1))
def test_the_least_median_is_chosen(times: dict[int, Times]) -> None:
    middle = {choice: sorted(values) for choice, values in times.items()}

    def median(choice: int) -> float:
        values = middle[choice]
        return (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2

    assert median(fastest(times)) == min(map(median, times))
    assert fastest({}) == FIRST


class Clock:
    """Given seconds for each choice: of the algorithms by their number, of whatever takes two calls `apart`."""

    def __init__(self, emulator: Any, seconds: dict[int, float], apart: float = 9.0) -> None:
        self.emulator, self.seconds, self.apart, self.calls = emulator, seconds, apart, 0

    def __call__(self, device: torch.device, work: Callable[[], object]) -> Times:
        self.calls += 1
        before = self.emulator.library.choices.copy()
        is_done = work()
        is_apart = APART in before.values() and [*before.values()][-1] == APART
        assert is_apart or is_done
        return [self.apart if is_apart else self.seconds[self.emulator.algorithm + 1]] * 3


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Callable[[], None]:
    """A warm-up: one linear layer, forward and backward."""

    def run() -> None:
        cublaslt.linear_qkv(x, *weight.chunk(3), *bias.chunk(3)).sum().backward()

    return run


def operands() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=draw) for shape in ((32, 16), (48, 16), (48,)))
    return x.bfloat16().requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


def feed_forward(x: Tensor, w1: Tensor, b1: Tensor) -> Callable[[], None]:
    """A warm-up: both layers of the feed-forward, forward and backward, and forward without gradients."""

    def run() -> None:
        cublaslt.feed_forward(x, w1, b1, w1.detach().t(), False).sum().backward()
        cublaslt.feed_forward(*(t.detach() for t in (x, w1, b1, w1.t())), False)

    return run


def tune_layer(
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    is_first: bool = True,
    over_ranks: Callable[[Tensor], Any] = len,
    layer: Callable[..., Callable[[], None]] = layer,
) -> tuple[dict[str, int], str]:
    """Epilogue -> choice of the products of one layer, and what was told."""
    monkeypatch.setattr(cublaslt_tuning, "time_launches", clock)
    library, said = cublaslt.library(), []
    library.choices.clear()
    tuned(CPU, is_first, over_ranks, said.append, layer(*operands()))
    assert library.noted is None
    return {problem.epilogue.name: choice for problem, choice in library.choices.items()}, " ".join(said)


def test_each_product_takes_the_fastest_that_is_right(offered, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last algorithm is the fastest, and wrong."""
    clock = Clock(offered, {1: 5.0, 2: 4.0, 3: 2.0, 4: 3.0, 5: 0.1})
    chosen, said = tune_layer(monkeypatch, clock)
    assert chosen == {"BIAS": 3, "NONE": 3, "BGRADB": 3}
    assert said.startswith("cublasLt: 3 products, 3 timed")
    layer(*operands())()
    assert offered.algorithm == 2, "the run takes what was chosen"


@pytest.mark.parametrize(
    ("layer", "apart"), [(layer, ["BGRADB"]), (feed_forward, ["GELU_AUX_BIAS", "DGELU_BGRAD", "GELU_BIAS"])]
)
def test_a_kernel_of_its_own_where_it_is_faster(
    offered, monkeypatch: pytest.MonkeyPatch, layer: Callable[..., Callable[[], None]], apart: list[str]
) -> None:
    inputs = operands()
    layer(*inputs)()
    before = [x.grad.clone() for x in inputs]
    clock = Clock(offered, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, apart=0.5)
    chosen, said = tune_layer(monkeypatch, clock, layer=layer)
    assert chosen == {"BIAS": 1, "NONE": 1, **dict.fromkeys(apart, APART)}
    assert f"{len(apart)} apart from their epilogue" in said
    offered.refuse(*(Epilogue[name] for name in apart))
    again = operands()
    layer(*again)()
    for one, other in zip(before, again, strict=True):
        assert (one - other.grad).norm() <= 2**-7 * one.norm()


def test_a_problem_is_timed_once_on_a_kind_of_device(offered, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = Clock(offered, {1: 2.0, 2: 1.0, 3: 3.0, 4: 3.0})
    first, _ = tune_layer(monkeypatch, clock)
    calls = clock.calls
    again, said = tune_layer(monkeypatch, clock)
    assert (again, clock.calls) == (first, calls)
    assert "0 timed" in said
    (file,) = (tmp_path / "mlbert").glob("cublaslt-*.json")
    file.write_bytes(file.read_bytes().replace(b": 2", b": 3"))
    damaged, said = tune_layer(monkeypatch, clock)
    assert (damaged, clock.calls) == (first, 2 * calls)
    assert "is damaged" in said


def test_ranks_take_the_choices_of_the_first(emulator_path: Path, emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks in turn; the other one times nothing. Where their products differ, nothing is chosen."""
    emulator.offer(3)
    sent: list[Tensor] = []
    clock = Clock(emulator, {1: 2.0, 2: 1.0})
    first, _ = tune_layer(monkeypatch, clock, over_ranks=lambda x: sent.append(x.clone()))
    calls = clock.calls

    def receive(x: Tensor) -> None:
        torch.maximum(x, sent.pop(0), out=x)

    other, _ = tune_layer(monkeypatch, clock, is_first=False, over_ranks=receive)
    assert other == first == {"BIAS": 2, "NONE": 2, "BGRADB": 2}
    assert clock.calls == calls

    def differ(x: Tensor) -> None:
        x[0] += 1

    none, said = tune_layer(monkeypatch, clock, over_ranks=differ)
    assert none == {}
    assert "differ" in said


def test_without_algorithms_the_run_continues(emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.refuse(Epilogue.BGRADB)
    with pytest.warns(RuntimeWarning, match="no algorithm"):
        chosen, _ = tune_layer(monkeypatch, Clock(emulator, {1: 1.0}))
    assert chosen == {"BIAS": 1, "NONE": 1, "BGRADB": APART}


@pytest.mark.parametrize("alignments", [(64, 64, 64, 64, 0), (4, 2, 16, 4, 0), (64, 8, 32, 8, 0)])
def test_operands_match_the_problem(emulator, alignments: tuple[int, ...]) -> None:
    """So they meet the choice made for it."""
    types = torch.bfloat16, torch.bfloat16, torch.float32
    problem = MatmulProblem(24, 16, 32, types, True, False, Epilogue.BGRADB, False, True, alignments)
    library = emulator.library
    library.noted = {}
    assert cublaslt_tuning._Operands(problem, CPU).multiply(library)
    assert list(library.noted) == [problem]
    assert [p.epilogue for p in with_twins(library.noted)] == [Epilogue.NONE, Epilogue.BGRADB]
    library.noted = None


def test_launches_are_timed_one_by_one() -> None:
    counter = itertools.count()
    times = time_launches(CPU, lambda: next(counter))
    assert len(times) == cublaslt_tuning.LAUNCHES == next(counter) - 1
    assert all(seconds >= 0 for seconds in times)
