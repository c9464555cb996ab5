"""Turn the user's options and a configuration into a job, sweep over 1 to 4,096 GPUs,
and put the answers in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mlaudit import rules
from mlaudit.planner.cost import Estimate
from mlaudit.planner.gpus import GPUS
from mlaudit.planner.timing import (
    ModelShape,
    TrainingJob,
    held_out,
    held_out_by_kind,
)
from mlaudit.report.tables import ReportTable
from mlaudit.rules import NUM_RESULT_FILES
from mlbert.host.errors import UserError
from mlbert.host.texts import counted

GPU_COUNTS = tuple(2**power for power in range(13))
# The reference's batch sizes, and the one used by most published results.
BATCHES = tuple(sorted({point.global_batch_size for point in rules.reference_points()} | {768}))
FEWEST_SEQUENCES = 2  # per GPU and step; published runs went down to 3
MOST_GPUS = 8192
LARGEST_BATCH = rules.reference_points()[-1].global_batch_size
PRECISIONS = {"bf16": False, "fp16": False, "auto": False, "fp8": True, "fp8-forward": True}
_GPUS_FILE = "audit/mlaudit/planner/gpus.py"
_GIVE_BATCH = "Give --batch, or other --gpus"


def fastest(gpus: int, ask: Callable[[int, int], Estimate]) -> Estimate | None:
    """Return the fastest of `BATCHES` that divide evenly among ``gpus`` GPUs, or None."""
    fitting = [
        batch for batch in BATCHES if batch % gpus == 0 and batch // gpus >= FEWEST_SEQUENCES
    ]
    return min(
        (ask(gpus, batch) for batch in fitting), key=lambda found: found.seconds, default=None
    )


def sweep(ask: Callable[[int, int], Estimate]) -> list[Estimate]:
    """Return the fastest batch for each of `GPU_COUNTS`; ``ask`` estimates (GPUs, batch)."""
    return [found for gpus in GPU_COUNTS if (found := fastest(gpus, ask)) is not None]


def within(found: Sequence[Estimate], budget: float) -> tuple[Estimate, Estimate]:
    """Return the cheapest and the fastest estimate that cost at most ``budget`` dollars.

    Raises:
        UserError: no estimate is that cheap.
    """
    priced = [(estimate.dollars, estimate) for estimate in found if estimate.dollars is not None]
    affordable = [pair for pair in priced if pair[0] <= budget]
    if not affordable:
        least = min(dollars for dollars, _ in priced)
        reason = f"no configuration costs {budget:g} dollars or less"
        raise UserError("plan.impossible", "--budget", reason, f"The cheapest costs {least:.2f}")
    cheapest = min(affordable, key=lambda pair: pair[0])[1]
    return cheapest, min(
        (estimate for _, estimate in affordable), key=lambda estimate: estimate.seconds
    )


@dataclass(frozen=True)
class Given:
    """What the user or a configuration asks for; None if not given.

    Attributes:
        gpus, nodes: totals of the job.
        batch: sequences per step over all GPUs.
        batch_per_gpu: alternative to ``batch``.
        precision: precision of matrix products.
        sharing: GPUs that share the optimizer state: off, node or all.
        port_gbps: network speed per GPU.
        name: how the user calls a GPU that is estimated like ``gpu``.
        speed: its speed relative to that of ``gpu``.
    """

    gpu: str
    shape: ModelShape
    gpus: int | None = None
    nodes: int | None = None
    batch: int | None = None
    batch_per_gpu: int | None = None
    precision: str | None = None
    sharing: str = "off"
    port_gbps: float | None = None
    imbalance: float = 1.0
    name: str = ""
    speed: float = 1.0

    @property
    def per_node(self) -> int:
        """GPUs per node."""
        return self.gpus // self.nodes if self.gpus and self.nodes else GPUS[self.gpu].per_node


def job_of(given: Given, ask: Callable[[TrainingJob], Estimate]) -> TrainingJob:
    """Return the job; without a given batch, use the fastest of the reference's.

    Raises:
        UserError: the options contradict each other.
    """
    job = hardware(given)
    gpus = job.gpus
    job = replace(job, work=given.shape.work, gradient=given.shape.gradient)
    batch = given.batch or (given.batch_per_gpu or 0) * gpus
    if batch:
        if not gpus <= batch <= LARGEST_BATCH:
            smallest = f"{gpus} (one sequence per GPU)"
            largest = f"{LARGEST_BATCH} (largest reference point)"
            reason = f"{batch} is not between {smallest} and {largest}"
            raise UserError(
                "config.conflict", "--batch", reason, "Give another batch or other --gpus"
            )
        return replace(job, batch=batch)
    found = fastest(gpus, lambda _, size: ask(replace(job, batch=size)))
    if found is None:
        raise UserError(
            "config.missing",
            "--batch",
            f"no reference batch divides evenly over {gpus} GPUs",
            _GIVE_BATCH,
        )
    return found.job


def hardware(given: Given) -> TrainingJob:
    """Return a job of one sequence per GPU on the given machines.

    Raises:
        UserError: the options contradict each other.
    """
    gpus = given.gpus or (given.nodes or 1) * given.per_node
    nodes = given.nodes or math.ceil(gpus / given.per_node)
    if gpus % nodes:
        reason = f"{gpus} GPUs cannot be divided evenly over {nodes} nodes"
        raise UserError("config.conflict", "--nodes", reason, "Give a divisor of --gpus")
    if given.precision is not None and given.precision not in PRECISIONS:
        raise UserError(
            "config.choice", "--precision", f"{given.precision} is unknown", "Give bf16 or fp8"
        )
    fp8 = GPUS[given.gpu].has_fp8 if given.precision is None else PRECISIONS[given.precision]
    if fp8 and not GPUS[given.gpu].has_fp8:
        raise UserError(
            "config.choice",
            "--precision",
            f"no FP8 results are published for {given.gpu}",
            "Give bf16",
        )
    port = None if given.port_gbps is None else given.port_gbps * gpus / nodes
    return TrainingJob(
        given.gpu,
        gpus,
        nodes,
        gpus,
        port,
        fp8,
        imbalance=given.imbalance,
        name=given.name,
        speed=given.speed,
    )


def duration(seconds: float) -> str:
    """Format seconds below two minutes as seconds, else as minutes or hours."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.2f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def band(ends: tuple[float, float]) -> str:
    """Format the ends of a band, omitting the first unit if both are the same."""
    low, high = map(duration, ends)
    return f"{low.removesuffix(high[high.index(' ') :])} to {high}"


def expected_error() -> str:
    """Return how far estimates are off, from the results that the fit had not seen."""
    kinds = [f"{100 * error:.0f} % {kind}" for kind, error in held_out_by_kind().items()]
    *most, last = kinds
    return f"Expect it to be off by {', '.join(most)} and {last}"


def expected_error_of(job: TrainingJob) -> str:
    """Return how far an estimate is off; more for a GPU of which the fit has no results."""
    if job.has_results:
        return expected_error()
    error = held_out()["gpu"]["mean"]
    return (
        f"Expect it to be off by {100 * error:.0f} %: there are no published results of {job.label}"
    )


def how_to_add(gpu: str) -> str:
    """Return the remedy for a GPU that is not known."""
    return (
        f"Give --like GPU --factor X, if it is X times as fast as a known GPU; "
        "--like GPU --calibrate LOG with a log of a run on it; "
        f"or add a line for {gpu} to GPUS in {_GPUS_FILE}"
    )


def answers(found: Estimate) -> ReportTable:
    """Return the answers, one row each."""
    job = found.job
    step = found.step
    held = found.memory
    parts = [
        ("compute", step.compute),
        ("load imbalance", step.imbalance),
        ("constant part", step.constant),
        ("exposed network time", step.network),
    ]
    of_step = ", ".join(f"{name} {value:.1f}" for name, value in parts if value)
    plural = "" if job.nodes == 1 else "s"
    micro = f" in {found.micro_batches} micro-batches" if found.micro_batches > 1 else ""
    lines = [
        f"job: {job.gpus} {job.label} on {job.nodes} node{plural}, "
        f"{'FP8' if job.fp8 else '16-bit'} products, "
        f"batch {job.batch:,} = {job.sequences:g} sequences per GPU{micro}",
        f"samples to the target: {found.samples:,.0f} on average, "
        f"one run varies by {found.samples_spread:,.0f}; "
        f"reference point of the rules {found.rules_samples:,.0f}",
        f"evaluations: {found.evaluations}, {found.evaluation_seconds:.2f} s each",
        f"step: {step.total:.1f} ms ({of_step})",
        f"speed: {found.sequences_per_second:,.0f} sequences/s, "
        f"{100 * found.share_of_peak:.0f} % of the 16-bit peak",
        f"time to train: {duration(found.seconds)}",
        f"90 % interval: {band(found.score_band)} for the score of {NUM_RESULT_FILES} runs, "
        f"{band(found.run_band)} for one run",
        f"memory per GPU: {held.total:.0f} GB (weights {held.weights:.1f}, "
        f"gradient {held.gradients:.1f}, optimizer {held.optimizer:.1f}, "
        f"activations {held.activations:.0f}, context {held.context:.0f}); "
        f"up to {held.most_sequences} sequences fit at once",
        f"limit: {found.limit}",
    ]
    if found.dollars is not None:
        for_ten = found.dollars * NUM_RESULT_FILES
        lines.append(f"cost: {found.dollars:,.2f} dollars per run, {for_ten:,.2f} for ten")
    if found.kilowatt_hours is not None:
        lines.append(f"energy: {found.kilowatt_hours:,.2f} kWh per run")
    if found.co2_kg is not None:
        lines.append(f"CO2: {found.co2_kg:,.2f} kg per run")
    return ReportTable(
        ["", "estimate"], [line.split(": ", 1) for line in lines], texts=2, is_long=True
    )


def table(found: Sequence[Estimate]) -> ReportTable:
    """Return a table with one row per number of GPUs."""
    has_price = any(item.dollars is not None for item in found)
    columns = [
        "GPUs",
        "limit",
        "batch",
        "time",
        "90 % of scores",
        *(["dollars"] if has_price else []),
    ]
    rows = []
    for item in found:
        price = ["-" if item.dollars is None else f"{item.dollars:,.2f}"] if has_price else []
        times = [duration(item.seconds), band(item.score_band)]
        rows.append([str(item.job.gpus), item.limit, f"{item.job.batch:,}", *times, *price])
    return ReportTable(columns, rows, texts=2)


def choice(cheapest: Estimate, fastest: Estimate) -> str:
    """Return the cheapest and the fastest choice as text."""
    words = [
        f"{name}: {counted(item.job.gpus, 'GPU')}, batch {item.job.batch}, "
        f"{duration(item.seconds)}, {item.dollars:,.2f} dollars"
        for name, item in (("cheapest", cheapest), ("fastest within the budget", fastest))
    ]
    return "\n".join(words)
