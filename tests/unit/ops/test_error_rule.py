"""The error rule: what passes, what does not, and that it is the same whichever draws it sees."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from awkward_batches import awkward_batches
from gpu_check import op_checks
from gpu_check.op_cases import OpCases
from mlbert.config.bert_config import BertConfig
from mlbert.ops import forms as registry
from mlbert.ops.comparison import MAX_DRAWS, MIN_DRAWS, ErrorRule, draws_for

EPS = torch.finfo(torch.float32).eps


def judged(ours: float, theirs: float, draws: int = 1, numbers: int = 512) -> tuple[bool, float | None]:
    """The verdict on errors of these deviations."""
    generator, rule = torch.Generator().manual_seed(1), ErrorRule(EPS)
    for _ in range(draws):
        exact, a, b = (torch.randn(numbers, generator=generator, dtype=torch.float64) for _ in range(3))
        rule.add({"x": exact}, {"x": exact + ours * a}, [{"x": exact + theirs * b}])
    verdict = rule.verdict()
    assert verdict.passed == (verdict.why == "")
    return verdict.passed, verdict.worst_ratio


def test_twice_is_the_limit() -> None:
    assert judged(1.5e-4, 1e-4)[0]
    passed, ratio = judged(3e-4, 1e-4)
    assert not passed
    assert ratio == pytest.approx(3.0, rel=0.3)


def test_equally_good_single_numbers_pass_over_several_draws() -> None:
    """One draw of one number often exceeds twice the other's error; the sums over draws do not."""
    single = [ErrorRule(0.0) for _ in range(40)]
    pooled = [ErrorRule(0.0) for _ in range(40)]
    generator = torch.Generator().manual_seed(2)
    for rule, draws in [*((r, 1) for r in single), *((r, draws_for(1)) for r in pooled)]:
        for _ in range(draws):
            a, b = torch.randn(2, generator=generator, dtype=torch.float64)
            zero = torch.zeros((), dtype=torch.float64)
            rule.add({"x": zero}, {"x": a}, [{"x": b}])
    failures = [sum(not rule.verdict().passed for rule in rules) for rules in (single, pooled)]
    assert failures[0] > 5
    assert failures[1] <= failures[0] // 3


def test_exact_rivals_leave_a_quarter_of_a_rounding_step() -> None:
    one = torch.ones(4, dtype=torch.float64)
    for steps, passes in ((0.2, True), (0.3, False)):
        rule = ErrorRule(EPS)
        rule.add({"x": one}, {"x": one * (1 + steps * EPS)}, [{"x": one}])
        assert rule.verdict().passed == passes


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_fail(bad: float) -> None:
    one, broken = torch.ones(3, dtype=torch.float64), torch.tensor([1.0, bad, 1.0])
    rule = ErrorRule(EPS)
    rule.add({"x": one}, {"x": broken}, [{"x": one}])
    rule.add({"x": one}, {"x": one}, [{"x": one}])
    verdict = rule.verdict()
    assert not verdict.passed
    assert verdict.worst_ratio is None


def test_the_worst_of_several_rivals_counts() -> None:
    one = torch.ones(3, dtype=torch.float64)
    rule = ErrorRule(EPS)
    rule.add({"x": one}, {"x": one + 1e-3}, [{"x": one}, {"x": one - 1e-3}])
    assert rule.verdict().passed


def test_few_numbers_are_drawn_more_often() -> None:
    assert draws_for(0) == 1
    assert draws_for(1) == MAX_DRAWS
    assert draws_for(10**6) == MIN_DRAWS
    assert draws_for(64) == 4


SHAPE = BertConfig(
    vocab_size=97,
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=1,
    intermediate_size=128,
    max_position_embeddings=96,
)


@pytest.mark.parametrize("name", list(awkward_batches(SHAPE, torch.device("cpu"))))
def test_kernels_of_the_cpu_obey_it_on_ugly_shapes(name: str) -> None:
    batch = awkward_batches(SHAPE, torch.device("cpu"))[name]
    cases, forms = OpCases(SHAPE, batch, torch.bfloat16), registry.available("cpu")
    if "native" not in forms["attention"]:
        pytest.skip("no native kernels: no C compiler")
    for case in cases.all():
        if "native" in forms[case.op] and case.op != "attention":  # tests/unit/ops/test_attention.py goes further
            result = op_checks.check_case(case, "native", torch.bfloat16)
            assert result["passed"], (case.name, result["why"], result["repeats"])


def test_a_wrong_kernel_is_found() -> None:
    @registry.register("attention", "wrong")
    def wrong(qkv: Tensor, *rest: object) -> Tensor:
        return registry.form("attention", "plain")(qkv, *rest) * 1.02

    batch = awkward_batches(SHAPE, torch.device("cpu"))["one sequence"]
    case = OpCases(SHAPE, batch, torch.bfloat16).attention(0.1)
    try:
        assert not op_checks.check_case(case, "wrong", torch.bfloat16)["passed"]
    finally:
        registry._implementations["attention"].pop("wrong")
