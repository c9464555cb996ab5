"""Compile the CUDA attention of csrc/fmha as C++ on an emulated GPU (csrc/fmha/emulation)."""

import shutil
import subprocess
from pathlib import Path

import pytest

from mlbert.ops import fmha

CSRC = Path(fmha.__file__).parents[2] / "csrc" / "fmha"
SOURCES = [CSRC / "forward.cu", CSRC / "backward.cu", CSRC / "emulation" / "library.cpp"]
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", f"-I{CSRC}"]


def compile_emulated(target: Path, *more: str | Path) -> None:
    """Compile to `target`; warnings are errors. Skip the test without a compiler."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ on PATH")
    command = ["g++", *FLAGS, "-x", "c++", *SOURCES, *more, "-o", target]
    subprocess.run([str(word) for word in command], check=True)


def compile_fmha(target: Path) -> None:
    compile_emulated(target, "-O1", "-fPIC", "-shared")
