"""Print "ready"; for each line of input, make that many training steps and print their median seconds.

worker.py SIZE PACKS THREADS
"""

import statistics
import sys
import time

import torch

from mlbert.cli.bench import CONFIGS
from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import BertForPreTraining
from mlbert.ops import api as ops
from mlbert.programs.bench.step_time import make_batch, our_side

size, packs, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(threads)
ops.select("auto", torch.device("cpu"))
config = BertConfig.from_json(CONFIGS / f"{size}.json")
model = BertForPreTraining(config, torch.float32)
model.initialize(1)
side = our_side(make_batch(config, packs, None, 1), model, 1)
for _ in range(3):
    side.step()
print("ready", flush=True)
for line in sys.stdin:
    seconds = []
    for _ in range(int(line)):
        start = time.perf_counter()
        side.step()
        seconds.append(time.perf_counter() - start)
    print(statistics.median(seconds), flush=True)
