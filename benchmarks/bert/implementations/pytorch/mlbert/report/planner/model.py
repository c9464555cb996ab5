"""The model: samples to the target, time of a step, time to train, as `tools/fit_plan.py` fits it.

    step = sequence_ms x sequences of a GPU x (work of the model / BERT-large's) + constant + network
    time = samples / batch x step + samples / interval x evaluation

Where there are several nodes, every node's ports carry 2 (N - 1) / N of the gradient (a ring over N GPUs), whatever the
number of nodes; network_ms is what of it is not hidden behind the backward pass. Of nodes without NVLink it falls with
the root of the bandwidth only: their GPUs reach the port through the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from mlbert.mlperf import rules
from mlbert.report.planner.parameters import GPUS, Parameters

REFERENCE_GBPS = {"switched": 1600.0, "direct": 400.0, "pcie": 100.0}
# H100 at 512 and more GPUs ran in 16 bits: 1.0 ms a sequence against 0.84 with FP8 (steps of the published logs).
WITHOUT_FP8 = 1.2
OLD_ROUND, NEW_ROUND = "1.1", "5.0"
MOST_DIRECT_GPUS = 4  # of a node; with more there is an NVLink switch
OWN_SETTINGS_FROM = 192  # sequences a GPU and step
PACKED_UP_TO = 8  # sequences a GPU and step: round 1.1 did not exchange padding there
PCIE_SHARERS = 8  # GPUs of a node beyond which nothing is known
BLACKWELL_ABOVE = 1024  # batch


@dataclass(frozen=True)
class Job:
    """What is asked about.

    Attributes:
        gpu: name in `GPUS`.
        gpus, nodes: of the whole job.
        batch: sequences of one step over all GPUs.
        network_gbps: of one node's ports together, None: one usual port a GPU.
        fp8: whether the encoder's products are FP8.
        round: whose software; "1.1", or anything later.
        work: FLOPs of a sequence over BERT-large's on the benchmark's lengths.
        gradient: bytes of the gradient over BERT-large's.
        imbalance: tokens of the slowest GPU over the mean, beyond what the published runs had.
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

    @property
    def sequences(self) -> float:
        """Of one GPU and step."""
        return self.batch / self.gpus

    @property
    def per_node(self) -> float:
        """GPUs of one node."""
        return self.gpus / self.nodes

    @property
    def fabric(self) -> str | None:
        """What the nodes are joined by, None inside one NVLink domain."""
        facts = GPUS[self.gpu]
        if self.nodes == 1 or (facts.domain > facts.per_node and self.gpus <= facts.domain):
            return None
        if self.gpu.endswith("-pcie"):
            return "pcie"
        return "direct" if self.per_node <= MOST_DIRECT_GPUS and facts.domain <= facts.per_node else "switched"


@dataclass(frozen=True)
class Step:
    """Milliseconds of one optimizer step, by what they go to."""

    compute: float
    imbalance: float
    constant: float
    network: float

    @cached_property
    def total(self) -> float:
        """All of it."""
        return self.compute + self.imbalance + self.constant + self.network


def step(job: Job, parameters: Parameters) -> Step:
    """Time of one step."""
    facts, p = GPUS[job.gpu], parameters
    factor = (p.old_software if job.round == OLD_ROUND else 1.0) * (WITHOUT_FP8 if facts.has_fp8 and not job.fp8 else 1)
    compute = p.sequence_ms[job.gpu] * job.sequences * factor * job.work
    constant, network = p.constant_ms[facts.constant], 0.0
    if job.gpu.endswith("-pcie"):
        constant += p.pcie_ms * job.gradient * (1 - 1 / max(1.0, min(job.per_node, PCIE_SHARERS)))
    if (fabric := job.fabric) is not None:
        slower = REFERENCE_GBPS[fabric] / (job.network_gbps or facts.port_gbps * job.per_node)
        slower = math.sqrt(slower) if fabric == "pcie" else slower
        network = p.network_ms[fabric] * job.gradient * slower * (job.gpus - 1) / job.gpus
    return Step(compute, compute * (job.imbalance - 1), constant, network)


def samples(job: Job, parameters: Parameters) -> float:
    """Samples to the target that a score counts: the mean of ten runs, raised to the rules' point where it is less.

    Raises:
        ValueError: the batch is beyond the reference's points.
    """
    point, p = rules.reference_point(job.batch), parameters
    if point is None:
        raise ValueError(f"no reference point at or above batch {job.batch}")
    mean = p.samples_share * point.mean_samples
    if job.round == OLD_ROUND and job.sequences > PACKED_UP_TO:
        mean *= p.old_samples
    if job.gpu in ("b200", "gb200") and job.batch > BLACKWELL_ABOVE:
        mean *= p.blackwell_samples
    return mean * (p.own_settings if job.sequences >= OWN_SETTINGS_FROM else 1.0)


def evaluation_seconds(job: Job, parameters: Parameters) -> float:
    """Of one evaluation on 10,000 sequences."""
    return parameters.evaluation_gpu_seconds[job.gpu] * job.work / job.gpus


def seconds_to_train(job: Job, parameters: Parameters, needed: float | None = None) -> float:
    """Time to train; ``needed``: samples to the target where they are known."""
    needed = samples(job, parameters) if needed is None else needed
    evaluations = needed / rules.eval_interval(job.batch)
    return needed / job.batch * step(job, parameters).total / 1e3 + evaluations * evaluation_seconds(job, parameters)
