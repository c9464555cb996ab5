"""What a finished run leaves behind: the curve."""

from __future__ import annotations

import json
from pathlib import Path


def write_curve(metrics: Path, target: Path) -> None:
    """Draws loss and accuracy over samples and over time from ``metrics.jsonl`` into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [p for p in points if p["kind"] == "step"]
    evaluations = [p for p in points if p["kind"] == "evaluation"]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for axis, x, label in zip(
        axes, ("samples", "seconds"), ("training samples", "seconds since run_start"), strict=True
    ):
        axis.plot([p[x] for p in steps], [p["loss"] for p in steps], color="tab:blue", linewidth=1)
        axis.set_xlabel(label)
        accuracy = axis.twinx()
        accuracy.plot(
            [p[x] for p in evaluations], [p["eval_accuracy"] for p in evaluations], color="tab:orange", marker="."
        )
        accuracy.set_ylim(bottom=0)
        accuracy.set_ylabel("masked-LM accuracy, evaluation set", color="tab:orange")
    axes[0].set_ylabel("training loss (masked LM + next sentence)", color="tab:blue")
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
