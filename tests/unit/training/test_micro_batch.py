"""AUTO_MICRO_BATCH in a process whose memory is really short."""

import sys

from programs import run_checked

PROGRAM = """
import resource
from pathlib import Path
from types import SimpleNamespace
import torch
from mlbert.config.configuration import Configuration
from mlbert.distributed.reduce import GradientReducer, cut_buckets
from mlbert.distributed.world import World
from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import StaticShape
from mlbert.data.loading.config import DataConfig
from mlbert.host.errors import UserError
from mlbert.models.bert import BertForMaskedLM
from mlbert.models.objectives import MaskedLM
from mlbert.recipes.sections import CATALOG
from mlbert.ops.config import ComputeConfig
from mlbert.optim.flat import FlatParameters
from mlbert.training.experiment import build_fitting

SHAPE = BertConfig(30_000, 64, 1, 2, 128, max_position_embeddings=128)
def build(config):
    model = BertForMaskedLM(SHAPE)
    model.initialize(1)
    flat = FlatParameters(model.ordered_parameters())
    buckets = cut_buckets(flat.offsets, 1, 1)
    packs = config[DataConfig].train_batch_size // config[DataConfig].gradient_accumulation_steps
    sync = GradientReducer(flat.parameters, flat.grad, flat.offsets, World(), buckets, None)
    return SimpleNamespace(
        model=model,
        objective=MaskedLM("step"),
        flat=flat,
        optimizer=None,
        loss_scale=None,
        sync=sync,
        static_shape=StaticShape(packs * 128, packs, packs * 20, 128),
    )

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = used + 700 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for batch in (511, 512):
    data = DataConfig(
        input_dir=Path(), eval_dir=Path(), train_batch_size=batch, average_packing_rate=1.0
    )
    try:
        given = Configuration([data, ComputeConfig(auto_micro_batch=True)], CATALOG)
        config, method = build_fitting(given, build, World(), print)
        assert not method.flat.grad.any(), "gradients are left"
        print("parts", config[DataConfig].gradient_accumulation_steps)
    except UserError as error:
        print(f"{error.code} {error.subject}")
"""


def test_parts_are_doubled_until_one_fits():
    """A batch that cannot be halved is an error."""
    odd, first, *_, last = run_checked(
        sys.executable, "-c", PROGRAM, timeout=240
    ).stdout.splitlines()
    assert odd == "device.memory BATCHSIZE 511"
    assert first == "out of memory: GRADIENT_STEPS is now 2"
    assert 2 <= int(last.removeprefix("parts ")) <= 64
