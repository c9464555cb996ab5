"""Stand-ins for the GPU's libraries in a dry run of the GPU check,
whose processes import this first.

EMULATED names the folder with the emulated cublasLt. INJECTED names failures to cause, separated by
commas: "hang" (in the part `kernels`), "crash" (in `turns-modernbert`) and "error" (in one step).
"""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from emulated_cublaslt import Emulator
from gpu_check import parts
from mlbert.ops import cublaslt
from mlbert.ops.config import FORMS

FOLDER = Path(os.environ["EMULATED"])
INJECTED = os.environ.get("INJECTED", "").split(",")

cublaslt.use(Emulator(FOLDER / "libcublaslt.so").library)
auto = FORMS["auto"]
FORMS["auto"] = replace(auto, tried={**auto.tried, "cpu": ("cublaslt", "native")})


def hang(bench: parts.Bench) -> None:
    bench.rows.append("before", {})
    time.sleep(3600)


def crash(bench: parts.Bench) -> None:
    bench.rows.append("before", {})
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("ptxas exited with code 255")


if "hang" in INJECTED:
    parts.time_kernels = hang
if "crash" in INJECTED:
    parts.turns_of_modernbert = crash
if "error" in INJECTED:
    parts.expert_side = fail
