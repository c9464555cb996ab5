"""The C kernels compiled for 64-bit Arm, called through an emulator of its processor.

A server has a loop that reads a call from standard input, calls the kernel and writes its result
and all its buffers to standard output:

    call      int32 function, int32 number of buffers, then each buffer: int64 bytes, content
              each argument: int64 (a pointer: index of its buffer, -1 for null) or double
    answer    int64 result, then the content of each buffer
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import struct
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlbert.host import native
from mlbert.ops import native_library

COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = "qemu-aarch64"
NULL = -1
C_TYPES = {"p": "void *", "l": "int64_t", "i": "int", "u": "uint32_t", "f": "float"}
SERVER = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static void *buffers[64];
static int64_t sizes[64];

static void take(void *to, size_t bytes) {
    if (bytes && fread(to, 1, bytes, stdin) != bytes) exit(0);
}
static int64_t number(void) { int64_t x; take(&x, sizeof x); return x; }
static double real(void) { double x; take(&x, sizeof x); return x; }
static void *place(void) { int64_t i = number(); return i < 0 ? NULL : buffers[i]; }

@PROTOTYPES@

int main(void) {
    for (;;) {
        int32_t head[2];
        int64_t result = 0;
        take(head, sizeof head);
        for (int i = 0; i < head[1]; i++) {
            sizes[i] = number();
            buffers[i] = aligned_alloc(64, (size_t)(sizes[i] / 64 + 1) * 64);
            take(buffers[i], (size_t)sizes[i]);
        }
        switch (head[0]) {
@CASES@
        default: exit(3);
        }
        fwrite(&result, sizeof result, 1, stdout);
        for (int i = 0; i < head[1]; i++) {
            fwrite(buffers[i], 1, (size_t)sizes[i], stdout);
            free(buffers[i]);
        }
        fflush(stdout);
    }
}
"""
READERS = {"p": "place()", "f": "(float)real()"}


def is_available() -> bool:
    """Return whether the cross compiler and the emulator are installed."""
    return shutil.which(COMPILER) is not None and shutil.which(EMULATOR) is not None


def server_source(signatures: Mapping[str, str]) -> str:
    """Return the server's C source for functions with `mlbert.host.native.load` signatures."""
    prototypes = []
    cases = []
    for number, (name, signature) in enumerate(signatures.items()):
        arguments, _, result = signature.partition(":")
        types = ", ".join(C_TYPES[letter] for letter in arguments) or "void"
        returned = C_TYPES.get(result, "void")
        prototypes.append(f"{returned} {name}({types});")
        names = []
        lines = []
        for place, letter in enumerate(arguments):
            names.append(f"a{place}")
            reader = READERS.get(letter, f"({C_TYPES[letter]})number()")
            lines.append(f"{C_TYPES[letter]} a{place} = {reader};")
        call = f"{name}({', '.join(names)});"
        kept = call if returned == "void" else f"result = {call}"
        cases.append(f"        case {number}: {{ {' '.join(lines)} {kept} break; }}")
    source = SERVER.replace("@PROTOTYPES@", "\n".join(prototypes))
    return source.replace("@CASES@", "\n".join(cases))


class ArmLibrary:
    """Stands in for the loaded kernels of `mlbert.ops.native_library`.

    Args:
        folder: for the program.
    """

    def __init__(self, folder: Path) -> None:
        self._signatures = native_library.signatures()
        self._address = native_library.pointer
        source = folder / "server.c"
        source.write_text(server_source(self._signatures), encoding="utf-8")
        kernels = [str(native.SOURCE_FOLDER / name) for name in native_library.SOURCES]
        flags = [flag for flag in native.COMPILE_FLAGS if flag != "-march=native"]
        program = str(folder / "server")
        command = [COMPILER, *flags, "-static", "-o", program, str(source), *kernels, "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        self._server = subprocess.Popen(
            [EMULATOR, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._bytes: dict[int, int] = {}

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=10)

    def pointer(self, tensor: Tensor | None, dtype: torch.dtype | None = None) -> int | None:
        """As `mlbert.ops.native_library.pointer`; remember the tensor's size."""
        address = self._address(tensor, dtype)
        if tensor is not None and address is not None:
            self._bytes[address] = tensor.numel() * tensor.element_size()
        return address

    def __getattr__(self, name: str) -> Callable[..., int | None]:
        if name not in self._signatures:
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> int:
        letters = self._signatures[name].partition(":")[0]
        places = dict.fromkeys(
            value
            for letter, value in zip(letters, arguments, strict=True)
            if letter == "p" and value
        )
        order = {address: index for index, address in enumerate(places)}
        message = struct.pack("ii", list(self._signatures).index(name), len(order))
        for address in order:
            size = self._bytes[address]
            message += struct.pack("q", size) + ctypes.string_at(address, size)
        for letter, value in zip(letters, arguments, strict=True):
            if letter == "p":
                message += struct.pack("q", order[value] if value else NULL)
            else:
                message += struct.pack("d" if letter == "f" else "q", value)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(message)
        self._server.stdin.flush()
        (result,) = struct.unpack("q", self._server.stdout.read(8))
        for address in order:
            content = self._server.stdout.read(self._bytes[address])
            ctypes.memmove(address, content, len(content))
        return int(result)
