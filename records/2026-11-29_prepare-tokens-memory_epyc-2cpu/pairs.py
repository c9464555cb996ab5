"""CPU seconds of `mlbert prepare tokens` in two checkouts, in turns.

python pairs.py OLD NEW TOKENIZER TEXT TURNS >FILE

Prints a line of JSON for each run: the checkout, the CPU seconds of all its processes, with two
workers, start and end included, and the seconds by the clock.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time

PACKAGES = ("benchmarks/bert/implementations/pytorch", "audit", "benchmarks/mosaic_bert")


def children_cpu_seconds() -> float:
    """Return the CPU seconds of all ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(old: str, new: str, tokenizer: str, text: str, turns: str) -> None:
    """Print the lines."""
    checkouts = {"old": old, "new": new}
    for turn in range(int(turns)):
        for name in sorted(checkouts, reverse=turn % 2 == 0):
            paths = os.pathsep.join(f"{checkouts[name]}/{package}" for package in PACKAGES)
            with tempfile.TemporaryDirectory() as folder:
                words = [sys.executable, "-m", "mlbert", "prepare", "tokens", text]
                words += ["--tokenizer", tokenizer, "--out", f"{folder}/out", "--workers", "2"]
                environ = os.environ | {"PYTHONPATH": paths}
                began = time.perf_counter()
                began_cpu = children_cpu_seconds()
                subprocess.run(words, env=environ, check=True, stdout=subprocess.DEVNULL)
            line = {
                "code": name,
                "cpu_seconds": round(children_cpu_seconds() - began_cpu, 2),
                "seconds": round(time.perf_counter() - began, 2),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    measure(*sys.argv[1:])
