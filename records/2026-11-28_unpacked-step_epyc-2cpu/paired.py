"""Time a training step of two checkouts in turn: python paired.py OLD NEW CONFIG ROUNDS PAIRS [OPTION...]

Each round starts one process per checkout, in alternating order. Prints a line of JSON per round, then the ratios.
"""

import json
import os
import statistics
import subprocess
import sys

PACKAGE = "benchmarks/bert/implementations/pytorch"
old, new, config, rounds, pairs, *options = sys.argv[1:]


def median_seconds(checkout: str) -> float:
    words = ["-m", "mlbert", "bench", "step", "--config", config, "--pairs", pairs, *options]
    environ = {**os.environ, "PYTHONPATH": f"{checkout}/{PACKAGE}"}
    done = subprocess.run(
        [sys.executable, *words, "--json", "-"], env=environ, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout[done.stdout.index("{") :])["sides"]["mlbert"]["median_seconds"]


ratios = []
for number in range(int(rounds)):
    order = [old, new] if number % 2 == 0 else [new, old]
    seconds = {checkout: median_seconds(checkout) for checkout in order}
    ratios.append(seconds[old] / seconds[new])
    print(json.dumps({"old": seconds[old], "new": seconds[new]}), flush=True)
print(f"old / new: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
