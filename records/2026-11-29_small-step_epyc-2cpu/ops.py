"""Time each operator of the quickstart's step with one and with two threads: python ops.py demo 32 60 1 2

Prints the steps' times without the profiler and, for each operator with its inputs' shapes, the median of its own time
in 40 profiled steps, times its calls in a step.
"""

import collections
import statistics
import sys
import time

import torch
from torch.profiler import ProfilerActivity, profile

from mlbert.config.bert_config import BertConfig
from mlbert.host.provenance import shipped
from mlbert.models.bert import BertForPreTraining
from mlbert.ops import api as ops
from mlbert.programs.bench.sides import make_batch, our_side

PROFILED = 40
LINES = 75

name, packs, steps, *thread_counts = sys.argv[1:]
config = BertConfig.from_json(shipped("configs") / f"{name}.json")
ops.select("auto", "cpu")
batch = make_batch(config, int(packs), None, 1)
model = BertForPreTraining(config, torch.float32)
model.initialize(1)
side = our_side(batch, model, 1)
found = {}
for threads in map(int, thread_counts):
    torch.set_num_threads(threads)
    for _ in range(10):
        side.step()
    taken = []
    for _ in range(int(steps)):
        started = time.perf_counter()
        side.step()
        taken.append(1e3 * (time.perf_counter() - started))
    taken.sort()
    print(
        f"{threads} threads: min {taken[0]:.2f}  p10 {taken[len(taken) // 10]:.2f}"
        f" median {taken[len(taken) // 2]:.2f} ms",
        flush=True,
    )
    times = collections.defaultdict(list)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(PROFILED):
            side.step()
    for event in profiler.events():
        times[event.name, str(event.input_shapes)].append(event.self_cpu_time_total)
    for key, values in times.items():
        calls = len(values) / PROFILED
        found.setdefault(key, {})[threads] = calls, statistics.median(values) * calls
totals = {1: 0.0, 2: 0.0}
rows = []
for key, by_threads in found.items():
    one = by_threads.get(1, (0, 0.0))[1]
    calls, two = by_threads.get(2, (0, 0.0))
    totals[1] += one
    totals[2] += two
    rows.append((max(one, two), one, two, calls, key))
rows.sort(reverse=True)
for _, one, two, calls, (operator, shapes) in rows[:LINES]:
    print(
        f"1T {one:8.1f} 2T {two:8.1f} us x{one / max(two, 0.1):.2f} n={calls:.0f}"
        f" {operator[:40]:40s} {shapes[:80]}"
    )
print(totals)
