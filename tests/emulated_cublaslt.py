"""Replace NVIDIA's cublasLt with `tests/unit/ops/cublaslt_emulator.c`,
which works on host memory.
"""

import ctypes
import subprocess
from pathlib import Path

from mlbert.ops.cublaslt_library import Library

SOURCE = Path(__file__).parent / "unit" / "ops" / "cublaslt_emulator.c"


def compile_emulator(path: Path) -> None:
    """Compile the shared library to `path`; warnings are errors."""
    command = ["gcc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command += [str(SOURCE), "-o", str(path), "-lm"]
    subprocess.run(command, check=True)


class Emulator:
    """The emulated library as `mlbert` opens it, and its counters since this object was created."""

    def __init__(self, path: Path) -> None:
        self._code = ctypes.CDLL(str(path))
        self._before: dict[str, int] = {}
        self._before = {name: self.count(name) for name in ("heuristics", "products", "living")}
        self.library = Library(path)

    def count(self, name: str) -> int:
        return ctypes.c_int64.in_dll(self._code, f"emulator_{name}").value - self._before.get(
            name, 0
        )

    def refuse(self, *epilogues: int) -> None:
        """Make the heuristic return nothing for these epilogues."""
        refused = (ctypes.c_int * 4).in_dll(self._code, "emulator_refused_epilogues")
        refused[:] = [*epilogues, *[0] * (4 - len(epilogues))]

    def offer(self, algorithms: int) -> None:
        """Make the heuristic return this many algorithms per problem;
        the last of several is wrong.
        """
        ctypes.c_int64.in_dll(self._code, "emulator_algorithms").value = algorithms

    @property
    def algorithm(self) -> int:
        """Return the index of the last product's algorithm."""
        return ctypes.c_int64.in_dll(self._code, "emulator_algorithm").value

    def fail_next(self, status: int) -> None:
        ctypes.c_int.in_dll(self._code, "emulator_next_status").value = status

    @property
    def complaint(self) -> str:
        return (ctypes.c_char * 256).in_dll(self._code, "emulator_complaint").value.decode()
