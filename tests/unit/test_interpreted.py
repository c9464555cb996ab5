"""Runs the tests of Triton kernels in a process of their own, where Triton interprets."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITES = (
    "feed/test_host_batch.py",
    *(f"ops/triton/test_{name}.py" for name in ("attention", "cast", "embedding", "loss", "norm", "norm_fp8")),
    "ops/test_fp8.py",
    "ops/test_fp8_blocks.py",
    "models/test_fp8.py::test_kernels_equal_their_plain_twins",
    "models/test_step_counts.py",
    "optim/test_triton_update.py",
    "train/test_step_triton.py",
)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this process interprets already")
@pytest.mark.parametrize("suite", SUITES)
def test_interpreted(tree_root: Path, suite: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/unit/{suite}"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    child = subprocess.run(command, cwd=tree_root, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert " passed" in child.stdout
