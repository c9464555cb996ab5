"""Print "ready"; for each number of seconds read, make training steps for that long and print their mean seconds.

worker.py SIZE PACKS THREADS KERNELS SLICE ADAPT

KERNELS: threads of our C kernels. SLICE: the scheduler's time slice in microseconds, 0 for the system's.
ADAPT: 1 for mlbert.host.waiting.adapted_waits. Steps of the first half second are not measured.
"""

import ctypes
import struct
import sys
import time

size = sys.argv[1]
packs, threads, kernels, slice_us, is_adapted = map(int, sys.argv[2:])
if slice_us:
    SCHED_SETATTR = 314  # x86-64
    attributes = struct.pack("IIQiIQQQ", 48, 0, 0, 0, 0, slice_us * 1000, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.syscall(SCHED_SETATTR, 0, attributes, 0) == 0, ctypes.get_errno()

import torch  # noqa: E402

from mlbert.cli.bench import CONFIGS  # noqa: E402
from mlbert.config.bert_config import BertConfig  # noqa: E402
from mlbert.host.waiting import adapted_waits  # noqa: E402
from mlbert.models.bert import BertForPreTraining  # noqa: E402
from mlbert.ops import api as ops  # noqa: E402
from mlbert.programs.bench.sides import make_batch, our_side  # noqa: E402

SETTLING = 0.5  # seconds

torch.set_num_threads(threads)
ops.select("auto", torch.device("cpu"))
torch.get_num_threads = lambda: kernels
config = BertConfig.from_json(CONFIGS / f"{size}.json")
if size == "base":
    config = config.with_options("num_hidden_layers=2")
model = BertForPreTraining(config, torch.float32)
model.initialize(1)
side = our_side(make_batch(config, packs, None, 1), model, 1)
for _ in range(3):
    side.step()


def run(seconds):
    steps = 0
    start = time.perf_counter()
    while steps < 2 or time.perf_counter() - start < seconds:
        side.step()
        steps += 1
    return (time.perf_counter() - start) / steps


with adapted_waits(threads if is_adapted else 1):
    print("ready", flush=True)
    for line in sys.stdin:
        run(SETTLING)
        print(run(float(line)), flush=True)
