"""The ladder of the GPU check: its rungs, and steps that do not fit in memory."""

import itertools

import pytest
import torch

from gpu_check.ladder import Ladder, Rung, Sizes, fp8_rungs, largest, rungs
from gpu_check.parts import tiny_scale
from mlbert.ops import forms as registry

CPU = torch.device("cpu")
SIZES = Sizes(4, 2, 3)


@pytest.fixture
def small() -> Ladder:
    yield Ladder(tiny_scale().config, CPU, torch.bfloat16, SIZES, 0.0)
    registry.select("auto")


def test_last_rung_has_everything_that_auto_selects() -> None:
    found = rungs(CPU, SIZES)
    best = registry.select("auto")
    assert found[0] == Rung("plain", {}, SIZES.plain)
    assert found[-1].forms == {op: form for op, form in best.items() if form != "plain" and not op.startswith("fp8_")}
    for before, after in itertools.pairwise(found):
        assert before.forms.items() <= after.forms.items()
    names = [rung.name for rung in [*found, *fp8_rungs(CPU, found[-1])]]
    assert len(set(names)) == len(names)


def test_step_that_does_not_fit_is_halved() -> None:
    tried = []

    def measure(count: int) -> dict[str, int]:
        tried.append(count)
        if count > 2:
            raise torch.OutOfMemoryError("too large")
        return {"sequences": count}

    assert largest(8, CPU, measure) == {"sequences": 2, "did_not_fit": 8}
    assert tried == [8, 4, 2]
    assert largest(2, CPU, measure) == {"sequences": 2}
    with pytest.raises(RuntimeError, match="other"):
        largest(8, CPU, lambda _: (_ for _ in ()).throw(RuntimeError("other")))


def test_rungs_are_measured_in_both_precisions(small: Ladder) -> None:
    best = rungs(CPU, SIZES)[-1]
    rows = [small.measure(rung) for rung in (best, *fp8_rungs(CPU, best))]
    assert [row["precision"] for row in rows] == ["", "fp8"]
    assert all(row["sequences_per_second"] > 0 and row["sequences"] == SIZES.fast for row in rows)
    assert rows[0]["loss"] != rows[1]["loss"]
