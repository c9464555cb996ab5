"""Figures over the course of the runs: accuracy, loss and learning rate, speed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from mlbert.report.marks import (
    DASHED,
    DOTTED,
    HEIGHT,
    LOG_FROM,
    WIDTH,
    Chart,
    Key,
    Style,
    few_ticks,
    in_thousands,
    keys_of,
    logarithmic,
    reference_keys,
    styled,
)
from mlbert.report.results import Result
from mlbert.report.runs import Points, thin
from mlbert.report.svg import colour, draw
from mlbert.report.words import time_unit

_MOST_POINTS = 20_000  # in one figure
_LEAST_POINTS = 4  # of a curve
_MOST_TARGETS = 3
_CROWDED, _SHOWN = (
    0.15,
    0.2,
)  # of the way from the lowest accuracy to the target: where half of the evaluations lie; shown
_Curves = Sequence[tuple[Style, Points]]


def accuracy(results: Sequence[Result], over: str) -> Chart | None:
    """Accuracy at each evaluation of all runs, over ``samples`` or ``seconds``, with target and reference."""
    curves = [(style, [(getattr(e, over), e.accuracy) for e in run.evaluations]) for _, run, style in styled(results)]
    if not any(points for _, points in curves):
        return None
    targets = sorted({result.target for result in results if result.target is not None})[:_MOST_TARGETS]
    lone = results[0] if len(results) == 1 else None
    baselines = lone.system.baselines if lone else {}
    reference = lone.reference if lone and over == "samples" else None
    bottom = _near_target(curves, targets) if over == "samples" else None

    def paint(axes: Axes) -> None:
        if reference is not None:
            low, high = (reference.mean_samples + sign * reference.stdev_samples for sign in (-1, 1))
            axes.axvspan(low, high, color=colour("band"), alpha=0.4, linewidth=0)
            axes.axvline(reference.min_mean_samples, color=colour("muted"), linewidth=1.2, linestyle=DOTTED)
        for value in targets:
            axes.axhline(value, color=colour("ink"), linewidth=1.1, linestyle=DASHED)
        for value in baselines.values():
            axes.axhline(value, color=colour("muted"), linewidth=1.2, linestyle=DOTTED)
        _paint_curves(axes, curves, over)
        if bottom is not None:
            axes.set_ylim(bottom=bottom)

    keys = [*keys_of(results), *(Key("dashed", "ink", f"target {value:.4g}") for value in targets)]
    keys += [Key("dotted", "muted", f"{name.replace('_', ' ')} {value:.3f}") for name, value in baselines.items()]
    keys += reference_keys(lone) if reference is not None else []
    title = f"Accuracy over {'samples' if over == 'samples' else 'time'}{'' if bottom is None else ', near the target'}"
    description = f"{title} at each evaluation of {len(curves)} runs."
    return Chart(title, draw(f"accuracy-{over}", title, description, (WIDTH, HEIGHT), paint), keys)


def _near_target(curves: _Curves, targets: Sequence[float]) -> float | None:
    """Where the accuracy axis begins if most evaluations of the runs crowd at the target; None for the whole range."""
    values = [value for _, points in curves for _, value in points]
    low, middle = min(values), statistics.median(values)
    if not targets or low >= targets[0] or middle < targets[0] - _CROWDED * (targets[0] - low):
        return None
    return targets[0] - _SHOWN * (targets[0] - low)


def metric(results: Sequence[Result], name: str, title: str) -> Chart | None:
    """A quantity of metrics.jsonl; None where no run has it."""
    curves = [(style, run.metric(name)) for _, run, style in styled(results)]
    if not any(points for _, points in curves):
        return None
    description = f"{title} at the log points of every run."
    size = (WIDTH, HEIGHT)
    svg = draw(f"metric-{name}", title, description, size, lambda axes: _paint_curves(axes, curves, "samples", ""))
    return Chart(title, svg, keys_of(results))


def speeds(results: Sequence[Result]) -> Chart | None:
    """Samples a second of each stretch of training between evaluations."""
    counts = [result.accelerators or 0 for result in results]
    is_shared = len(results) > 1 and min(counts) > 0
    divisors = {id(result): count if is_shared else 1 for result, count in zip(results, counts, strict=True)}
    curves = [
        (style, [(at, speed / divisors[id(result)]) for at, speed in run.speeds])
        for result, run, style in styled(results)
    ]
    if not any(points for _, points in curves):
        return None

    def paint(axes: Axes) -> None:
        _paint_curves(axes, curves, "samples")
        logarithmic(axes, "y", [speed for _, points in curves for _, speed in points])
        in_thousands(axes, "y")

    title = f"Samples a second{' and accelerator' if is_shared else ''} between evaluations"
    mixed = [r.system.name for r in results if any(run.times and run.times.evaluation is None for run in r.runs)]
    note = f"With evaluations where logs do not time them: {', '.join(mixed)}." if mixed else ""
    description = "Speed of training over the course of every run."
    return Chart(title, draw("speed", title, description, (WIDTH, HEIGHT), paint), keys_of(results), note)


def _paint_curves(axes: Axes, curves: _Curves, over: str, marker: str = ".") -> None:
    """The curves with their x axis; thinned where there are too many points for a page."""
    most = max(_MOST_POINTS // len(curves), _LEAST_POINTS)
    ends = [points[-1][0] for _, points in curves if points and points[-1][0] > 0] or [1.0]
    is_wide = len({style.variable for style, _ in curves}) > 1 and max(ends) > LOG_FROM * min(ends)
    middle = math.sqrt(min(ends) * max(ends)) if is_wide else max(ends)
    scale, unit = (1.0, "") if over == "samples" else time_unit(middle)
    axes.xaxis.set_major_locator(few_ticks())
    for style, points in curves:
        x, y = [x / scale for x, _ in thin(points, most)], [y for _, y in thin(points, most)]
        mark = marker if len(points) < 80 else ""
        look: dict[str, Any] = {"color": style.colour, "linestyle": style.dashes, "linewidth": 1.3, "alpha": 0.85}
        axes.plot(x, y, marker=mark, markersize=4, markeredgewidth=0, **look)
    axes.set_xlabel("samples trained on" if over == "samples" else f"{unit} since run_start")
    if is_wide:
        logarithmic(axes, "x", [x / scale for _, points in curves for x, _ in points])
    if over == "samples":
        in_thousands(axes, "x")
