"""Build the training step of a published configuration on one GPU,
by sourcing its config and running its recipe.

Graphs, algorithms, accumulation, implementations of the ops and copies of the weights are those of
the job. Only the settings in `CHANGES` differ, and every step trains on the same batch, with
lengths as in the training set.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.config.resolution import Resolved
from mlbert.data.batches import HostBatch
from mlbert.data.loading.config import DataConfig
from mlbert.distributed.capture import NoCapture
from mlbert.distributed.world import World
from mlbert.host.provenance import tree_root
from mlbert.ops.config import ComputeConfig
from mlbert.ops.cublaslt_tuning import ruled, tuned
from mlbert.ops.proof import prove
from mlbert.programs.bench.sides import make_batch
from mlbert.recipes.registry import RECIPES
from mlbert.recipes.sections import resolve
from mlbert.runs.config import RunConfig
from mlbert.training.protocols import BuildContext, Method
from mlbert.training.step import GraphMode, Graphs, Step, choose_graphs

FOLDER = tree_root() / "benchmarks" / "bert" / "implementations" / "h200_n1"
CONFIGS = {
    "fp8": FOLDER / "config_H200_1x8x48x1_pack_fp8.sh",
    "bf16": FOLDER / "config_H200_1x8x48x1_pack.sh",
}
# One GPU exchanges no weights, so none are rounded for it.
CHANGES = {"SYNTH_DATA": "1", "INIT_CHECKPOINT": "none", "SEED": "1", "WEIGHTS_ALLGATHER": "fp32"}
LEARNING_RATE = 1e-4
SEQUENCES_A_PACK = 2


def exports(
    precision: str, work: Path, changes: Mapping[str, str], shape: BertConfig | None = None
) -> dict[str, str]:
    """Return the environment after sourcing the published config, with these changes and,
    if given, another shape.

    An exported OPS applies, so that a run can be repeated with other implementations.
    """
    command = ["bash", "-c", 'source "$0" && env -0', str(CONFIGS[precision])]
    sourced = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    environ = dict(line.split("=", 1) for line in sourced.split("\0") if "=" in line)
    environ |= {**CHANGES, "LOGDIR": str(work / "product"), "OPS": os.environ.get("OPS", "auto")}
    if shape is not None:
        file = work / f"shape-{shape.num_hidden_layers}x{shape.hidden_size}.json"
        file.write_text(json.dumps(asdict(shape)), encoding="utf-8")
        environ["BERT_CONFIG"] = str(file)
    return {**environ, **changes}


def configured(
    precision: str, work: Path, changes: Mapping[str, str], shape: BertConfig | None = None
) -> Resolved:
    """Return the configuration of `exports`."""
    environ = exports(precision, work, changes, shape)
    return resolve(RECIPES[environ["RECIPE"]], environ)


class Tuning(Enum):
    """How cublasLt's algorithms are chosen: by time, by `mlbert.ops.cublaslt_tuning.ruled`, or not
    at all, which is the heuristic's first with every epilogue.
    """

    TIMED = "timed"
    RULED = "ruled"
    NONE = "none"


class PublishedStep:
    """A configuration's step with its graphs recorded.

    Args:
        resolved: from `configured`.
        device: where to compute; a CPU, for a rehearsal, captures no graphs.
        say: called with messages about implementations and algorithms.
        tuning: how cublasLt's algorithms are chosen. Timing needs the device for itself, and its
            choices are cached.
    """

    def __init__(
        self,
        resolved: Resolved,
        device: torch.device,
        say: Any = print,
        tuning: Tuning = Tuning.TIMED,
    ) -> None:
        config = resolved.config
        world = World.identify({})
        compute = config[ComputeConfig]
        packs = config[DataConfig].train_batch_size
        self.device = device
        self.seed = config[RunConfig].seed or 0
        inputs = resolved.recipe.inspect(config)
        prove(compute.ops, compute.precision, inputs.shape, device, world.all_reduce_max, say)
        self.config: BertConfig = inputs.shape
        context = BuildContext(config, world, self.seed, say)
        self.method: Method = resolved.recipe.load().build(context, inputs)
        self.flat = self.method.flat
        self.batch = self._batch(packs)
        method = self.method
        graphs = None
        if device.type == "cuda":
            graphs = choose_graphs(compute.cuda_graph_mode, method, 1, device, 1)
        elif compute.cuda_graph_mode != "none":
            assert method.static_shape is not None, "packs have a static shape"
            can_capture = method.optimizer.can_capture  # only the Triton implementation can
            mode = GraphMode(compute.cuda_graph_mode) if can_capture else GraphMode.SEGMENTED
            graphs = Graphs(mode, method.static_shape, 1, NoCapture)
        self.train_step = Step.of(method, world.all_reduce_max, say, graphs)
        self.train_step.warm_up()
        if graphs and tuning is Tuning.TIMED:
            self.train_step.record(partial(tuned, device, True, world.all_reduce_max, say))
        elif graphs and tuning is Tuning.RULED:
            self.train_step.record(ruled)
        elif graphs:
            self.train_step.record()
        self._steps = itertools.count()
        self._divisors = method.objective.divisors(method.objective.counts(self.batch))

    def step(self) -> Tensor:
        """Queue one step and return its loss."""
        return self.train_step(
            [self.batch], self.seed, next(self._steps), self._divisors, LEARNING_RATE
        ).loss_sum

    def _batch(self, packs: int) -> HostBatch:
        """Return as many sequences as fit into the packs, with lengths as in the training set."""
        shape = self.method.static_shape
        for sequences in range(SEQUENCES_A_PACK * packs, 0, -1):
            batch = make_batch(self.config, sequences, None, self.seed)
            if shape is None or shape.holds(batch):
                break
        return replace(batch, data=batch.data.pin_memory()) if self.device.type == "cuda" else batch
