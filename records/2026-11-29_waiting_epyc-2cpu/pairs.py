"""pairs.py SIZE PACKS SECONDS ROUNDS BUSY FORM...: forms of waiting in turn, each in its own process.

BUSY: numbers of other busy processes, such as 0,1,2. A form is "default", "adapted" (mlbert.host.waiting), "passive"
(OMP_WAIT_POLICY), a value of GOMP_SPINCOUNT, or "one" (thread). "k" before it gives our C kernels one thread; /SLICE
after it sets the scheduler's time slice in microseconds. Prints the median of the mean step of each turn, and of its
ratios to the first form with the first number of busy processes in the same round.
"""

import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

size, packs, seconds, rounds, busy, *forms = sys.argv[1:]
levels = [int(level) for level in busy.split(",")]
HOG = [sys.executable, "-c", "while True: pass"]
KNOWN = {"default": {}, "adapted": {}, "one": {}, "passive": {"OMP_WAIT_POLICY": "passive"}}
CALM_SECONDS = 2.5  # after which adapted threads spin again
processes = {}
times = {(level, form): [] for level in levels for form in forms}
for form in forms:
    waiting, _, slice_us = form.removeprefix("k").partition("/")
    environ = os.environ | KNOWN.get(waiting, {"GOMP_SPINCOUNT": waiting})
    threads = "1" if waiting == "one" else "2"
    kernels = "1" if waiting == "one" or form.startswith("k") else "2"
    words = [size, packs, threads, kernels, slice_us or "0", str(int(waiting == "adapted"))]
    command = [sys.executable, Path(__file__).with_name("worker.py"), *words]
    processes[form] = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert processes[form].stdout.readline() == "ready\n"
for _ in range(int(rounds)):
    for level in levels:
        hogs = [subprocess.Popen(HOG) for _ in range(level)]
        time.sleep(0.1 if level else CALM_SECONDS)
        for form in random.sample(forms, len(forms)):
            processes[form].stdin.write(f"{seconds}\n")
            processes[form].stdin.flush()
            times[level, form].append(float(processes[form].stdout.readline()))
            print(f"{level} busy, {form}: {1e3 * times[level, form][-1]:.2f} ms", flush=True)
        for hog in hogs:
            hog.kill()
            hog.wait()
print(f"{size}, {packs} packs, {rounds} rounds of {seconds} s, load {os.getloadavg()[0]:.2f}")
for level in levels:
    for form in forms:
        taken = times[level, form]
        ratios = [a / b for a, b in zip(taken, times[levels[0], forms[0]], strict=True)]
        own = [a / b for a, b in zip(taken, times[levels[0], form], strict=True)]
        print(
            f"  {level} busy, {form:12} {statistics.median(taken) * 1e3:8.2f} ms"
            f"  {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            f"  to itself {statistics.median(own):.3f}",
            flush=True,
        )
for process in processes.values():
    process.stdin.close()
    process.wait()
