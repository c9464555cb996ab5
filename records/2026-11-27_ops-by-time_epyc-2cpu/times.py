"""Print the lines that a run with OPS=fastest logs for a model in float32."""

import sys

import torch

from mlbert.cli.bench import CONFIGS
from mlbert.config.bert_config import BertConfig
from mlbert.ops import api, proof

shape = BertConfig.from_json(CONFIGS / f"{sys.argv[1]}.json")
torch.set_num_threads(2)
print(api.describe(), f"model {sys.argv[1]}", sep="\n")
proof.prove("fastest", "fp32", shape, torch.device("cpu"), lambda tensor: tensor, print)
