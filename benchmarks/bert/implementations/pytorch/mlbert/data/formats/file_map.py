"""Many files mapped into memory contiguously, so that one array indexes all of them.

NumPy's memory maps need one file descriptor each and must be indexed file by file. Here, thousands
of shards are one array of bytes without any descriptor.

Legend: F files, B bytes of the whole range.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlbert.host.errors import UserError
from mlbert.host.files import plain_size, reading

_PAGE = 65_536  # a multiple of every page size in use
_PROT_READ = 1
_MADV_RANDOM = 1
_MAP_SHARED = 1
_MAP_PRIVATE = 2
_MAP_FIXED = 0x10
_MAP_ANONYMOUS = 0x20
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value


class FileMap:
    """A read-only map of files, which must not shrink while it is in use.

    Attributes:
        bytes: uint8 [B].
        starts: int64 [F], index of each file's first byte in ``bytes``.
        ends: int64 [F], one past its last byte.

    Raises UserError if a file cannot be opened or mapped.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        sizes = np.asarray([plain_size(path) for path in paths], np.int64)
        slots = -(-np.maximum(sizes, 1) // _PAGE) * _PAGE
        total = max(_PAGE, int(slots.sum()))
        self.starts: np.ndarray = np.cumsum(slots) - slots
        self.ends: np.ndarray = self.starts + sizes
        libc = _libc()
        address = libc.mmap(
            None, total, _PROT_READ, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0
        )
        if address == _FAILED:
            reason = (
                f"{total:,} bytes cannot be mapped into memory ({os.strerror(ctypes.get_errno())})"
            )
            remedy = "Raise the limit `ulimit -v`"
            raise UserError("machine.memory", paths[0].parent if paths else "data", reason, remedy)
        memory = (ctypes.c_uint8 * total).from_address(address)
        self._range = address, total
        # NumPy arrays keep `memory` alive, and with it the map: views may outlive this object.
        weakref.finalize(memory, libc.munmap, address, total)
        for path, start, size in zip(paths, self.starts.tolist(), sizes.tolist(), strict=True):
            if size:
                _map_over(libc, path, address + start, size)
        self.bytes: np.ndarray = np.frombuffer(memoryview(memory), np.uint8)
        self.bytes.flags.writeable = False

    def expect_random_reads(self) -> None:
        """Stop the kernel from reading ahead: it reads 128 KiB
        and more around each touched page.
        """
        # Only advice: where it fails, reads are still right.
        _libc().madvise(*self._range, _MADV_RANDOM)

    def view(self, dtype: np.dtype) -> np.ndarray:
        """Return `at_every_byte` of ``bytes``."""
        return at_every_byte(self.bytes, dtype)


def at_every_byte(content: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return overlapping items of ``dtype`` from contiguous uint8 [B]: item i starts at byte i."""
    return np.ndarray((max(0, len(content) - dtype.itemsize + 1),), dtype, content.data, 0, (1,))


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t
    pointer = ctypes.c_void_p
    libc.mmap.argtypes = [pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mmap.restype = pointer
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, ctypes.c_int]
    return libc


def _map_over(libc: ctypes.CDLL, path: Path, address: int, size: int) -> None:
    with reading(path):
        descriptor = os.open(path, os.O_RDONLY)
    try:
        if libc.mmap(address, size, _PROT_READ, _MAP_SHARED | _MAP_FIXED, descriptor, 0) == _FAILED:
            reason = f"cannot be mapped into memory ({os.strerror(ctypes.get_errno())})"
            remedy = "Raise /proc/sys/vm/max_map_count, or import the folder first"
            raise UserError("machine.memory", path, reason, remedy)
    finally:
        os.close(descriptor)
