"""Every Triton kernel compiles for the GPUs that it is meant for, without one; the attention's spill no registers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
if triton.knobs.runtime.interpret:
    pytest.skip("this process interprets kernels", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[4]


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_kernels", ROOT / "tools/compile_kernels.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


tool = load_tool()
# One kernel of each kind for every architecture. The variants only where most runs are; those of float32 and float16
# products, which take longest to compile, where a GPU runs them.
EVERYWHERE = (
    "attention H=64 bf16 dropout",
    "attention H=64 bf16 device key",
    "norm D=1024 bf16 dropout",
    "loss bf16",
    "embedding bf16",
    "LAMB",
)
NOT_HERE = ("fp32", "fp16", "H=64 bf16 dropout ALiBi")
PAIRS = [(case, arch) for case in EVERYWHERE for arch in tool.ARCHITECTURES] + [
    (case, 90) for case in tool.cases() if case not in EVERYWHERE and not any(words in case for words in NOT_HERE)
]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is taken from what an earlier run compiled."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


@pytest.mark.parametrize(("case", "arch"), PAIRS)
def test_kernels_compile(case: str, arch: int) -> None:
    reports = tool.compile_case(case, arch)
    assert reports
    for report in reports:
        assert f".target sm_{arch}" in report.ptx
        if case.startswith("attention"):
            assert report.spilled == 0, f"{report.kernel} spills {report.spilled} bytes a thread on sm_{arch}"
            if report.kernel != "attention_order_kernel" and arch in (80, 90):
                instruction = {80: "mma.sync", 90: "wgmma.mma_async"}[arch]
                assert instruction in report.ptx, f"{report.kernel} does not use the matrix units"


def test_four_keys_share_the_mixing_of_the_mask() -> None:
    """Two multiplications mix a word, which four keys share: about half a one for each weight, or exponential."""
    (report,) = [
        r for r in tool.compile_case("attention H=64 bf16 dropout", 90) if r.kernel == "attention_forward_kernel"
    ]
    multiplications, exponentials = report.ptx.count("mul.lo.s32"), report.ptx.count("ex2.approx")
    assert 0 < multiplications < 0.75 * exponentials


@pytest.mark.parametrize("arch", tool.ARCHITECTURES)
def test_a_launch_is_recorded_and_not_run(arch: int) -> None:
    with tool.recording(arch) as launches:
        tool.cases()["attention H=64 bf16 dropout"]()
    names = [launch.kernel.fn.__name__ for launch in launches]
    assert names == [
        "attention_order_kernel",
        "attention_forward_kernel",
        "attention_query_gradient_kernel",
        "attention_key_value_gradient_kernel",
    ]
