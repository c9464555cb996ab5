"""The rule of `mlbert.ops.comparison`: which errors pass,
and that more draws make it more reliable.
"""

import math

import pytest
import torch

import op_checks
from awkward_batches import awkward_batches, awkward_lengths
from mlbert.config.bert_config import BertConfig
from mlbert.ops import forms as registry
from mlbert.ops.comparison import MAX_DRAWS, MIN_DRAWS, ErrorRule, Verdict, draws_for
from op_cases import OpCases

EPS = torch.finfo(torch.float32).eps
SHAPE = BertConfig(97, 64, 1, 1, 128, max_position_embeddings=96)


def verdict_on(ours: float, theirs: float) -> Verdict:
    """Return the verdict on random errors with these standard deviations."""
    generator = torch.Generator().manual_seed(1)
    rule = ErrorRule(EPS)
    exact, a, b = (torch.randn(512, generator=generator, dtype=torch.float64) for _ in range(3))
    rule.add({"x": exact}, {"x": exact + ours * a}, [{"x": exact + theirs * b}])
    return rule.verdict()


def test_errors_up_to_twice_pytorchs_pass():
    good = verdict_on(1.5e-4, 1e-4)
    bad = verdict_on(3e-4, 1e-4)
    assert (good.passed, good.why, bad.passed) == (True, "", False)
    assert bad.why
    assert bad.worst_ratio == pytest.approx(3.0, rel=0.3)


def test_single_numbers_need_several_draws():
    """Of two equally good results, one number often has twice the other's error,
    but rarely the mean over draws.
    """
    single, pooled = ([ErrorRule(0.0) for _ in range(40)] for _ in range(2))
    generator = torch.Generator().manual_seed(2)
    for rule, draws in [*((r, 1) for r in single), *((r, draws_for(1)) for r in pooled)]:
        for _ in range(draws):
            a, b = torch.randn(2, generator=generator, dtype=torch.float64)
            zero = torch.zeros((), dtype=torch.float64)
            rule.add({"x": zero}, {"x": a}, [{"x": b}])
    failures = [sum(not rule.verdict().passed for rule in rules) for rules in (single, pooled)]
    assert failures[0] > 5
    assert failures[1] <= failures[0] // 3


@pytest.mark.parametrize(
    ("ours", "theirs", "passes"),
    [
        (0.2 * EPS, [0.0], True),  # a quarter of a rounding step passes if PyTorch is exact
        (0.3 * EPS, [0.0], False),
        (1e-3, [0.0, -1e-3], True),  # the largest error of PyTorch's variants is the limit
    ],
)
def test_limits_of_errors(ours, theirs, passes):
    one = torch.ones(4, dtype=torch.float64)
    rule = ErrorRule(EPS)
    rule.add({"x": one}, {"x": one + ours}, [{"x": one + error} for error in theirs])
    assert rule.verdict().passed == passes


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_results_fail(bad):
    one = torch.ones(3, dtype=torch.float64)
    broken = torch.tensor([1.0, bad, 1.0])
    rule = ErrorRule(EPS)
    rule.add({"x": one}, {"x": broken}, [{"x": one}])
    rule.add({"x": one}, {"x": one}, [{"x": one}])
    assert (rule.verdict().passed, rule.verdict().worst_ratio) == (False, None)


def test_fewer_numbers_need_more_draws():
    assert [draws_for(count) for count in (0, 1, 64, 10**6)] == [1, MAX_DRAWS, 4, MIN_DRAWS]


@pytest.mark.parametrize("name", awkward_lengths(SHAPE.max_position_embeddings))
def test_native_kernels_pass_on_awkward_shapes(native_ops, name):
    batch = awkward_batches(SHAPE, torch.device("cpu"))[name]
    cases = OpCases(SHAPE, batch, torch.bfloat16)
    forms = registry.available("cpu")
    for case in cases.all():
        if "native" in forms[case.op] and case.op != "attention":  # see test_attention.py
            result = op_checks.check_case(case, "native", torch.bfloat16)
            assert result["passed"], (case.name, result["why"], result["repeats"])


def test_wrong_kernel_fails(monkeypatch):
    plain = registry.form("attention", "plain")
    monkeypatch.setitem(
        registry._implementations["attention"], "wrong", lambda *arguments: plain(*arguments) * 1.02
    )
    batch = awkward_batches(SHAPE, torch.device("cpu"))["one sequence"]
    case = OpCases(SHAPE, batch, torch.bfloat16).attention(0.1)
    assert not op_checks.check_case(case, "wrong", torch.bfloat16)["passed"]
