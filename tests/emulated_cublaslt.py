"""NVIDIA's cublasLt replaced by `tests/unit/ops/cublaslt_emulator.c`, which answers on host memory."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from mlbert.ops.cublaslt_library import Library

SOURCE = Path(__file__).parent / "unit" / "ops" / "cublaslt_emulator.c"


def compile_emulator(path: Path) -> None:
    """The shared library at `path`; warnings are errors."""
    flags = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    subprocess.run(["gcc", *flags, str(SOURCE), "-o", str(path), "-lm"], check=True)


class Emulator:
    """The emulated library as `mlbert` opens it, and its counters since then."""

    def __init__(self, path: Path) -> None:
        self._code = ctypes.CDLL(str(path))
        self._before: dict[str, int] = {}
        self._before = {name: self.count(name) for name in ("heuristics", "products", "living")}
        self.library = Library(path)

    def count(self, name: str) -> int:
        return ctypes.c_int64.in_dll(self._code, f"emulator_{name}").value - self._before.get(name, 0)

    def refuse(self, *epilogues: int) -> None:
        """The heuristic has nothing for these from now on."""
        refused = (ctypes.c_int * 4).in_dll(self._code, "emulator_refused_epilogues")
        refused[:] = [*epilogues, *[0] * (4 - len(epilogues))]

    def offer(self, algorithms: int) -> None:
        """The heuristic has so many for each problem from now on, the last of several being wrong."""
        ctypes.c_int64.in_dll(self._code, "emulator_algorithms").value = algorithms

    @property
    def algorithm(self) -> int:
        """That of the last product, from 0 on."""
        return ctypes.c_int64.in_dll(self._code, "emulator_algorithm").value

    def fail_next(self, status: int) -> None:
        ctypes.c_int.in_dll(self._code, "emulator_next_status").value = status

    @property
    def complaint(self) -> str:
        return (ctypes.c_char * 256).in_dll(self._code, "emulator_complaint").value.decode()
