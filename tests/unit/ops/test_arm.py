"""The C kernels compute the same on 64-bit Arm, emulated, as their references."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from arm_library import ArmLibrary, is_available
from mlbert.ops import attention, embedding, linear, loss, native_library, norm, proof
from mlbert.ops import forms as registry

pytestmark = pytest.mark.skipif(
    not is_available(), reason="no aarch64-linux-gnu-gcc or qemu-aarch64 on PATH"
)
MODULES = (attention, embedding, linear, loss, norm, native_library)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ArmLibrary]:
    library = ArmLibrary(tmp_path_factory.mktemp("arm"))
    yield library
    library.close()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_kernels_agree_with_their_references(arm, dtype, monkeypatch, native_ops):
    calls = list[str]()
    run = arm._call

    def recorded(name: str, *words: Any) -> int:
        calls.append(name)
        return run(name, *words)

    monkeypatch.setattr(arm, "_call", recorded)
    for module in MODULES:
        monkeypatch.setattr(module, "library", lambda: arm, raising=False)
        monkeypatch.setattr(module, "pointer", arm.pointer, raising=False)
    attention.tiles_work.cache_clear()
    for op, names in registry.available(CPU).items():
        if "native" in names:
            assert proof.check(op, "native", CPU, dtype) == "", op
    attention.tiles_work.cache_clear()
    assert {"attention_backward", "norm_backward", "bias_gelu_backward"} <= set(calls)
