"""The fitted timing model: samples to the target, time per step, time to train.

Also facts about shapes.

`tools/fit_plan.py` fits the parameters for BERT-large on the benchmark's sequences and writes
``parameters.json``.

    step = sequence_ms x sequences per GPU x (work of the model / BERT-large's) + constant + network
    time = samples / batch x step + samples / interval x evaluation

With several nodes, every node's ports carry 2 (N - 1) / N of the gradient (a ring over N GPUs),
whatever the number of nodes. network_ms is the part that the backward pass does not hide. For nodes
without NVLink it falls only with the square root of the bandwidth, because their GPUs reach the
port through the host.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from mlaudit import rules
from mlaudit.planner.gpus import GPUS
from mlbert.config.bert_config import BertConfig
from mlbert.config.flops import BatchWork, training_flops
from mlbert.host.errors import UserError
from mlbert.host.provenance import shipped

PATH = Path(__file__).with_name("parameters.json")

FLOPS = 0.4986e12  # of a sequence of the benchmark
REFERENCE_GBPS = {"switched": 1600.0, "direct": 400.0, "pcie": 100.0}
# Published H100 runs with 512 or more GPUs used 16 bits: 1.0 ms per sequence against 0.84 with FP8.
WITHOUT_FP8 = 1.2
OLD_ROUND = "1.1"
NEW_ROUND = "5.0"
MOST_DIRECT_GPUS = 4  # per node; larger nodes have an NVLink switch
OWN_SETTINGS_FROM = 192  # sequences per GPU and step
PACKED_UP_TO = 8  # sequences per GPU and step: up to here round 1.1 did not exchange padding
PCIE_SHARERS = 8  # GPUs per node; nothing is known beyond
BLACKWELL_ABOVE = 1024  # batch

_POINTS = np.array(
    [(point.global_batch_size, point.mean_samples) for point in rules.reference_points()]
).T

CONFIGS = shipped("configs")
# The benchmark's sequences (public length histogram):
# tokens, squared lengths and masked tokens of 1,000.
BENCHMARK = BatchWork(tokens=255_000, squared_lengths=98_826_000, masked=38_200, sequences=1_000)


@dataclass(frozen=True)
class Parameters:
    """Fitted parameters; times in milliseconds, the others are factors.

    Attributes:
        efficiency: fraction of the 16-bit peak of a typical GPU,
            with links between GPUs or PCIe only.
        sequence_ms: per sequence of the benchmark (254 tokens on average, BERT-large), by GPU;
            `load` estimates it from the peak for GPUs without results.
        constant_ms: per step, independent of the batch: LAMB, reduction inside a node, launches.
        pcie_ms: per step, for the reduction among eight GPUs without NVLink,
            which share the host's links.
        network_ms: per step, for the reduction between nodes, by fabric,
            at `REFERENCE_GBPS` per node.
        evaluation_gpu_seconds: GPU seconds per evaluation, by GPU.
        samples_share: samples to the target relative to the reference's;
            a score counts no fewer than the rules' point.
        old_software: factor on ``sequence_ms`` of round 1.1; old_pcie: another one without NVLink.
        old_samples: factor on the samples of round 1.1 (small scale: sequences exchanged,
            not packed).
        blackwell_samples: factor on the samples of B200 and GB200 with batches above 1,024.
        own_settings: factor on the samples from 192 sequences per GPU,
            for which no tuned recipe is published.
        pcie_samples: factor on the samples without NVLink, whose submitters tuned less.
        error_90: 90 % of the results of a submitter that the fit did not use are within
            exp(-error_90) to exp(error_90) of the prediction.
        unseen_error_90: the same for a GPU that the fit did not use.
        measured_samples: factor on the samples from the user's logs.
    """

    efficiency: Mapping[str, float]
    sequence_ms: Mapping[str, float]
    constant_ms: Mapping[str, float]
    pcie_ms: float
    network_ms: Mapping[str, float]
    evaluation_gpu_seconds: Mapping[str, float]
    samples_share: float
    old_software: float
    old_pcie: float
    old_samples: float
    blackwell_samples: float
    own_settings: float
    pcie_samples: float
    error_90: float
    unseen_error_90: float
    measured_samples: float = 1.0


def load() -> Parameters:
    """Return the fitted parameters of this version."""
    return with_unseen(Parameters(**json.loads(PATH.read_text(encoding="utf-8"))["parameters"]))


def held_out() -> dict[str, dict[str, float]]:
    """Return the errors of fits without the results that they are compared with,
    by what was left out.
    """
    return json.loads(PATH.read_text(encoding="utf-8"))["provenance"]["held_out"]


def held_out_by_kind() -> dict[str, float]:
    """Return the mean errors without the results of the submitter, by kind of system."""
    provenance = json.loads(PATH.read_text(encoding="utf-8"))["provenance"]
    return provenance["held_out_by_kind"]


def with_unseen(p: Parameters) -> Parameters:
    """Return the parameters with times for the GPUs that lack them: by the peak,
    and for an evaluation the median.
    """
    shares = {True: p.efficiency["pcie"], False: p.efficiency["linked"]}
    typical = {
        name: FLOPS / (shares[gpu.is_pcie] * gpu.peak_tflops * 1e9) for name, gpu in GPUS.items()
    }
    evaluation = dict.fromkeys(GPUS, statistics.median(p.evaluation_gpu_seconds.values()))
    evaluation |= p.evaluation_gpu_seconds
    return replace(p, sequence_ms=typical | {**p.sequence_ms}, evaluation_gpu_seconds=evaluation)


@dataclass(frozen=True)
class TrainingJob:
    """The job to estimate.

    Attributes:
        gpu: name in `GPUS`.
        gpus, nodes: totals of the job.
        batch: sequences per step over all GPUs.
        network_gbps: bandwidth of one node's ports together; None assumes one typical port per GPU.
        fp8: whether the encoder uses FP8 products.
        round: round of the software; "1.1", or anything later.
        work: FLOPs per sequence relative to BERT-large on the benchmark's lengths.
        gradient: bytes of the gradient relative to BERT-large's.
        imbalance: tokens of the slowest GPU over the mean, beyond that of the published runs.
        name: how the user calls the GPU, if it is estimated like another one; else empty.
        speed: products and evaluations of the GPU relative to those of ``gpu``.
    """

    gpu: str
    gpus: int
    nodes: int
    batch: int
    network_gbps: float | None = None
    fp8: bool = True
    round: str = NEW_ROUND
    work: float = 1.0
    gradient: float = 1.0
    imbalance: float = 1.0
    name: str = ""
    speed: float = 1.0

    @property
    def label(self) -> str:
        """The name of the GPU in words."""
        return self.name or self.gpu

    @property
    def has_results(self) -> bool:
        """Whether the fit has results of this GPU itself."""
        return GPUS[self.gpu].has_results and not self.name

    @property
    def sequences(self) -> float:
        """Sequences per GPU and step."""
        return self.batch / self.gpus

    @property
    def per_node(self) -> float:
        """GPUs per node."""
        return self.gpus / self.nodes

    @property
    def fabric(self) -> str | None:
        """Network between the nodes; None within one NVLink domain."""
        facts = GPUS[self.gpu]
        if self.nodes == 1 or (facts.domain > facts.per_node and self.gpus <= facts.domain):
            return None
        if facts.is_pcie:
            return "pcie"
        return (
            "direct"
            if self.per_node <= MOST_DIRECT_GPUS and facts.domain <= facts.per_node
            else "switched"
        )


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of one optimizer step by part."""

    compute: float
    imbalance: float
    constant: float
    network: float

    @cached_property
    def total(self) -> float:
        """Milliseconds of the whole step."""
        return self.compute + self.imbalance + self.constant + self.network


def step(job: TrainingJob, parameters: Parameters) -> StepTime:
    """Return the time of one step."""
    facts = GPUS[job.gpu]
    p = parameters
    factor = (p.old_software if job.round == OLD_ROUND else 1.0) * (
        WITHOUT_FP8 if facts.has_fp8 and not job.fp8 else 1
    )
    factor *= p.old_pcie if job.round == OLD_ROUND and facts.is_pcie else 1.0
    compute = p.sequence_ms[job.gpu] * job.sequences * factor * job.work / job.speed
    constant = p.constant_ms[facts.constant]
    network = 0.0
    if facts.is_pcie:
        constant += (
            p.pcie_ms
            * job.gradient
            * (max(1.0, min(job.per_node, PCIE_SHARERS)) - 1)
            / (PCIE_SHARERS - 1)
        )
    if (fabric := job.fabric) is not None:
        slower = REFERENCE_GBPS[fabric] / (job.network_gbps or facts.port_gbps * job.per_node)
        slower = math.sqrt(slower) if fabric == "pcie" else slower
        network = p.network_ms[fabric] * job.gradient * slower * (job.gpus - 1) / job.gpus
    return StepTime(compute, compute * (job.imbalance - 1), constant, network)


def reference_point(batch: int) -> rules.ReferencePoint:
    """Return the rules' point for a batch. Raises UserError if the batch is beyond all of them."""
    point = rules.reference_point(batch)
    if point is None:
        largest = rules.reference_points()[-1].global_batch_size
        raise UserError(
            "config.range",
            "--batch",
            f"{batch} is beyond the reference points",
            f"Give at most {largest}",
        )
    return point


def samples(job: TrainingJob, parameters: Parameters) -> float:
    """Return the samples to the target that a score counts: the mean of ten runs,
    at least the rules' point.

    The mean follows all of the reference's points, also those that the rules drop because a larger
    batch needs fewer samples. Raises UserError as `reference_point` does.
    """
    p = parameters
    least = reference_point(job.batch).mean_samples
    mean = p.samples_share * float(np.interp(job.batch, *_POINTS))
    mean *= p.pcie_samples if GPUS[job.gpu].is_pcie else 1.0
    if job.round == OLD_ROUND and job.sequences > PACKED_UP_TO:
        mean *= p.old_samples
    if job.gpu in ("b200", "gb200") and job.batch > BLACKWELL_ABOVE:
        mean *= p.blackwell_samples
    mean *= p.own_settings if job.sequences >= OWN_SETTINGS_FROM else 1.0
    return p.measured_samples * max(least, mean)


def evaluation_seconds(job: TrainingJob, parameters: Parameters) -> float:
    """Return the seconds of one evaluation on 10,000 sequences."""
    return parameters.evaluation_gpu_seconds[job.gpu] * job.work / job.gpus / job.speed


def seconds_to_train(
    job: TrainingJob, parameters: Parameters, needed: float | None = None
) -> float:
    """Return the time to train; ``needed`` overrides the samples to the target."""
    needed = samples(job, parameters) if needed is None else needed
    evaluations = needed / rules.eval_interval(job.batch)
    return needed / job.batch * step(
        job, parameters
    ).total / 1e3 + evaluations * evaluation_seconds(job, parameters)


@dataclass(frozen=True)
class ModelShape:
    """A model relative to BERT-large."""

    config: BertConfig
    flops: float  # per sequence, forward and backward
    work: float  # relative to BERT-large's FLOPs
    gradient: float  # relative to BERT-large's parameters

    @property
    def is_large(self) -> bool:
        """True if the reference's samples to the target apply to this model."""
        return self.work == 1.0


def of(config: BertConfig) -> ModelShape:
    """Return a model's shape relative to BERT-large."""
    large = BertConfig.from_json(CONFIGS / "large.json")
    flops = training_flops(config, BENCHMARK)
    usual = training_flops(large, BENCHMARK)
    return ModelShape(
        config,
        flops / BENCHMARK.sequences,
        flops / usual,
        config.num_parameters / large.num_parameters,
    )


def named(name: str) -> ModelShape:
    """Return a shape from the configs folder, or from a ``bert_config.json``.

    Raises:
        UserError: neither exists.
    """
    path = CONFIGS / f"{name}.json"
    if path.is_file():
        return of(BertConfig.from_json(path))
    if not Path(name).is_file():
        known = sorted(file.stem for file in CONFIGS.glob("*.json"))
        raise UserError(
            "config.choice",
            "--model",
            f"{name} is neither a known shape nor a file",
            "Use a known shape, or name a file",
            known,
        )
    return of(BertConfig.from_json(Path(name)))
