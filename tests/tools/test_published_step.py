"""The GPU check measures the published configuration with NVIDIA's tools and does not change the GPU's settings."""

import os
import re
from pathlib import Path

import pytest
import torch

from gpu_check import collectives, external, hardware, published_step
from gpu_check.parts import tiny_scale
from mlbert.config.resolution import resolve
from mlbert.distributed.sharding import ShardedReducer
from mlbert.ops import api as ops
from mlbert.recipes.registry import RECIPES
from programs import exports_of, write_program

CPU = torch.device("cpu")
DIFFERENT = {*published_step.CHANGES, "LOGDIR", "OPS", "BATCHSIZE"}


@pytest.mark.parametrize("precision", published_step.CONFIGS)
def test_measured_settings_are_the_published_ones(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only `CHANGES`, the folder, and the settings of the row differ."""
    environ = exports_of(published_step.CONFIGS[precision])
    published = resolve(RECIPES[environ["RECIPE"]], environ).as_configuration()
    monkeypatch.setenv("OPS", "flash")
    found = published_step.configured(precision, tmp_path, {"BATCHSIZE": "224"}).as_configuration()
    assert {name for name in found if found[name]["value"] != published[name]["value"]} == DIFFERENT
    assert (found["BATCHSIZE"]["value"], found["OPS"]["value"]) == (224, "flash")
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
    ops.select("auto")


def test_power_is_the_median_of_complete_samples() -> None:
    text = "600.00, 1755, 3201, 60\n[N/A], 1, 1, 1\n700.00, 1200, 3201, 62\n650.00, 1700, 3201, 61\n612.0, 17"
    assert hardware.power_summary(text) == {
        **{"watts": 650.0, "sm_mhz": 1700.0, "memory_mhz": 3201.0, "celsius": 61.0},
        **{"least_sm_mhz": 1200.0, "samples": 3},
    }
    assert hardware.power_summary("No devices were found\n") == {"skipped": "nvidia-smi: No devices were found"}


@pytest.mark.parametrize("tool", ["ncu", "compute-sanitizer", "nvcc"])
def test_missing_tools_are_named(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    calls = {
        "ncu": lambda: external.count_kernel("cast_kernel", tmp_path, True),
        "compute-sanitizer": lambda: external.sanitize(tmp_path, True),
        "nvcc": external.build_fmha,
    }
    assert calls[tool]() == {"skipped": f"{tool} is not installed"}


def test_output_of_ncu_and_compute_sanitizer_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(__file__).parents[1] / 'assets' / 'gpu_tools'}:{os.environ['PATH']}")
    found = external.count_kernel("attention_forward_kernel", tmp_path / "run2", True)
    assert found == {
        **{"nanoseconds": 1203456.0, "compute_percent": 38.25, "memory_percent": 41.5},
        **{"occupancy_percent": 24.9, "registers": 128.0},
    }
    assert external.count_kernel("cast_kernel", tmp_path / "run2", True) == {
        "skipped": "ncu: ==ERROR== ERR_NVGPUCTRPERM"
    }
    lines = ("Invalid __global__ write of size 4 bytes", "    at cast_kernel", "ERROR SUMMARY: 2 errors")
    report = "\n".join(f"========= {line}" for line in lines)
    write_program(tmp_path / "compute-sanitizer", f"#!/bin/bash\ncat <<'END'\n{report}\nEND\nexit 9\n")
    found = external.sanitize(tmp_path / "run1", True)
    assert (found["passed"], found["errors"]) == (False, 2)
    assert "Invalid __global__ write" in found["why"]
    write_program(tmp_path / "compute-sanitizer", "#!/bin/bash\nsleep 60\n")
    monkeypatch.setattr(external, "SANITIZER_SECONDS", 0.5)
    assert external.sanitize(tmp_path / "run1", True) == {"skipped": "compute-sanitizer took longer than 0 s"}


def test_nothing_changes_the_settings_of_the_gpu() -> None:
    """Others may use the GPU, so its clocks are never locked, which ncu would do without --clock-control none."""
    text = "".join(path.read_text() for path in Path(external.__file__).parent.glob("*.py"))
    assert re.findall(r"lock-gpu-clocks|-lgc|applications-clocks|--power-limit|persistence|gpu-reset", text) == []
    assert external.NCU[:2] == ("--clock-control", "none")
    assert external.NCU[2:4] == ("--profile-from-start", "off")  # the part `counted` turns it on for its step


def test_collectives_return_their_input_in_a_group_of_one_rank() -> None:
    with collectives.one_rank(CPU):
        rows = {name: row() for name, row in collectives.rows(CPU, 16, 0.0)}
    assert len(rows) == 2 * len(collectives.COLLECTIVES)
    assert all(row["passed"] for row in rows.values()), rows
    wrong = collectives.check(lambda out, x: out.copy_(x).mul_(2), torch.zeros(4), 0.0)
    assert not wrong["passed"]
