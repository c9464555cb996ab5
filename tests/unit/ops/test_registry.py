"""The selection of implementations: choices, log line, errors, and plain ops without a compiler."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mlbert.host import native
from mlbert.ops import api as ops
from mlbert.ops import forms as registry
from mlbert.ops import native_library
from mlbert.ops.attention import tiles_work
from user_errors import user_error


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Hide the compiler and the native library."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(native, "_loaded", {})
    native_library.library.cache_clear()
    yield
    native_library.library.cache_clear()


def test_plain_and_auto(native_ops):
    assert ops.select("plain") == dict.fromkeys(registry.ops(), "plain")
    assert ops.describe() == "ops: all plain"
    assert ops.select("auto") == dict.fromkeys(registry.ops(), "native")
    assert ops.describe().startswith("ops: all native")
    assert ("matrix unit" in ops.describe()) == tiles_work()


def test_unknown_choice_is_an_error():
    with user_error("config.choice", "OPS"):
        ops.select("best")


@pytest.mark.parametrize(
    ("choice", "device"),
    [("triton", "cpu"), ("fmha", "cpu"), ("cublaslt", "cpu"), ("native", "cuda")],
)
def test_choice_for_another_kind_of_device_is_an_error(native_ops, monkeypatch, choice, device):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with user_error("ops.unavailable", f"OPS={choice}"):
        ops.select(choice, device)
    assert ops.select("auto")["attention"] == "native"


def test_cuda_uses_cublaslt_and_triton_or_reports_why_not(native_ops):
    """This selection does not need a CUDA device."""
    chosen = ops.select("auto", "cuda")
    if torch.version.cuda is None:
        assert chosen["linear_qkv"] == "plain"
        assert "no cublaslt kernels: PyTorch" in ops.describe("cuda")
        with user_error("ops.unavailable", "OPS=cublaslt"):
            ops.select("cublaslt", "cuda")
    if importlib.util.find_spec("triton"):
        assert chosen["attention"] == ops.select("triton", "cuda")["feed_forward"] == "triton"
    else:
        assert chosen["attention"] == "plain"
        assert "no triton kernels: No module named 'triton'" in ops.describe("cuda")
        with user_error("ops.unavailable", "OPS=triton", wording=False):
            ops.select("triton", "cuda")
    assert ops.select("plain", "cuda") == dict.fromkeys(chosen, "plain")


def test_without_a_compiler_auto_is_plain_and_native_an_error(no_compiler):
    assert ops.select("auto") == dict.fromkeys(registry.ops(), "plain")
    assert "no C compiler" in ops.describe()
    out = ops.layer_norm_dropout(
        torch.randn(3, 4), torch.ones(4), torch.zeros(4), 1e-12, 0.0, 0, None
    )
    assert out.shape == (3, 4)
    with user_error("ops.unavailable", "OPS=native"):
        ops.select("native")


def test_float64_runs_plain(use_native):
    x = torch.randn(3, 4, dtype=torch.float64)
    assert (
        registry.implementation("attention", x) is registry._implementations["attention"]["plain"]
    )
