"""pairs.py SIZE PACKS STEPS ROUNDS FORM...: forms of waiting in turn, each in its own process.

A form is a value of GOMP_SPINCOUNT, "passive" (OMP_WAIT_POLICY), "default", or "one" (thread). Prints the median of a
step and the median of its ratios to the first form.
"""

import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

size, packs, steps, rounds, *forms = sys.argv[1:]
ENVIRON = {"default": {}, "one": {}, "passive": {"OMP_WAIT_POLICY": "passive"}}
processes, times = {}, {form: [] for form in forms}
for form in forms:
    environ = os.environ | ENVIRON.get(form, {"GOMP_SPINCOUNT": form})
    words = [sys.executable, Path(__file__).with_name("worker.py"), size, packs, "1" if form == "one" else "2"]
    processes[form] = subprocess.Popen(words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert processes[form].stdout.readline() == "ready\n"
for _ in range(int(rounds)):
    for form in random.sample(forms, len(forms)):
        processes[form].stdin.write(f"{steps}\n")
        processes[form].stdin.flush()
        times[form].append(float(processes[form].stdout.readline()))
print(f"{size}, {packs} packs, {rounds} rounds of {steps} steps, load {os.getloadavg()[0]}")
for form in forms:
    ratio = statistics.median(a / b for a, b in zip(times[form], times[forms[0]], strict=True))
    print(f"  {form:8} {statistics.median(times[form]) * 1e3:8.2f} ms  {ratio:.3f}", flush=True)
