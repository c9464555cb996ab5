"""The same question for 1 to 4,096 GPUs: the fastest batch of each, and what a budget buys."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from mlbert.host.errors import UserError
from mlbert.mlperf import rules
from mlbert.report.planner.estimate import Estimate

GPU_COUNTS = tuple(2**power for power in range(13))
# Those of the reference, and the one that most published results used.
BATCHES = tuple(sorted({point.global_batch_size for point in rules.REFERENCE_POINTS} | {768}))
FEWEST_SEQUENCES = 2  # a GPU and step; published runs went down to 3
PICTURES = (".svg", ".png")


def fastest(gpus: int, ask: Callable[[int, int], Estimate]) -> Estimate | None:
    """The fastest batch for so many GPUs, of `BATCHES` that they share out evenly; None where there is none."""
    fitting = [batch for batch in BATCHES if batch % gpus == 0 and batch // gpus >= FEWEST_SEQUENCES]
    return min((ask(gpus, batch) for batch in fitting), key=lambda found: found.seconds, default=None)


def sweep(ask: Callable[[int, int], Estimate]) -> list[Estimate]:
    """The fastest batch for each of `GPU_COUNTS`; ``ask`` makes the estimate of (GPUs, batch)."""
    return [found for gpus in GPU_COUNTS if (found := fastest(gpus, ask)) is not None]


def nodes_for(gpus: int, per_node: int) -> int:
    """Nodes that hold so many GPUs."""
    return math.ceil(gpus / per_node)


def within(found: Sequence[Estimate], budget: float) -> tuple[Estimate, Estimate]:
    """The cheapest and the fastest setting whose run costs at most ``budget`` dollars.

    Raises:
        UserError: nothing is that cheap.
    """
    priced = [(estimate.dollars, estimate) for estimate in found if estimate.dollars is not None]
    affordable = [pair for pair in priced if pair[0] <= budget]
    if not affordable:
        least = min(dollars for dollars, _ in priced)
        raise UserError(
            "plan.impossible", "--budget", f"{budget:g} dollars buy no run", f"The cheapest costs {least:.2f}"
        )
    cheapest = min(affordable, key=lambda pair: pair[0])[1]
    return cheapest, min((estimate for _, estimate in affordable), key=lambda estimate: estimate.seconds)


def check_picture(path: Path) -> Path:
    """The path. Raises UserError where it is no picture's or its folder does not exist."""
    if path.suffix not in PICTURES:
        raise UserError("config.value", path, "is no picture's name", f"End it in {' or '.join(PICTURES)}")
    if not path.parent.is_dir():
        raise UserError("file.missing", path, "lies in a folder that does not exist", "Make the folder first")
    return path


def draw(path: Path, found: Sequence[Estimate]) -> None:
    """Time to train over GPUs with its band, beside perfect scaling."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "plan"
    figure = Figure(figsize=(5.5, 4), layout="tight")
    axes = figure.add_subplot()
    gpus = [estimate.job.gpus for estimate in found]
    minutes = [estimate.seconds / 60 for estimate in found]
    axes.plot(gpus, minutes, "o-", label="time to train")
    low, high = ([estimate.score_band[end] / 60 for estimate in found] for end in (0, 1))
    axes.fill_between(gpus, low, high, alpha=0.2, label="90 % of scores")
    axes.plot(gpus, [minutes[0] * gpus[0] / count for count in gpus], "k--", linewidth=0.8, label="perfect scaling")
    axes.set(xscale="log", yscale="log", xlabel=f"{found[0].job.gpu} GPUs", ylabel="minutes")
    axes.legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
