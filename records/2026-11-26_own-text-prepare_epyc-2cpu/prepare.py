"""Prepare a file as `mlbert pretrain` does and print the times, the memory and a digest of what was written."""

import hashlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlbert.data.prepare.corpus_files import find_sources
from mlbert.data.prepare.custom_corpus import Request, prepare
from mlbert.data.prepare.jobs import Progress


class Timed(Progress):
    """Prints the seconds of each task."""

    @contextmanager
    def task(self, name: str, total: int, unit: str) -> Iterator:
        begun = time.time()
        yield lambda units: None
        print("   ", name, round(time.time() - begun, 2), "s")


path, load, begun = Path(sys.argv[1]), os.getloadavg()[0], time.time()
with tempfile.TemporaryDirectory() as place:
    out = Path(place)
    prepare(Request(find_sources([path], out), None, 4096, None, 128, 0.15), out, Timed())
    files = [*sorted(out.rglob("*.mds")), out / "vocab.txt"]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
used = resource.getrusage(resource.RUSAGE_SELF)
print(f"{path.name}: wall {time.time() - begun:.1f} s, processor {used.ru_utime + used.ru_stime:.1f} s,", end=" ")
print(f"peak {used.ru_maxrss >> 10} MiB, load {load:.1f}, {digest}")
