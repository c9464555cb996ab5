"""Draw races: a panel for each size; for each side and rate a line through the median, and the range of its seeds.

    python tools/race_picture.py RACE.jsonl... --out race.png

The files are those that `race.py --json` writes. A dashed line is the accuracy of the best bigram.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

# By side and rate, point of the curve, and quantity; a value per seed.
Curves = dict[str, dict[int, dict[str, list[float]]]]


def read_races(paths: Sequence[Path]) -> tuple[dict[str, Curves], float]:
    """Return the curves of each size, and the accuracy of the best bigram."""
    sizes: dict[str, Curves] = {}
    bigram = 0.0
    for path in paths:
        numbers: dict[tuple[str, float, int], int] = {}
        for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if "guesses" in record:
                bigram = record["guesses"]["bigram_accuracy"]
            elif "accuracy" in record:
                run = record["side"], record["learning_rate"], record["seed"]
                numbers[run] = numbers.get(run, 0) + 1
                name = f"{record['side']}, rate {record['learning_rate']:.2g}"
                points = sizes.setdefault(record["size"], {}).setdefault(name, {})
                found = points.setdefault(numbers[run], {"seconds": [], "accuracy": []})
                for key in ("seconds", "accuracy"):
                    found[key].append(record[key])
    return sizes, bigram


def draw(sizes: dict[str, Curves], bigram: float, out: Path) -> None:
    """Write the picture."""
    figure, panels = pyplot.subplots(
        1, len(sizes), figsize=(1.0 + 3.0 * len(sizes), 3.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (size, curves) in zip(panels[0], sorted(sizes.items()), strict=True):
        _panel(axes, size, curves, bigram)
    panels[0][0].set_ylabel("masked-LM accuracy, held-out text")
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def _panel(axes: Axes, size: str, curves: Curves, bigram: float) -> None:
    seeds = 1
    for name, points in curves.items():
        minutes = [statistics.median(points[number]["seconds"]) / 60 for number in sorted(points)]
        values: list[Any] = [points[number]["accuracy"] for number in sorted(points)]
        seeds = max(seeds, *map(len, values))
        (line,) = axes.plot(minutes, [statistics.median(found) for found in values], label=name)
        low, high = [min(found) for found in values], [max(found) for found in values]
        axes.fill_between(minutes, low, high, color=line.get_color(), alpha=0.25)
    axes.axhline(bigram, color="gray", linestyle="--", linewidth=1, label="best bigram")
    title = f"{size} (layers x hidden size), {seeds} seed{'s' * (seeds > 1)}"
    axes.set(title=title, xlabel="processor minutes of one core", xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="x-small")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Draw races.")
    parser.add_argument("races", nargs="+", type=Path, metavar="RACE.jsonl", help="written by race.py --json")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    given = parser.parse_args()
    draw(*read_races(given.races), given.out)


if __name__ == "__main__":
    main()
