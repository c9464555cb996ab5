"""Run the tests of Triton kernels in separate processes with Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITES = {  # each runs in one process
    "batches, proofs and attention": [
        "data/test_host_batch.py",
        "models/test_step_counts.py",
        "ops/test_proof.py::test_interpreted_kernels_pass",
        "ops/test_attention.py",
        "ops/test_local_attention.py",
    ],
    "properties of attention, casts": ["ops/triton/test_attention.py", "ops/triton/test_cast.py"],
    "other ops": [f"ops/test_{name}.py" for name in ("embedding", "linear", "loss", "norm")],
    "FP8": [
        "models/test_fp8.py::test_kernels_equal_their_plain_twins",
        *(f"ops/{name}.py" for name in ("test_fp8", "test_fp8_blocks")),
    ],
    # The kernels do not depend on a published run's numbers,
    # so EXCLUDED leaves one run of each kind of update.
    "optimizers and steps": [
        "optim/test_optimizers.py",
        "training/test_step.py::test_replayed_kernels",
    ],
}
SLOW_SUITES = ("properties of attention, casts", "other ops", "FP8", "optimizers and steps")
EXCLUDED = "published_program and not (lamb_clip_inside or wd1e-2)"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="this process already interprets"
)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "suite",
    [
        pytest.param(suite, marks=pytest.mark.slow) if suite in SLOW_SUITES else suite
        for suite in SUITES
    ],
)
def test_interpreted(tree_root: Path, suite: str, request: pytest.FixtureRequest) -> None:
    files = [f"tests/unit/{file}" for file in SUITES[suite]]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    command += ["-k", f"not ({EXCLUDED})"]
    if request.config.getoption("--slow"):
        command.append("--slow")
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    child = subprocess.run(
        command, cwd=tree_root, env=environment, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert " passed" in child.stdout
