"""The answers in words and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from mlbert.mlperf.rules import NUM_RESULT_FILES
from mlbert.report.planner.estimate import Estimate
from mlbert.report.planner.simulate import Balance

_QUESTION_WIDTH = 24  # columns


def duration(seconds: float) -> str:
    """Seconds below two minutes, else minutes, else hours."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.2f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _band(band: tuple[float, float]) -> str:
    return f"{duration(band[0])} to {duration(band[1])}"


def answers(found: Estimate) -> Table:
    """A row for each question."""
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
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(max_width=_QUESTION_WIDTH)
    rows.add_column()
    for line in lines:
        question, _, words = line.partition(": ")
        rows.add_row(question, words)
    return rows


def table(found: Sequence[Estimate]) -> Table:
    """One row a number of GPUs."""
    has_price = any(item.dollars is not None for item in found)
    rows = Table(title=f"{found[0].job.gpu}, each with its fastest batch", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("GPUs", "batch", "time", "90 % of scores", *(["dollars"] if has_price else [])):
        rows.add_column(column, justify="right", no_wrap=True)
    rows.add_column("limit")
    for item in found:
        price = ["-" if item.dollars is None else f"{item.dollars:,.2f}"] if has_price else []
        band = _short_band(item.score_band)
        rows.add_row(str(item.job.gpus), str(item.job.batch), duration(item.seconds), band, *price, item.limit)
    return rows


def _short_band(band: tuple[float, float]) -> str:
    """Without the unit of the first where it is the second's."""
    low, high = duration(band[0]), duration(band[1])
    return f"{low.removesuffix(high[high.index(' ') :])} to {high}"


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
