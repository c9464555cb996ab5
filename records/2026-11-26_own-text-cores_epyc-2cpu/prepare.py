"""Prepare a file as `mlbert pretrain` does, with a number of processes; print times and a digest of what was written.

prepare.py FILE PROCESSES
"""

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
from mlbert.data.prepare.jobs import Executor, Progress

SECONDS: dict[str, float] = {}


class Timed(Progress):
    """Keeps the seconds of each task."""

    @contextmanager
    def task(self, name: str, total: int, unit: str) -> Iterator:
        begun = time.time()
        yield lambda units: None
        SECONDS[name] = time.time() - begun


def main(path: Path, processes: int) -> None:
    load, begun = os.getloadavg()[0], time.time()
    with tempfile.TemporaryDirectory() as place:
        out = Path(place)
        prepare(Request(find_sources([path], out), None, 4096, None, 128, 0.15), out, Executor(processes, Timed()))
        wall = time.time() - begun
        files = [*sorted(out.rglob("*.mds")), out / "vocab.txt"]
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    print(f"{path.name}, {processes} processes: wall {wall:.1f} s", end=" ")
    print("(" + ", ".join(f"{name} {seconds:.1f}" for name, seconds in SECONDS.items()) + ")", end="")
    for who, name in ((resource.RUSAGE_SELF, "itself"), (resource.RUSAGE_CHILDREN, "the others")):
        used = resource.getrusage(who)
        print(f"; {name}: processor {used.ru_utime + used.ru_stime:.1f} s, peak {used.ru_maxrss >> 10} MiB", end="")
    print(f"; load {load:.1f}, {digest}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
