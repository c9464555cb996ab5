"""Stand-ins for the GPU's libraries in a rehearsal of the GPU check, whose processes import this first.

EMULATED names the folder with the emulated cublasLt and fmha. INJECTED names the failures to cause: "compile", "proof",
"memory" and "time", separated by commas.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from emulated_cublaslt import Emulator
from gpu_check import external, op_checks, product
from mlbert.config.resolution import Resolved
from mlbert.data.loading.config import DataConfig
from mlbert.ops import cublaslt, fmha
from mlbert.ops import forms as registry
from mlbert.ops.config import ComputeConfig

FOLDER = Path(os.environ["EMULATED"])
INJECTED = os.environ.get("INJECTED", "").split(",")

cublaslt.use(Emulator(FOLDER / "libcublaslt.so").library)
fmha.use(fmha.load(FOLDER / "libfmha.so"))
kernels = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "native"
fast = ("cublaslt", kernels)
registry._PREFERENCES["cpu"] = {"auto": fast, kernels: (kernels,), "fmha": ("fmha", *fast)}


def fail(*arguments: Any, **options: Any) -> dict[str, Any]:
    raise RuntimeError("ptxas exited with code 255")


def run_out_of_memory(resolved: Resolved, *arguments: Any) -> dict[str, Any]:
    """In bfloat16 nothing fits, in FP8 one pack does."""
    compute, data = resolved.config[ComputeConfig], resolved.config[DataConfig]
    if compute.precision == "bf16" or data.train_batch_size > 1:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return measure(resolved, *arguments)


def hang(*arguments: Any) -> dict[str, Any]:
    time.sleep(3600)
    return {}


def wrong(function: Any) -> Any:
    return lambda *arguments: 1.01 * function(*arguments)


measure = product.measure
if "compile" in INJECTED:
    op_checks.check_cast = fail
if "proof" in INJECTED:
    name = "triton" if kernels == "triton" else "native"
    registry.available("cpu")  # loads the forms
    registry.register("layer_norm_dropout", name)(wrong(registry.form("layer_norm_dropout", name)))
if "memory" in INJECTED:
    product.measure = run_out_of_memory
if "time" in INJECTED:
    product.measure = hang

external.SANITIZER_SECONDS = external.BUILD_SECONDS = 600  # the machine of a test may be slow
program = sys.modules["__main__"]
if hasattr(program, "RUNS"):
    patience = float(os.environ.get("PATIENCE", "20"))
    for run in program.RUNS.values():
        run.update({part: patience * seconds for part, seconds in run.items()})
    program.PARTS.update({part: patience * seconds for part, seconds in program.PARTS.items()})

if LINES := os.environ.get("EXECUTED_LINES"):
    executed: dict[str, set[int]] = {}

    def note_line(frame: FrameType, event: str, argument: Any) -> Any:
        executed[frame.f_code.co_filename].add(frame.f_lineno)
        return note_line

    def note_call(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if "gpu_check" not in name:
            return None
        executed.setdefault(name, set())
        return note_line(frame, event, argument)

    def keep() -> None:
        found = {Path(name).name: sorted(lines) for name, lines in executed.items()}
        (Path(LINES) / f"{os.getpid()}.json").write_text(json.dumps(found))

    atexit.register(keep)
    sys.settrace(note_call)
