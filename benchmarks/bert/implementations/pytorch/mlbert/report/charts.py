"""Figures of a report: bars or strips per run or system, and curves over the course of the runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from mlbert.report.results import Result
from mlbert.report.runs import Points, finite, thin
from mlbert.report.svg import (
    DASHED,
    DOTTED,
    HEIGHT,
    LOG_FROM,
    MOST_ROWS,
    WIDTH,
    Chart,
    Key,
    Style,
    colour,
    draw,
    few_ticks,
    height_of_rows,
    in_thousands,
    keys_of,
    label_rows,
    logarithmic,
    reference_keys,
    shorten,
    style_of_mark,
    style_of_system,
    styled,
    time_unit,
)

_LEAST_SHARE = 0.01  # of the time; smaller parts are not visible
_BAR = 0.68  # height relative to the row distance
_PARTS = (
    ("untimed", "grid", "before run_start, not timed"),
    ("start", "s3", "run_start to the first step"),
    ("training", "s0", "training"),
    ("evaluation", "s1", "evaluation"),
    ("other", "s2", "other: between steps"),
)


def times_to_train(results: Sequence[Result]) -> Chart | None:
    """Draw one bar per run for a single system, or one strip per system."""
    return _times_of_runs(results[0]) if len(results) == 1 else _times_of_systems(results)


def _times_of_runs(result: Result) -> Chart | None:
    runs = [(run, run.seconds) for run in result.runs if run.seconds is not None]
    if not runs:
        return None
    scale, unit = time_unit(max(seconds for _, seconds in runs))
    values = [seconds / scale for _, seconds in runs]
    mean = result.olympic_seconds
    mean = mean / scale if mean is not None and math.isfinite(mean) else None
    digits = 3 if max(values) < 10 else 1

    def paint(axes: Axes) -> None:
        colours = [style_of_mark(result, run).colour for run, _ in runs]
        axes.barh(range(len(runs)), values, color=colours, height=_BAR, linewidth=0)
        label_rows(axes, [shorten(f"run {run.name}", 16) for run, _ in runs])
        for row, value in enumerate(values if len(runs) <= MOST_ROWS else ()):  # values in a column on the right
            axes.annotate(f"{value:.{digits}f}", (1, row), xycoords=("axes fraction", "data"), ha="right", va="center")
        if mean is not None:
            axes.axvline(mean, color=colour("ink"), linewidth=1.1, linestyle=DASHED)
        axes.set_xlim(0, max([*values, 1e-6]) * 1.2)
        axes.xaxis.set_major_locator(few_ticks())
        axes.set_xlabel(unit)

    keys = keys_of([result], "bar")
    keys += [Key("dashed", "ink", f"olympic mean {mean:.4g} {unit}")] if mean is not None else []
    title = "Time to train of each run"
    description = f"{len(runs)} bars from {min(values):.4g} to {max(values):.4g} {unit}."
    return Chart(title, draw("times", title, description, (WIDTH, height_of_rows(len(runs))), paint), keys)


def _times_of_systems(results: Sequence[Result]) -> Chart | None:
    seconds = [finite(run.score for run in result.runs) for result in results]
    if not any(seconds):
        return None
    shortest, longest = (end(value for row in seconds for value in row) for end in (min, max))
    scale, unit = time_unit(longest if longest < LOG_FROM * shortest else math.sqrt(shortest * longest))
    means = [None if mean is None else mean / scale for mean in (result.olympic_seconds for result in results)]

    def paint(axes: Axes) -> None:
        _paint_strips(axes, results, [[value / scale for value in row] for row in seconds], means)
        axes.set_xlabel(unit)

    keys = [Key("dot", "s0", "a run that reached the target"), Key("tick", "ink", "olympic mean")]
    title, size = "Time to train", (WIDTH, height_of_rows(len(results)))
    return Chart(title, draw("times", title, "Times to train of every run, by system.", size, paint), keys)


def samples_to_target(results: Sequence[Result]) -> Chart | None:
    """Draw the samples to the target: one strip per system, with its reference."""
    values = [finite(run.samples_to_target for run in result.runs) for result in results]
    if not any(values):
        return None

    def paint(axes: Axes) -> None:
        for row, result in enumerate(results):
            if (point := result.reference) is not None:
                span = (point.mean_samples - point.stdev_samples, 2 * point.stdev_samples)
                axes.broken_barh([span], (row - 0.4, 0.8), color=colour("band"), alpha=0.4, linewidth=0)
                ends = (point.min_mean_samples, row - 0.4, row + 0.4)
                axes.vlines(*ends, color=colour("muted"), linewidth=1.2, linestyle=DOTTED)
        _paint_boxes(axes, values)
        _paint_strips(axes, results, values, [result.mean_samples for result in results])
        axes.set_xlabel("samples to the target accuracy")
        in_thousands(axes, "x")

    known = [result for result in results if result.reference is not None]
    keys = [Key("dot", "s0", "a run"), Key("box", "ink", "middle half of the runs"), Key("tick", "ink", "olympic mean")]
    keys += reference_keys(known[0] if len(results) == 1 else None) if known else []
    title, size = "Samples to the target, over seeds", (WIDTH, height_of_rows(len(results)))
    return Chart(title, draw("samples", title, "Spread of the samples to the target.", size, paint), keys)


def where_time_went(results: Sequence[Result]) -> Chart | None:
    """Draw stacked bars: per run, or per system in percent."""
    rows = _rows_of_times(results)
    if not rows:
        return None
    is_share = len(results) > 1
    totals = [sum(parts[1:]) for _, parts in rows]
    scale, unit = time_unit(max(totals))
    factors = [100 / max(total, 1e-9) if is_share else 1 / scale for total in totals]

    def paint(axes: Axes) -> None:
        left = [0.0] * len(rows)
        for index, (_, variable, _) in enumerate(_PARTS):
            widths = [parts[index] * factor for (_, parts), factor in zip(rows, factors, strict=True)]
            if index == 0:  # to the left of run_start
                axes.barh(
                    range(len(rows)), [-w for w in widths if not is_share] or 0, color=colour(variable), height=_BAR
                )
                continue
            axes.barh(range(len(rows)), widths, left=left, color=colour(variable), height=_BAR, linewidth=0)
            left = [before + width for before, width in zip(left, widths, strict=True)]
        label_rows(axes, [name for name, _ in rows])
        axes.xaxis.set_major_locator(few_ticks())
        axes.set_xlabel("% of the time to train" if is_share else f"{unit} since run_start")

    present = [
        any(parts[index] > _LEAST_SHARE * total for (_, parts), total in zip(rows, totals, strict=True))
        for index in range(len(_PARTS))
    ]
    present[0] &= not is_share
    keys = [
        Key("bar", variable, words) for (_, variable, words), is_there in zip(_PARTS, present, strict=True) if is_there
    ]
    title, size = "Where the time went", (WIDTH, height_of_rows(len(rows)))
    description = f"Bars of {', '.join(key.words for key in keys)}."
    return Chart(title, draw("where", title, description, size, paint), keys, _note_on_times(results))


def _rows_of_times(results: Sequence[Result]) -> list[tuple[str, list[float]]]:
    """Return (label, seconds of each part) per run, or per system summed over its runs."""
    rows = []
    for result in results:
        parts = [
            (run.name, [getattr(run.times, name) or 0.0 for name, _, _ in _PARTS])
            for run in result.runs
            if run.times is not None
        ]
        if len(results) == 1:
            rows = [(shorten(f"run {name}", 16), values) for name, values in parts]
        elif parts:
            sums = [math.fsum(column) for column in zip(*(values for _, values in parts), strict=True)]
            rows.append((shorten(result.system.name), sums))
    return rows


def _note_on_times(results: Sequence[Result]) -> str:
    """Return a note on parts that the logs do not separate."""
    times = [run.times for result in results for run in result.runs if run.times is not None]
    if all(time.evaluation is None for time in times):
        return "These logs do not record when evaluations start: they are counted as training."
    if any(time.evaluation is None for time in times):
        return "Some logs do not record when evaluations start: there they are counted as training."
    if any(time.other is None for time in times):
        return "Pauses between steps, for data or checkpoints, are counted as training: logs do not separate them."
    return ""


def _paint_boxes(axes: Axes, values: Sequence[Sequence[float]]) -> None:
    """Draw the interquartile range of each row."""
    for row, numbers in enumerate(values):
        if len(numbers) >= 4:
            low, _, high = statistics.quantiles(numbers, n=4, method="inclusive")
            look: dict[str, Any] = {"fill": False, "edgecolor": colour("ink"), "linewidth": 1.0}
            axes.add_patch(Rectangle((low, row - 0.3), high - low, 0.6, **look))


def _paint_strips(
    axes: Axes, results: Sequence[Result], values: Sequence[Sequence[float]], means: Sequence[float | None]
) -> None:
    """Draw a row of dots per system, with its olympic mean."""
    for row, (numbers, mean) in enumerate(zip(values, means, strict=True)):
        heights = [row + (index % 5 - 2) * 0.09 for index in range(len(numbers))]
        shade = style_of_system(row).colour
        axes.plot(numbers, heights, linestyle="", marker="o", markersize=5, color=shade, markeredgewidth=0, alpha=0.8)
        if mean is not None and math.isfinite(mean):
            axes.vlines(mean, row - 0.38, row + 0.38, color=colour("ink"), linewidth=2)
    label_rows(axes, [shorten(result.system.name) if len(results) > 1 else "" for result in results])
    axes.margins(x=0.05)
    axes.xaxis.set_major_locator(few_ticks())
    logarithmic(axes, "x", [value for numbers in values for value in numbers])


_MOST_POINTS = 20_000  # in one figure
_LEAST_POINTS = 4  # per curve
_MOST_TARGETS = 3
_CROWDED, _SHOWN = (
    0.15,
    0.2,
)  # distance below the target, relative to the lowest accuracy: of the median, and to show
_Curves = Sequence[tuple[Style, Points]]


def accuracy(results: Sequence[Result], over: str) -> Chart | None:
    """Draw the accuracy of all runs over ``samples`` or ``seconds``, with target and reference."""
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
    """Return the lower end of the accuracy axis if most evaluations are close to the target, else None."""
    values = [value for _, points in curves for _, value in points]
    low, middle = min(values), statistics.median(values)
    if not targets or low >= targets[0] or middle < targets[0] - _CROWDED * (targets[0] - low):
        return None
    return targets[0] - _SHOWN * (targets[0] - low)


def metric(results: Sequence[Result], name: str, title: str) -> Chart | None:
    """Draw a quantity of metrics.jsonl; None if no run has it."""
    curves = [(style, run.metric(name)) for _, run, style in styled(results)]
    if not any(points for _, points in curves):
        return None
    description = f"{title} at the log points of every run."
    size = (WIDTH, HEIGHT)
    svg = draw(f"metric-{name}", title, description, size, lambda axes: _paint_curves(axes, curves, "samples", ""))
    return Chart(title, svg, keys_of(results))


def speeds(results: Sequence[Result]) -> Chart | None:
    """Draw the samples per second between evaluations."""
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

    title = f"Samples per second{' and accelerator' if is_shared else ''} between evaluations"
    mixed = [r.system.name for r in results if any(run.times and run.times.evaluation is None for run in r.runs)]
    note = f"Includes evaluations, because the logs do not time them: {', '.join(mixed)}." if mixed else ""
    description = "Speed of training over the course of every run."
    return Chart(title, draw("speed", title, description, (WIDTH, HEIGHT), paint), keys_of(results), note)


def _paint_curves(axes: Axes, curves: _Curves, over: str, marker: str = ".") -> None:
    """Draw curves and their x axis, thinned if there are too many points for a page."""
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
