"""gpu_check --parts tune: the measured rows, the time limits, and resuming."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mlbert.ops
from gpu_check import main, tables, tune
from gpu_check.ladder import FAST_ACCUMULATION, Ladder
from gpu_check.op_cases import OpCases
from gpu_check.parts import tiny_scale
from gpu_check.rows import Rows
from mlbert.ops import forms as registry
from mlbert.programs.bench.step_time import make_batch

CPU = torch.device("cpu")


@pytest.fixture
def bench() -> Iterator[tune.Bench]:
    scale = tiny_scale()
    registry.select("auto")
    ladder = Ladder(scale.config, CPU, torch.bfloat16, scale.sizes, 0.0)
    cases = OpCases(scale.config, make_batch(scale.config, 2, None, 1).to(CPU), torch.bfloat16)
    yield tune.Bench(ladder, cases, 0.0, 1)
    registry.select("auto")


def test_groups_and_compilation_fit_into_the_deadline() -> None:
    assert tune.SECONDS.keys() == tune.GROUPS.keys()
    assert main.COMPILE_SECONDS + sum(tune.SECONDS.values()) < main.DEADLINES["tune"] - 20


def test_rows_have_unique_names_and_the_expected_variants(bench: tune.Bench) -> None:
    """Each variant has its own change and name."""
    names = [f"{group}: {name}" for group, rows in tune.GROUPS.items() for name, _ in rows(bench)]
    assert len(set(names)) == len(names)
    steps = [name for name in names if name.startswith("steps")]
    assert [("timed" in name, FAST_ACCUMULATION in name) for name in steps] == [
        *((False, False), (True, False)),
        *((False, False), (True, False), (True, True)),
    ]
    assert [name for name in names if name.startswith("losses")] == [
        *("losses: bf16", "losses: fp8"),
        f"losses: fp8, {FAST_ACCUMULATION}",
    ]


def test_kernels_profiled_by_ncu_exist() -> None:
    sources = "".join(path.read_text() for path in Path(mlbert.ops.__file__).parent.glob("triton/*.py"))
    kernels = re.findall(r"^def (\w+_kernel)\(", sources, re.MULTILINE)
    assert set(tune.COUNTED.values()) <= set(kernels)


def test_block_sizes_are_valid_for_the_kernels() -> None:
    for kernel, choices in enumerate(tune.BLOCKS):
        assert len(set(choices)) == len(choices)
        for rows, keys, warps, stages in choices:
            assert rows % 16 == 0
            assert keys % (64 if kernel == 0 else 32) == 0
            assert (warps, stages) in {(w, s) for w in (4, 8) for s in (2, 3)}


def test_loss_rows_start_from_the_same_weights(bench: tune.Bench) -> None:
    rows = dict(tune.loss_rows(bench))
    first, again, fp8 = (rows[name]() for name in ("bf16", "bf16", "fp8"))
    assert first == again
    assert fp8["losses"][0] == pytest.approx(first["losses"][0], rel=0.01)
    assert fp8["losses"] != first["losses"]


def test_group_stops_at_its_time_limit_and_resumes(
    bench: tune.Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seconds = [0.0]

    def row() -> dict[str, Any]:
        seconds[0] += 40
        return {"forward_seconds": 1.0}

    def group(_: tune.Bench) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        yield from ((name, row) for name in "abcd")

    monkeypatch.setattr(tune, "GROUPS", {"casts": group, "losses": group})
    monkeypatch.setattr(tune, "SECONDS", {"casts": 25, "losses": 90})
    path, done = tmp_path / "tune.json", []
    for _ in range(4):
        tune.measure(Rows(path, CPU, {"device": "test"}), bench, lambda: seconds[0])
        done.append(len(tables.read_rows(tmp_path, "tune")))
        if done == [4]:
            assert tables.failures(tmp_path, ["tune"], {}) == [
                "tune: no time for 4 rows, --resume goes on: casts: b, casts: c, casts: d, losses: d"
            ]
    assert done == [4, 6, 7, 8]
    assert tables.failures(tmp_path, ["tune"], {}) == []
