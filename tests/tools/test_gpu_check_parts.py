"""Parts of the GPU check: groups of kernels, the published step, ModernBERT's batch, and turns."""

import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import mlbert
from gpu_check import hardware, modernbert, profile, published_step
from gpu_check.parts import tiny_scale
from gpu_check.rows import Rows, read_rows
from gpu_check.turns import TimedSide, matrix_rate, take_turns
from mlbert.distributed.sharding import ShardedReducer
from mlbert.ops import forms as registry
from mlbert.recipes.registry import RECIPES
from mlbert.recipes.sections import resolve
from programs import exports_of

CPU = torch.device("cpu")
# Settings of the measured step that differ from the published ones.
DIFFERENT = {*published_step.CHANGES, "LOGDIR", "OPS", "BATCHSIZE"}


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


def test_measured_step_follows_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has FP8 products, a sharded reduction, a batch of the graph's size, and no timed products
    if others use the device.
    """
    monkeypatch.setattr(published_step, "tuned", None)
    shape = tiny_scale().bert
    resolved = published_step.configured("fp8", tmp_path, {"BATCHSIZE": "2"}, shape)
    tuning = published_step.Tuning.NONE
    found = published_step.PublishedStep(resolved, CPU, lambda _: None, tuning)
    method = found.method
    assert method.precision == "fp8"
    assert isinstance(method.sync, ShardedReducer)
    assert found.train_step.graph_for([found.batch]), "the batch does not fit the graph"
    assert found.batch.num_samples == 2 * published_step.SEQUENCES_A_PACK
    losses = [float(found.step()) for _ in range(2)]
    assert losses[0] != losses[1]
    registry.select("auto")


def test_missing_counter_leaves_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVML, or if its counter cannot be read, joules are missing and not made up."""
    monkeypatch.setattr(hardware, "NVML", "libno-such-library.so.1")
    properties = types.SimpleNamespace(uuid="00000000-0000-0000-0000-000000000000")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    meter = hardware.Meter(torch.device("cuda"))
    assert "libno-such-library" in meter.reason
    assert meter.joules() is None
    assert meter.joules_since(meter.joules()) is None


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


def test_turns_go_there_and_back_and_leave_out_what_fails(tmp_path: Path) -> None:
    called: list[str] = []

    def side(name: str) -> TimedSide:
        def step() -> None:
            called.append(name)

        return TimedSide(name, step, 4, "tokens", 8e12, "bf16", remarks=("refused",))

    def broken() -> TimedSide:
        raise RuntimeError("no")

    rows = Rows(tmp_path / "rows.jsonl", "turns")
    rows.append("product bf16", {"tflops": 2.0})
    makes = {"a": lambda: side("a"), "x": broken, "b": lambda: side("b")}
    take_turns(rows, makes, 0.0, CPU)
    found = read_rows(rows.path)
    turns = [(row["side"], row["half"]) for row in found if "side" in row]
    assert turns == [("a", 1), ("b", 1), ("b", 2), ("a", 2)]
    assert next(row for row in found if row["row"] == "a: made")["remarks"] == ["refused"]
    assert "error" in next(row for row in found if row["row"] == "x: made")
    first = next(row for row in found if row.get("side") == "a")
    assert first["matrix_share"] == pytest.approx(first["tflops"] / 2.0)
    assert first["joules_per_unit"] > 0
    assert list(dict.fromkeys(called)) == ["a", "b"]
    assert matrix_rate(found, "fp8") is None


@pytest.mark.slow
def test_both_sides_of_modernbert_train_on_the_same_tokens() -> None:
    """Their loss is on the same tokens as ours, and all sequences are full."""
    config = tiny_scale().base
    batch = modernbert.full_batch(config, 32, 128)
    assert batch.cu_seqlens.tolist() == [0, 32, 64, 96, 128]
    assert batch.num_masked == 4 * round(modernbert.MASKED_SHARE * 32)
    ours = modernbert.our_side("ours", config, batch, "bf16", CPU)
    theirs = modernbert.their_side("theirs", config, batch, "sdpa", CPU, compiled=False)
    assert (ours.units, ours.flops) == (theirs.units, theirs.flops) == (128, ours.flops)
    ours.step()
    theirs.step()
    registry.select("auto")
