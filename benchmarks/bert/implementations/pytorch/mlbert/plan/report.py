"""The answers in words and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from mlbert.core.rules import NUM_RESULT_FILES
from mlbert.plan.estimate import Estimate
from mlbert.plan.simulate import Balance


def duration(seconds: float) -> str:
    """Seconds below two minutes, else minutes, else hours."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.2f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _band(band: tuple[float, float]) -> str:
    return f"{duration(band[0])} to {duration(band[1])}"


def text(found: Estimate) -> str:
    """One line a question."""
    job, step, held = found.job, found.step, found.memory
    parts = [("compute", step.compute), ("load imbalance", step.imbalance), ("constant part", step.constant)]
    parts += [("network, not hidden", step.network)]
    of_step = ", ".join(f"{name} {value:.1f}" for name, value in parts if value)
    micro = f" in {found.micro_batches} micro-batches" if found.micro_batches > 1 else ""
    lines = [
        f"job: {job.gpus} {job.gpu} on {job.nodes} node{'s' * (job.nodes > 1)}, "
        f"{'FP8' if job.fp8 else '16-bit'} products, batch {job.batch:,} = {job.sequences:g} sequences a GPU{micro}",
        f"samples to the target: {found.samples:,.0f} on average, one run varies by {found.samples_spread:,.0f}; "
        f"reference point of the rules {found.rules_samples:,.0f}",
        f"evaluations: {found.evaluations}, of {found.evaluation_seconds:.2f} s each",
        f"step: {step.total:.1f} ms ({of_step})",
        f"speed: {found.sequences_per_second:,.0f} sequences/s, {100 * found.share_of_peak:.0f} % of the 16-bit peak",
        f"time to train: {duration(found.seconds)}",
        f"nine of ten scores ({NUM_RESULT_FILES} runs, olympic mean): {_band(found.score_band)}; "
        f"nine of ten runs: {_band(found.run_band)}",
        f"memory of a GPU: {held.total:.0f} GB (weights {held.weights:.1f}, gradient {held.gradients:.1f}, optimizer "
        f"{held.optimizer:.1f}, activations {held.activations:.0f}, context {held.context:.0f}); "
        f"up to {held.most_sequences} sequences fit at once",
        f"limit: {found.limit}",
    ]
    if found.dollars is not None:
        lines.append(f"cost: {found.dollars:,.2f} dollars a run, {found.dollars * NUM_RESULT_FILES:,.2f} for ten")
    if found.kilowatt_hours is not None:
        lines.append(f"energy: {found.kilowatt_hours:,.2f} kWh a run")
    return "\n".join(lines)


def table(found: Sequence[Estimate]) -> Table:
    """One row a number of GPUs."""
    rows = Table(title=f"{found[0].job.gpu}, each with its fastest batch")
    for column in ("GPUs", "nodes", "batch", "M samples", "step, ms", "time", "90 % of scores", "dollars", "limit"):
        rows.add_column(column, justify="right")
    for item in found:
        rows.add_row(
            str(item.job.gpus),
            str(item.job.nodes),
            str(item.job.batch),
            f"{item.samples / 1e6:.2f}",
            f"{item.step.total:.1f}",
            duration(item.seconds),
            _band(item.score_band),
            "-" if item.dollars is None else f"{item.dollars:,.2f}",
            item.limit,
        )
    return rows


def choice(cheapest: Estimate, fastest: Estimate) -> str:
    """What a budget buys."""
    words = [
        f"{name}: {item.job.gpus} GPUs, batch {item.job.batch}, {duration(item.seconds)}, {item.dollars:,.2f} dollars"
        for name, item in (("cheapest", cheapest), ("fastest within the budget", fastest))
    ]
    return "\n".join(words)


def simulated(
    ranks: int, each: int, found: Sequence[Balance], sent: Mapping[str, float], reference_exists: bool
) -> str:
    """Balance and traffic of so many ranks."""
    lines = [f"{ranks} ranks, {each} sequences a rank and step"]
    lines += [f"{b.name}: fullest rank / mean {b.mean:.4f}, worst step {b.worst:.4f}" for b in found]
    ways = {"off": "everything on every rank", "node": "shared in a node", "all": "shared by all"}
    lines += [f"optimizer {ways[way]}: a rank sends {size / 1e9:.3f} GB a step" for way, size in sent.items()]
    if not reference_exists:
        lines.append(f"batch {ranks * each:,} is beyond the reference points: nobody showed that it converges")
    return "\n".join(lines)
