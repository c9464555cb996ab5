"""From what the user gives, over what a configuration says, to the job that is asked about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mlbert.host.errors import UserError
from mlbert.mlperf import rules
from mlbert.report.planner import sweep
from mlbert.report.planner.estimate import Estimate
from mlbert.report.planner.model import Job
from mlbert.report.planner.parameters import GPUS
from mlbert.report.planner.shapes import Shape

MOST_GPUS = 8192
LARGEST_BATCH = rules.REFERENCE_POINTS[-1].global_batch_size
PRECISIONS = {"bf16": False, "fp16": False, "auto": False, "fp8": True, "fp8-forward": True}
_GIVE_BATCH = "Give --batch, or other --gpus"


@dataclass(frozen=True)
class Given:
    """What is known; None where nothing was said.

    Attributes:
        gpus, nodes: of the job.
        port_gbps: network of one GPU.
        batch: sequences of a step over all GPUs.
        batch_per_gpu: in place of it.
        precision: of the products.
    """

    gpu: str
    shape: Shape
    gpus: int | None
    nodes: int | None
    port_gbps: float | None
    batch: int | None
    batch_per_gpu: int | None
    precision: str | None
    imbalance: float

    @property
    def per_node(self) -> int:
        """GPUs of one node."""
        return self.gpus // self.nodes if self.gpus and self.nodes else GPUS[self.gpu].per_node


def job_of(given: Given, ask: Callable[[Job], Estimate]) -> Job:
    """The job; without a batch the fastest one of the reference's.

    Raises:
        UserError: numbers that contradict each other.
    """
    gpus = given.gpus or (given.nodes or 1) * given.per_node
    nodes = given.nodes or sweep.nodes_for(gpus, given.per_node)
    if gpus % nodes:
        raise UserError(
            "config.conflict", "--nodes", f"{nodes} do not share out {gpus} GPUs evenly", "Give a divisor of --gpus"
        )
    if given.precision is not None and given.precision not in PRECISIONS:
        raise UserError("config.choice", "--precision", f"{given.precision} is unknown", "Give bf16 or fp8")
    fp8 = GPUS[given.gpu].has_fp8 if given.precision is None else PRECISIONS[given.precision]
    if fp8 and not GPUS[given.gpu].has_fp8:
        raise UserError("config.choice", "--precision", f"nobody published FP8 on {given.gpu}", "Give bf16")
    port = None if given.port_gbps is None else given.port_gbps * gpus / nodes
    job = Job(given.gpu, gpus, nodes, gpus, port, fp8, imbalance=given.imbalance)
    job = replace(job, work=given.shape.work, gradient=given.shape.gradient)
    batch = given.batch or (given.batch_per_gpu or 0) * gpus
    if batch:
        if not gpus <= batch <= LARGEST_BATCH:
            reason = f"{batch} is not from {gpus} (one sequence a GPU) to {LARGEST_BATCH} (the largest reference point)"
            raise UserError("config.conflict", "--batch", reason, "Give another batch or other --gpus")
        return replace(job, batch=batch)
    found = sweep.fastest(gpus, lambda _, size: ask(replace(job, batch=size)))
    if found is None:
        raise UserError(
            "config.missing", "--batch", f"no batch of the reference is shared out by {gpus} GPUs", _GIVE_BATCH
        )
    return found.job
