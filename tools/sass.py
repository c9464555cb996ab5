"""Count the machine instructions (SASS) of a compiled kernel with Triton's bundled nvdisasm.

Each instruction takes one issue slot of its warp's scheduler, so a kernel without loops takes as
many slots per warp as it has instructions. Classes of instructions share units, some of which
accept less than one warp per clock.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import triton

# The first class with a matching opcode prefix, otherwise "ALU":
# integers, comparisons, packing, FP8.
CLASSES = {
    "tensor": ("HGMMA", "HMMA", "IMMA", "QGMMA", "UTCHMMA", "UTCQMMA"),
    "memory": ("LD", "ST", "ATOM", "RED.", "REDG", "SHFL", "UBLK", "UTMA", "SYNCS"),
    "XU": ("MUFU", "F2F.", "F2I", "I2F", "FRND", "POPC", "FLO", "BREV"),
    "uniform": ("U", "R2UR", "S2UR", "REDUX"),
    "FMA": ("FADD", "FMUL", "FFMA", "HADD2", "HMUL2", "HFMA2"),
    "IMAD": ("IMAD",),
    "control": ("BRA", "EXIT", "BAR", "BSYNC", "BSSY", "WARP", "DEPBAR", "CALL", "RET", "NOP"),
}
# Clocks that a warp's instruction occupies a scheduler's units on compute capability 9.0: CUDA C++
# Programming Guide, "Throughput of Native Arithmetic Instructions" (64 results a clock and
# multiprocessor: two clocks).
CLOCKS = {"FMA": 1, "ALU": 2, "IMAD": 2, "XU": 8}
_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);")
_LABEL = re.compile(r"^(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")


def instructions(cubin: bytes) -> Counter[str]:
    """Count the kernel's opcodes with their modifiers: `{"FMUL": 64, "LDG.E.128": 4, ...}`.

    Padding after the last exit is excluded.
    """
    return Counter(opcode for opcode, _ in code(cubin) if opcode)


def loops(cubin: bytes) -> list[Counter[str]]:
    """Count the `instructions` of one iteration of each loop, in order of the loops' ends.

    An outer loop includes one iteration of its inner loops.
    """
    lines = code(cubin)
    found = []
    for end, (opcode, rest) in enumerate(lines):
        target = _TARGET.search(rest) if opcode.startswith("BRA") else None
        if target and ("", target[1]) in lines[:end]:
            start = lines.index(("", target[1]))
            found.append(Counter(opcode for opcode, _ in lines[start : end + 1] if opcode))
    return found


def classes(counts: Counter[str]) -> Counter[str]:
    """Return the counts by class of `CLASSES`."""
    sums: Counter[str] = Counter()
    for opcode, count in counts.items():
        fitting = (name for name, prefixes in CLASSES.items() if f"{opcode}.".startswith(prefixes))
        sums[next(fitting, "ALU")] += count
    return sums


def clocks(counts: Counter[str]) -> int:
    """Return a lower bound of a warp's clocks: those of its scheduler or of the busiest units."""
    return max(
        counts.total(),
        *(CLOCKS[name] * count for name, count in classes(counts).items() if name in CLOCKS),
    )


def code(cubin: bytes) -> list[tuple[str, str]]:
    """Return (opcode, operands) in order, with ("", name) for a label."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        lines = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    found = []
    for line in lines:
        if label := _LABEL.match(line):
            found.append(("", label[1]))
        elif instruction := _INSTRUCTION.search(line):
            found.append((instruction[1], instruction[2]))
    # After the last instruction: a branch to itself and no-ops.
    while found and (found[-1][0] in ("", "NOP") or _is_idle(found[-2:])):
        del found[-1]
    return found


def _is_idle(end: list[tuple[str, str]]) -> bool:
    return end[-1][0] == "BRA" and end[0][0] == "" and f"({end[0][1]})" in end[1][1]
