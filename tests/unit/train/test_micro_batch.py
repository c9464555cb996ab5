"""AUTO_MICRO_BATCH in a process whose memory is really short."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = """
import resource, sys
from dataclasses import dataclass, replace
import torch
from torch import nn
from mlbert.core.errors import UserError
from mlbert.dist.reduce import GradientReducer, cut_buckets
from mlbert.dist.world import World
from mlbert.feed.budget import Budget
from mlbert.models.bert import BertForMaskedLM
from mlbert.models.objectives import MaskedLM
from mlbert.core.bert_config import BertConfig
from mlbert.optim.flat import FlatParameters
from mlbert.train.micro_batch import build_fitting
from types import SimpleNamespace

torch.set_num_threads(1)
SHAPE = BertConfig(vocab_size=30_000, hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
                   intermediate_size=128, max_position_embeddings=128)

@dataclass(frozen=True)
class Config:
    auto_micro_batch: bool = True
    gradient_accumulation_steps: int = 1
    train_batch_size: int = int(sys.argv[1])

def build(config):
    model = BertForMaskedLM(SHAPE)
    model.initialize(1)
    flat = FlatParameters(model.ordered_parameters())
    buckets = cut_buckets(flat.offsets, 1, 1)
    packs = config.train_batch_size // config.gradient_accumulation_steps
    return SimpleNamespace(model=model, objective=MaskedLM("step"), flat=flat, optimizer=None, loss_scale=None,
                           sync=GradientReducer(flat.parameters, flat.grad, flat.offsets, World(), buckets, None),
                           budget=Budget(packs * 128, packs, packs * 20, 128))

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = used + 700 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    config, method = build_fitting(Config(), build, World(), print)
    assert not method.flat.grad.any(), "gradients are left"
    print("parts", config.gradient_accumulation_steps)
except UserError as error:
    print("error:", error)
"""


def output(batch: int) -> str:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_parts_are_doubled_until_one_fits() -> None:
    first, *_, last = output(512).splitlines()
    assert first == "out of memory: GRADIENT_STEPS is now 2"
    assert 2 <= int(last.removeprefix("parts ")) <= 64


def test_a_batch_that_cannot_be_halved_is_named() -> None:
    assert "BATCHSIZE 511: does not fit the memory in 1 parts, nor is it divided by 2" in output(511)
