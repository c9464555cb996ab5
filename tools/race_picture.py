"""Draw the results of races: a panel per size, and per side and rate the median
and range over the seeds.

    python tools/race_picture.py RACE.jsonl... --out race.png

The inputs are written by `race.py --json`. A dashed line shows the accuracy of the best bigram.
Races without "evaluation" in their first line are of an older measure, with BERT's mix of masks,
and are not drawn with others.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from mlbert.host.errors import UserError
from race import Record, curves_of, guesses_of

Curves = dict[str, list[list[Record]]]  # by side and rate: a curve per seed


def read_races(paths: Sequence[Path]) -> tuple[dict[str, Curves], float]:
    """Return the curves of each size, and the accuracy of the best bigram.

    Raises UserError if the races were scored by different measures.
    """
    sizes: dict[str, Curves] = {}
    bigram = 0.0
    measures = set()
    for path in paths:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        measures.add(next((one["evaluation"] for one in records if "evaluation" in one), None))
        if len(measures) > 1:
            reason = "was scored by a different measure from the earlier races"
            raise UserError("data.mixed", path, reason, "Draw them separately")
        bigram = guesses_of(records)["bigram_accuracy"]
        for (size, side, rate, _), curve in curves_of(records).items():
            sizes.setdefault(size, {}).setdefault(f"{side}, rate {rate:.2g}", []).append(curve)
    return sizes, bigram


def draw(sizes: dict[str, Curves], bigram: float, out: Path) -> None:
    """Draw the picture into a file."""
    figure, panels = pyplot.subplots(
        1,
        len(sizes),
        figsize=(1.0 + 3.0 * len(sizes), 3.2),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, (size, curves) in zip(panels[0], sorted(sizes.items()), strict=True):
        _panel(axes, size, curves, bigram)
    panels[0][0].set_ylabel("masked-LM accuracy, held-out text")
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def _panel(axes: Axes, size: str, curves: Curves, bigram: float) -> None:
    for name, of_seeds in curves.items():
        # A run may lack its last point.
        points = [list(filter(None, column)) for column in zip_longest(*of_seeds)]
        minutes = [
            statistics.median([point["seconds"] for point in column]) / 60 for column in points
        ]
        values = [sorted(point["accuracy"] for point in column) for column in points]
        (line,) = axes.plot(minutes, [statistics.median(found) for found in values], label=name)
        low = [found[0] for found in values]
        high = [found[-1] for found in values]
        axes.fill_between(minutes, low, high, color=line.get_color(), alpha=0.25)
    seeds = max(map(len, curves.values()))
    axes.axhline(bigram, color="gray", linestyle="--", linewidth=1, label="best bigram")
    noun = "seeds" if seeds > 1 else "seed"
    title = f"{size} (layers x hidden size), {seeds} {noun}"
    axes.set(title=title, xlabel="CPU minutes on one core", xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="x-small")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Draw the results of races.")
    parser.add_argument(
        "races", nargs="+", type=Path, metavar="RACE.jsonl", help="written by race.py --json"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    given = parser.parse_args()
    draw(*read_races(given.races), given.out)


if __name__ == "__main__":
    main()
