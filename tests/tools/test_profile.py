"""Groups of kernels in the profile, on a handwritten trace. Rehearsals of the GPU check profile real steps."""

import re
from pathlib import Path
from typing import Any

import mlbert
from gpu_check import external, profile

KERNELS = r"^def (\w+_kernel)\("


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
    events += [span("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 2), span("cpu_op", "aten::mm", 99)]
    found = profile.group_times(events)
    seconds = {group: round(1e6 * sum(names.values()), 6) for group, names in found.items() if names}
    assert seconds == {
        **{"GEMM": 40, "attention": 300, "norm": 80, "optimizer": 7},
        **{"copy": 5, "communication": 5, "other": 1},
    }
    assert profile.group_times([span("cpu_op", "aten::mm", 6)])["GEMM"] == {"aten::mm": 6e-6}


def own_kernels() -> list[str]:
    sources = sorted(Path(mlbert.__file__).parent.glob("*/triton*/*.py"))
    sources += sorted(Path(mlbert.__file__).parent.glob("optim/triton_*.py"))
    return [name for path in sources for name in re.findall(KERNELS, path.read_text(), re.MULTILINE)]


def test_all_our_kernels_have_a_group() -> None:
    """A new kernel without a pattern would be counted as other."""
    assert [name for name in own_kernels() if profile.group_of_name(name) == "other"] == []


def test_ncu_profiles_the_costliest_kernels() -> None:
    assert set(external.DEFAULT_KERNELS) <= set(own_kernels())
    rows = {
        "replay": {"kernels": {"void cutlass::device::Gemm<int, 8>(Params)": 2.0, "cast_kernel": 3.0, "Memcpy": 9.0}}
    }
    assert external.costliest(rows) == ["cast_kernel", "Gemm"]
    assert external.costliest({}) == list(external.DEFAULT_KERNELS)
