"""Parts of the GPU check: the ladder, groups of kernels, the published step, NVIDIA's tools,
advice for the next run.

Rehearsals of the GPU check (test_gpu_check.py) profile real steps.
"""

import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import mlbert
from gpu_check import collectives, external, hardware, profile, published_step
from gpu_check.advice import next_lines
from gpu_check.ladder import Ladder, Rung, Sizes, fp8_rungs, largest, rungs
from gpu_check.parts import tiny_scale
from gpu_check.tables import GOALS
from mlbert.distributed.sharding import ShardedReducer
from mlbert.ops import forms as registry
from mlbert.recipes.registry import RECIPES
from mlbert.recipes.sections import resolve
from programs import exports_of, write_program

CPU = torch.device("cpu")
SIZES = Sizes(4, 2, 3)
# Settings of the measured step that differ from the published ones.
DIFFERENT = {*published_step.CHANGES, "LOGDIR", "OPS", "BATCHSIZE"}
PROVED = {
    "attention: triton": {"passed": True},
    "attention without dropout: fmha": {"passed": True},
}
REFUTED = {**PROVED, "attention dropout rate: fmha": {"passed": False}}
CLOCK = {"sm_mhz": 1755.0, "least_sm_mhz": 900.0}


def test_last_rung_has_everything_that_auto_selects() -> None:
    found = rungs(CPU, SIZES)
    best = registry.select("auto")
    assert found[0] == Rung("plain", {}, SIZES.plain)
    assert found[-1].forms == {
        op: form for op, form in best.items() if form != "plain" and not op.startswith("fp8_")
    }
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


def test_rungs_are_measured_in_both_precisions() -> None:
    small = Ladder(tiny_scale().config, CPU, torch.bfloat16, SIZES, 0.0)
    best = rungs(CPU, SIZES)[-1]
    rows = [small.measure(rung) for rung in (best, *fp8_rungs(CPU, best))]
    assert [row["precision"] for row in rows] == ["", "fp8"]
    assert all(row["sequences_per_second"] > 0 and row["sequences"] == SIZES.fast for row in rows)
    assert rows[0]["loss"] != rows[1]["loss"]
    registry.select("auto")


def span(category: str, name: str, duration: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": 0, "dur": duration}


def test_kernels_are_grouped_by_name() -> None:
    """Operators are counted only if the trace has no kernels."""
    kernels = {
        "nvjet_tst_128x256_64x4_NNT": 40,
        "attention_forward_kernel": 300,
        "norm_backward_kernel": 50,
        "norm_forward_kernel": 30,
        "second_pass_kernel": 7,
        "void at::native::CatArrayBatchedCopy<float>": 3,
        "ncclDevKernel_AllReduce_Sum_bf16": 5,
        "GeluCUDAKernelImpl": 1,
    }
    events = [span("kernel", name, seconds) for name, seconds in kernels.items()]
    events += [
        span("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 2),
        span("cpu_op", "aten::mm", 99),
    ]
    found = profile.group_times(events)
    seconds = {
        group: round(1e6 * sum(names.values()), 6) for group, names in found.items() if names
    }
    expected = {
        "GEMM": 40,
        "attention": 300,
        "norm": 80,
        "optimizer": 7,
        "copy": 5,
        "communication": 5,
        "other": 1,
    }
    assert seconds == expected
    assert profile.group_times([span("cpu_op", "aten::mm", 6)])["GEMM"] == {"aten::mm": 6e-6}


def own_kernels() -> list[str]:
    sources = sorted(Path(mlbert.__file__).parent.glob("*/triton*/*.py"))
    sources += sorted(Path(mlbert.__file__).parent.glob("optim/triton_*.py"))
    return [
        name
        for path in sources
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    ]


def test_all_our_kernels_have_a_group() -> None:
    """A new kernel without a pattern would be counted as other."""
    assert [name for name in own_kernels() if profile.group_of_name(name) == "other"] == []


def test_ncu_profiles_the_costliest_kernels() -> None:
    assert set(external.DEFAULT_KERNELS) <= set(own_kernels())
    kernels = {"void cutlass::device::Gemm<int, 8>(Params)": 2.0, "cast_kernel": 3.0, "Memcpy": 9.0}
    assert external.costliest({"replay": {"kernels": kernels}}) == ["cast_kernel", "Gemm"]
    assert external.costliest({}) == list(external.DEFAULT_KERNELS)


@pytest.mark.parametrize("precision", published_step.CONFIGS)
def test_settings_are_the_published_ones(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only `CHANGES`, the folder, and the settings of the row differ."""
    environ = exports_of(published_step.CONFIGS[precision])
    published = resolve(RECIPES[environ["RECIPE"]], environ).as_configuration()
    monkeypatch.setenv("OPS", "fmha")
    found = published_step.configured(precision, tmp_path, {"BATCHSIZE": "224"}).as_configuration()
    assert {name for name in found if found[name]["value"] != published[name]["value"]} == DIFFERENT
    assert (found["BATCHSIZE"]["value"], found["OPS"]["value"]) == (224, "fmha")
    kept = ("PRECISION", "CUDA_GRAPH_MODE", "SHARDED_OPTIMIZER")
    assert [str(found[name]["value"]) for name in kept] == [precision, "full_iteration", "node"]
    assert found["FP8_FAST_ACCUMULATION"]["value"] == ("all" if precision == "fp8" else "forward")


def test_measured_step_follows_the_settings(tmp_path: Path) -> None:
    """It has FP8 products, a sharded reduction, and a batch of the graph's size."""
    shape = tiny_scale().config
    resolved = published_step.configured("fp8", tmp_path, {"BATCHSIZE": "2"}, shape)
    found = published_step.PublishedStep(resolved, CPU, lambda _: None)
    method = found.method
    assert method.precision == "fp8"
    assert isinstance(method.sync, ShardedReducer)
    assert found.train_step.graph_for([found.batch]), "the batch does not fit the graph"
    assert found.batch.num_samples == 2 * published_step.SEQUENCES_A_PACK
    losses = [float(found.step()) for _ in range(2)]
    assert losses[0] != losses[1]
    registry.select("auto")


def test_power_is_the_median_of_complete_samples() -> None:
    text = (
        "600.00, 1755, 3201, 60\n[N/A], 1, 1, 1\n700.00, 1200, 3201, 62\n650.00, 1700, 3201, "
        "61\n612.0, 17"
    )
    assert hardware.power_summary(text) == {
        "watts": 650.0,
        "sm_mhz": 1700.0,
        "memory_mhz": 3201.0,
        "celsius": 61.0,
        "least_sm_mhz": 1200.0,
        "samples": 3,
    }
    assert hardware.power_summary("No devices were found\n") == {
        "skipped": "nvidia-smi: No devices were found"
    }


def test_missing_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for tool, call in {
        "ncu": lambda: external.count_kernel("cast_kernel", tmp_path, True),
        "compute-sanitizer": lambda: external.sanitize(tmp_path, True),
        "nvcc": external.build_fmha,
    }.items():
        assert call() == {"skipped": f"{tool} is not installed"}


def test_output_of_ncu_and_compute_sanitizer_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "PATH",
        f"{tmp_path}:{Path(__file__).parents[1] / 'assets' / 'gpu_tools'}:{os.environ['PATH']}",
    )
    found = external.count_kernel("attention_forward_kernel", tmp_path / "run2", True)
    assert found == {
        "nanoseconds": 1203456.0,
        "compute_percent": 38.25,
        "memory_percent": 41.5,
        "occupancy_percent": 24.9,
        "registers": 128.0,
    }
    found = external.count_kernel("cast_kernel", tmp_path / "run2", True)
    assert found == {"skipped": "ncu: ==ERROR== ERR_NVGPUCTRPERM"}
    lines = (
        "Invalid __global__ write of size 4 bytes",
        "    at cast_kernel",
        "ERROR SUMMARY: 2 errors",
    )
    report = "\n".join(f"========= {line}" for line in lines)
    write_program(
        tmp_path / "compute-sanitizer", f"#!/bin/bash\ncat <<'END'\n{report}\nEND\nexit 9\n"
    )
    found = external.sanitize(tmp_path / "run1", True)
    assert (found["passed"], found["errors"]) == (False, 2)
    assert "Invalid __global__ write" in found["why"]
    write_program(tmp_path / "compute-sanitizer", "#!/bin/bash\nsleep 60\n")
    monkeypatch.setattr(external, "SANITIZER_SECONDS", 0.5)
    assert external.sanitize(tmp_path / "run1", True) == {
        "skipped": "compute-sanitizer took longer than 0 s"
    }


def test_nothing_changes_the_settings_of_the_gpu() -> None:
    """Others may use the GPU, so its clocks are never locked,
    which ncu would do without --clock-control none.
    """
    text = "".join(path.read_text() for path in Path(external.__file__).parent.glob("*.py"))
    assert (
        re.findall(
            r"lock-gpu-clocks|-lgc|applications-clocks|--power-limit|persistence|gpu-reset", text
        )
        == []
    )
    assert external.NCU[:2] == ("--clock-control", "none")
    # The part `counted` turns profiling on for its step.
    assert external.NCU[2:4] == (
        "--profile-from-start",
        "off",
    )


def test_collectives_return_their_input_in_a_group_of_one_rank() -> None:
    with collectives.one_rank(CPU):
        rows = {name: row() for name, row in collectives.rows(CPU, 16, 0.0)}
    assert len(rows) == 2 * len(collectives.COLLECTIVES)
    assert all(row["passed"] for row in rows.values()), rows
    wrong = collectives.check(lambda out, x: out.copy_(x).mul_(2), torch.zeros(4), 0.0)
    assert not wrong["passed"]


def smoke(precision: str, speed: float, **more: Any) -> dict[str, Any]:
    return {"precision": precision, "sequences_per_second": speed, "forms": {}, **more}


def timed(seconds: float) -> dict[str, Any]:
    return {"forward_seconds": seconds, "backward_seconds": 2 * seconds}


FAST = {
    f"attention: {form}": timed(seconds)
    for form, seconds in (("triton", 2.0), ("fmha", 1.0), ("plain", 0.5))
}


ADVICE: dict[str, tuple[int, dict[str, dict[str, Any]], list[str]]] = {
    "nothing special": (1, {}, ["tools/gpu_check.sh --run 2"]),
    "goal reached": (
        1,
        {"smoke": {"fp8, 48 packs": smoke("fp8", GOALS["fp8"])}},
        ["fp8 reaches 1450 sequences/s (fp8, 48 packs), 100% of its goal: the goal is reached"],
    ),
    "goal missed": (
        1,
        {"smoke": {"a": smoke("fp8", 1160.0), "b": smoke("bf16", 1170.0, did_not_fit=224)}},
        [
            "80% of its goal: the table of the part",
            "FP8 is slower than bfloat16",
            "224 packs did not fit",
        ],
    ),
    "the clock fell": (
        3,
        {"record": {"a": smoke("fp8", 900.0, power=CLOCK)}},
        ["measure a again: the clock fell from 1755 to 900 MHz", "commit it under records/"],
    ),
    "another form is faster": (
        1,
        {"ops": FAST, "checks": PROVED},
        [
            "attention fmha is the fastest form that passed its checks",
            "OPS=fmha tools/gpu_check.sh --run 2",
        ],
    ),
    "a wrong form is faster": (
        1,
        {"ops": FAST, "checks": REFUTED},
        [
            "fix the first failure (checks: attention dropout rate: fmha",
            "--run 1 --resume",
            "next: tools/gpu_check",
        ],
    ),
    "a kernel waits": (
        2,
        {
            "counters": {
                "cast_kernel": {
                    "compute_percent": 20.0,
                    "memory_percent": 45.0,
                    "occupancy_percent": 12.0,
                }
            }
        },
        [
            "cast_kernel saturates neither compute nor memory "
            "(compute 20 %, memory 45 %, occupancy 12 %)",
            "tools/gpu_check.sh --run 3",
        ],
    ),
    "a busy kernel": (
        2,
        {"counters": {"cast_kernel": {"compute_percent": 20.0, "memory_percent": 80.0}}},
        ["--run 3"],
    ),
}


@pytest.mark.parametrize("case", ADVICE)
def test_advice_depends_on_the_rows(case: str, tmp_path: Path) -> None:
    run, parts, expected = ADVICE[case]
    for part, rows in parts.items():
        (tmp_path / f"{part}.json").write_text(json.dumps({"rows": rows}))
    lines = next_lines(run, tmp_path, dict.fromkeys(parts, ""))
    assert all(line.startswith("next: ") for line in lines)
    for words in expected:
        assert words in "\n".join(lines)
    assert ("saturates neither" in "\n".join(lines)) == (case == "a kernel waits")
    assert ("fmha is the fastest" in "\n".join(lines)) == (case == "another form is faster")
