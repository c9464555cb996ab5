"""Keep the memory that a training step frees for the next one.

By default, the C library returns freed memory at the end of its heap to the system, depending on
which block happens to be there. The next step then faults it in again, page by page: a twentieth of
the time of a small model's step, in some processes.
"""

from __future__ import annotations

import ctypes

# Parameters of glibc's mallopt, in malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# Larger blocks are mapped one by one, and returned when freed. It is the largest allowed value, and
# the one that glibc itself reaches while such blocks are freed; setting the other parameter stops
# that.
_MAPPED_FROM = 32 << 20  # bytes
_KEPT = 1 << 30  # bytes at most that are free at the end of the heap


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory. Return False if it is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    return all(
        mallopt(parameter, value) == 1
        for parameter, value in ((_M_MMAP_THRESHOLD, _MAPPED_FROM), (_M_TRIM_THRESHOLD, _KEPT))
    )
