"""Stand-ins for the GPU's libraries in a rehearsal of the GPU check,
whose processes import this first.

EMULATED names the folder with the emulated cublasLt and fmha. INJECTED names the failures to cause:
"compile", "proof" and "memory", separated by commas.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from emulated_cublaslt import Emulator
from gpu_check import external, op_checks, published_step
from mlbert.config.resolution import Resolved
from mlbert.data.loading.config import DataConfig
from mlbert.ops import cublaslt, fmha
from mlbert.ops import forms as registry
from mlbert.ops.config import FORMS, ComputeConfig

FOLDER = Path(os.environ["EMULATED"])
INJECTED = os.environ.get("INJECTED", "").split(",")

cublaslt.use(Emulator(FOLDER / "libcublaslt.so").library)
fmha.use(fmha.load(FOLDER / "libfmha.so"))
kernels = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "native"
fast = ("cublaslt", kernels)
for name, names in (("auto", fast), (kernels, (kernels,)), ("fmha", ("fmha", *fast))):
    FORMS[name] = replace(FORMS[name], tried={**FORMS[name].tried, "cpu": names})


# Each takes seconds in the interpreter, and tests/unit/test_interpreted.py has them all.
LEFT_OUT = (
    "attention without dropout: triton",
    "attention with ALiBi: triton",
    "masked_cross_entropy: triton",
)


def most_rows(*arguments: Any) -> Iterator[tuple[str, Any]]:
    return (row for row in check_rows(*arguments) if row[0] not in LEFT_OUT)


def fail(*arguments: Any, **options: Any) -> dict[str, Any]:
    raise RuntimeError("ptxas exited with code 255")


def run_out_of_memory(resolved: Resolved, *arguments: Any) -> dict[str, Any]:
    """In bfloat16 nothing fits, in FP8 one pack does."""
    compute = resolved.config[ComputeConfig]
    data = resolved.config[DataConfig]
    if compute.precision == "bf16" or data.train_batch_size > 1:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return measure(resolved, *arguments)


def wrong(function: Any) -> Any:
    return lambda *arguments: 1.01 * function(*arguments)


measure = published_step.measure
check_rows = op_checks.check_rows
op_checks.check_rows = most_rows
if "compile" in INJECTED:
    op_checks.check_cast = fail
if "proof" in INJECTED:
    name = "triton" if kernels == "triton" else "native"
    registry.available("cpu")  # loads the forms
    registry.register("layer_norm_dropout", name)(wrong(registry.form("layer_norm_dropout", name)))
if "memory" in INJECTED:
    published_step.measure = run_out_of_memory

external.SANITIZER_SECONDS = external.BUILD_SECONDS = 600  # the machine of a test may be slow
program = sys.modules["__main__"]
if hasattr(program, "RUNS"):
    for parts in (*program.RUNS.values(), program.PARTS):
        parts.update({part: 20 * seconds for part, seconds in parts.items()})
