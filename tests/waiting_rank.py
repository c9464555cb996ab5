"""Train for some steps on one core, and print the processor seconds of all threads.

waiting_rank.py CORE THREADS STEPS
"""

import os
import sys
import time

import torch

from mlbert.config.bert_config import BertConfig
from mlbert.host.provenance import shipped
from mlbert.host.waiting import adapted_waits
from mlbert.models.bert import BertForPreTraining
from mlbert.ops import api as ops
from mlbert.programs.bench.sides import make_batch, our_side

core, threads, steps = map(int, sys.argv[1:])
# After OpenMP was loaded, or it would know that there is one core only.
os.sched_setaffinity(0, {core})
torch.set_num_threads(threads)
ops.select("auto", "cpu")
config = BertConfig.from_json(shipped("configs") / "demo.json")
model = BertForPreTraining(config, torch.float32)
model.initialize(1)
side = our_side(make_batch(config, 16, None, 1), model, 1)
side.step()
print("ready", flush=True)
sys.stdin.readline()
with adapted_waits(threads):
    started = time.process_time()
    for _ in range(steps):
        side.step()
    print(time.process_time() - started, flush=True)
