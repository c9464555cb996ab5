"""Figures of a report: bars or strips per run or system, and curves over the course of the runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from mlaudit.planner.cost import Estimate
from mlaudit.report.results import FASTEST, SLOWEST, Result
from mlaudit.report.runs import Points, ReportedRun, finite, thin
from mlaudit.report.svg import (
    COLORS,
    PATTERNS,
    SERIES,
    Chart,
    draw,
    in_thousands,
    label_rows,
    logarithmic,
)
from mlaudit.report.tables import ReportTable
from mlaudit.rules import BENCHMARK, ReferencePoint
from mlbert.host.texts import counted

_MINUTE = 60.0
_HOUR = 3600.0
_LONGEST_NAME = 26
_LEAST_SHARE = 0.01  # of the time; smaller parts are not visible
_BAR = 0.68  # height relative to the row distance
# Attribute of a run's times, color, pattern (in `PATTERNS`) and words. Neighbors differ in their
# patterns, too, not in color alone.
_PARTS = (
    ("untimed", "grid", "", "before run_start, not timed"),
    ("start", "s3", "dots", "run_start to the first step"),
    ("training", "s0", "", "training"),
    ("evaluation", "s1", "stripes", "evaluation"),
    ("other", "s2", "cross", "other: between steps"),
)
_MOST_POINTS = 20_000  # in one figure
_LEAST_POINTS = 4  # per curve
_MOST_MARKED = 80  # points of a curve with a mark at each
_MOST_TARGETS = 3
# Lines of systems next to each other differ in these, too, not in color alone.
_DASHES = ("-", "--", ":", "-.")
_MOST_FOUND = 3  # systems in the sentence about a figure; of more, the lowest and the highest
_MOST_ROWS = 100  # of a figure's table of points
# Distance below the target, relative to the lowest accuracy: of the median, and to show.
_CROWDED = 0.15
_SHOWN = 0.2


class Curve(NamedTuple):
    """The course of one run."""

    variable: str  # color
    words: str  # in the legend
    points: Points
    dashes: str = "-"
    name: str = ""  # in the table of points, if not that of the legend


class _Look(NamedTuple):
    """How a run within one system is drawn."""

    color: str  # in `COLORS`
    words: str  # in the legend
    dashes: str  # of its curve
    pattern: str  # of its bar, in `PATTERNS`


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the seconds in the unit that suits an axis up to this many seconds,
    and the unit's name.
    """
    if seconds < 3 * _MINUTE:
        return 1.0, "seconds"
    return (_MINUTE, "minutes") if seconds < 3 * _HOUR else (_HOUR, "hours")


def shorten(name: str, longest: int = _LONGEST_NAME) -> str:
    """Shorten a name to fit next to a figure: cut its middle, replace control characters."""
    name = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name
    )
    if len(name) <= longest:
        return name
    head = longest // 2
    return f"{name[:head]}…{name[-(longest - head - 1) :]}"


def times_to_train(results: Sequence[Result]) -> Chart | None:
    """Draw one bar per run for a single system, or one strip per system."""
    if len(results) == 1:
        return _times_of_runs(results[0])
    seconds = [finite(run.score for run in result.runs) for result in results]
    means = [result.olympic_seconds for result in results]
    scale, unit = time_unit(statistics.median([value for row in seconds for value in row] or [0.0]))
    strips = [[value / scale for value in row] for row in seconds]
    means = [None if mean is None else mean / scale for mean in means]
    return _strips("Time to train", results, strips, means, unit, "a run that reached the target")


def _times_of_runs(result: Result) -> Chart | None:
    runs = [(run, run.seconds) for run in result.runs if run.seconds is not None]
    if len(runs) < 2:  # the headline has the time of a single run
        return None
    scale, unit = time_unit(max(seconds for _, seconds in runs))
    values = [seconds / scale for _, seconds in runs]
    digits = 3 if max(values) < 10 else 1
    points = ReportTable(
        ["run", unit],
        [[run.name, f"{value:.{digits}f}"] for (run, _), value in zip(runs, values, strict=True)],
    )

    def paint(axes: Axes) -> None:
        looks = [_look(result, run) for run, _ in runs]
        axes.barh(
            range(len(runs)),
            values,
            facecolor=[COLORS[look.color] for look in looks],
            edgecolor=COLORS["paper"],
            linewidth=0,
            hatch=[PATTERNS[look.pattern] for look in looks],
            height=_BAR,
            label=[look.words for look in looks],
        )
        names = [shorten(f"run {run.name}", 16) for run, _ in runs]
        label_rows(
            axes, [f"{name}: {value:.{digits}f}" for name, value in zip(names, values, strict=True)]
        )
        mean = result.olympic_seconds
        if mean is not None and math.isfinite(mean):
            _level(
                axes.axvline,
                mean / scale,
                f"olympic mean {mean / scale:.4g} {unit}",
                is_target=True,
            )
        axes.set_xlabel(unit)

    finding = f"{len(runs)} runs take {_range(values)} {unit}"
    return draw("Time to train of each run", paint, finding, points, len(runs))


def samples_to_target(results: Sequence[Result]) -> Chart | None:
    """Draw the samples to the target: one strip per system, with its reference."""
    values = [finite(run.samples_to_target for run in result.runs) for result in results]

    def decorate(axes: Axes) -> None:
        in_thousands(axes, "x")
        for row, (result, numbers) in enumerate(zip(results, values, strict=True)):
            if result.reference is not None:
                ends = (1 - (row + end) / len(results) for end in (0.9, 0.1))
                _paint_reference(axes, result.reference, len(results) == 1, *ends)
            if len(numbers) >= 4:
                low, _, high = statistics.quantiles(numbers, n=4, method="inclusive")
                look: dict[str, Any] = {
                    "fill": False,
                    "edgecolor": COLORS["ink"],
                    "linewidth": 1.0,
                }
                axes.barh(row, high - low, 0.6, low, label="middle half of the runs", **look)

    means = [result.mean_samples for result in results]
    words = "samples to the target accuracy"
    return _strips(
        "Samples to the target, over seeds", results, values, means, words, "a run", decorate
    )


def _strips(
    title: str,
    results: Sequence[Result],
    values: Sequence[Sequence[float]],
    means: Sequence[float | None],
    x_label: str,
    words: str,
    decorate: Callable[[Axes], None] = lambda axes: None,
) -> Chart | None:
    """Draw a row of dots per system, with its olympic mean; None for less than two dots."""
    if sum(map(len, values)) < 2:
        return None

    def paint(axes: Axes) -> None:
        logarithmic(axes, "x", [value for numbers in values for value in numbers])
        for row, (numbers, mean) in enumerate(zip(values, means, strict=True)):
            heights = [row + (index % 5 - 2) * 0.09 for index in range(len(numbers))]
            look: dict[str, Any] = {
                "linestyle": "",
                "markeredgewidth": 0,
                "alpha": 0.8,
                "label": "_" if row else words,
            }
            axes.plot(
                numbers,
                heights,
                marker="o",
                markersize=5,
                color=COLORS[f"s{row % SERIES}"],
                **look,
            )
            if mean is not None and math.isfinite(mean):
                look = {"linestyle": "", "color": COLORS["ink"], "label": "olympic mean"}
                axes.plot(mean, row, marker="|", markersize=20, markeredgewidth=2, **look)
        label_rows(
            axes, [shorten(result.system.name) if len(results) > 1 else "" for result in results]
        )
        axes.margins(x=0.05)
        axes.set_xlabel(x_label)
        decorate(axes)

    names = [result.system.name for result in results]
    drawn = [(name, numbers) for name, numbers in zip(names, values, strict=True) if numbers]
    if len(drawn) > _MOST_FOUND:
        drawn.sort(key=lambda one: statistics.median(one[1]))
        drawn = [drawn[0], drawn[-1]]
    findings = [
        f"{name}: {_range(numbers)}" if len(names) > 1 else _range(numbers)
        for name, numbers in drawn
    ]
    rows = [
        [name, _shown(number)]
        for name, numbers in zip(names, values, strict=True)
        for number in numbers
    ]
    points = _table(["system", x_label], rows)
    return draw(title, paint, f"{'; '.join(findings)} {x_label}", points, len(results))


def where_time_went(results: Sequence[Result]) -> Chart | None:
    """Draw stacked bars: per run, or per system in percent."""
    times = [
        [(run.name, run.times) for run in result.runs if run.times is not None]
        for result in results
    ]
    parts = [
        [[getattr(part, name) or 0.0 for name, *_ in _PARTS] for _, part in runs] for runs in times
    ]
    if not any(parts):
        return None
    if len(results) > 1:
        labels = [
            shorten(result.system.name) for result, rows in zip(results, parts, strict=True) if rows
        ]
        widths = np.array([np.sum(rows, axis=0) for rows in parts if rows])
        widths[:, 0] = 0
        scale = np.maximum(widths.sum(1, keepdims=True), 1e-9) / 100
        unit = "% of the time to train"
    else:
        labels = [shorten(f"run {name}", 16) for name, _ in times[0]]
        widths = np.array(parts[0])
        scale, unit = time_unit(widths[:, 1:].sum(1).max())
        unit += " since run_start"

    def paint(axes: Axes) -> None:
        is_visible = (widths > _LEAST_SHARE * widths[:, 1:].sum(1, keepdims=True)).any(0)
        lefts = (widths.cumsum(1) - widths - widths[:, :1]) / scale
        for index, (_, variable, pattern, words) in enumerate(_PARTS):
            axes.barh(
                range(len(labels)),
                (widths / scale)[:, index],
                height=_BAR,
                left=lefts[:, index],
                facecolor=COLORS[variable],
                edgecolor=COLORS["paper"],
                linewidth=0,
                hatch=PATTERNS[pattern],
                label=words if is_visible[index] else "_",
            )
        label_rows(axes, labels)
        axes.set_xlabel(unit)

    shares = widths[:, 1:].sum(0) / max(widths[:, 1:].sum(), 1e-9)
    words = [part[-1] for part in _PARTS[1:]]
    finding = ", ".join(
        f"{name} {100 * share:.0f} %"
        for name, share in zip(words, shares, strict=True)
        if share > _LEAST_SHARE
    )
    finding = finding[:1].upper() + finding[1:]
    rows = [[label, *map(_shown, row)] for label, row in zip(labels, (widths / scale), strict=True)]
    points = _table(["", *(f"{part[-1]}, {unit}" for part in _PARTS)], rows)
    note = _note_on_times(results)
    return draw("Where the time went", paint, finding, points, len(labels), note)


def _note_on_times(results: Sequence[Result]) -> str:
    """Return a note on parts that the logs do not separate."""
    times = [run.times for result in results for run in result.runs if run.times is not None]
    if any(time.evaluation is None for time in times):
        return "If a log does not record when evaluations start, they are counted as training."
    if any(time.other is None for time in times):
        return (
            "Pauses between steps, for data or checkpoints, are counted as training: "
            "logs do not separate them."
        )
    return ""


def accuracy(results: Sequence[Result], over: str) -> Chart | None:
    """Draw the accuracy of all runs over ``samples`` or ``seconds``, with target and reference."""

    def points(_: Result, run: ReportedRun) -> Points:
        pairs = ((getattr(one, over), one.accuracy) for one in run.evaluations)
        return [(at, value) for at, value in pairs if at is not None]

    curves = _curves(results, points)
    values = [value for curve in curves for _, value in curve.points]
    targets = sorted({result.target for result in results if result.target is not None})[
        :_MOST_TARGETS
    ]
    lone = results[0] if len(results) == 1 else None
    is_bert = all(result.benchmark == BENCHMARK for result in results)
    bottom = _near_target(values, targets) if over == "samples" and is_bert else None

    def decorate(axes: Axes) -> None:
        for value in targets:
            _level(axes.axhline, value, f"target {value:.4g}", is_target=True)
        if lone is not None:
            paint_levels(
                axes,
                {name.replace("_", " "): value for name, value in lone.system.baselines.items()},
            )
        if lone is not None and lone.reference is not None and over == "samples":
            _paint_reference(axes, lone.reference)
        axes.set_ylim(bottom=bottom)

    what = "Accuracy" if is_bert else "Quality"
    axis = "samples" if over == "samples" else "time"
    where = "" if bottom is None else ", near the target"
    finding = _reached(results[0], over) if lone is not None else ""
    return curve_chart(f"{what} over {axis}{where}", curves, over, decorate, finding=finding)


def _reached(result: Result, over: str) -> str:
    """Return how many runs of a system reached the target, and after how many samples or how much
    time; an empty text if it is unknown.
    """
    reached = [run for run in result.runs if run.samples_to_target is not None]
    if result.target is None or not reached:
        return ""
    words = f"{len(reached)} of {len(result.runs)} runs reach the target {result.target:.4g}"
    if over == "samples":
        return f"{words}, after {_range(finite(run.samples_to_target for run in reached))} samples"
    seconds = finite(run.seconds for run in reached)
    if not seconds:
        return words
    scale, unit = time_unit(max(seconds))
    return f"{words}, after {_range([value / scale for value in seconds])} {unit}"


def _near_target(values: Sequence[float], targets: Sequence[float]) -> float | None:
    """Return the lower end of the accuracy axis if most evaluations are close to the target,
    else None.
    """
    if not values or not targets or min(values) >= targets[0]:
        return None
    height = targets[0] - min(values)
    return (
        None
        if statistics.median(values) < targets[0] - _CROWDED * height
        else targets[0] - _SHOWN * height
    )


def metric(results: Sequence[Result], name: str, title: str) -> Chart | None:
    """Draw a quantity of metrics.jsonl; None if no run has it."""
    return curve_chart(title, _curves(results, lambda _, run: run.metric(name)), "samples")


def speeds(results: Sequence[Result]) -> Chart | None:
    """Draw the samples per second between evaluations."""
    is_shared = len(results) > 1 and all(result.accelerators for result in results)

    def points(result: Result, run: ReportedRun) -> Points:
        return [
            (at, speed / ((is_shared and result.accelerators) or 1)) for at, speed in run.speeds
        ]

    curves = _curves(results, points)

    def decorate(axes: Axes) -> None:
        logarithmic(axes, "y", [speed for curve in curves for _, speed in curve.points])
        in_thousands(axes, "y")

    title = f"Samples per second{' and accelerator' if is_shared else ''} between evaluations"
    mixed = [
        r.system.name
        for r in results
        if any(run.times and run.times.evaluation is None for run in r.runs)
    ]
    note = (
        f"Includes evaluations, because the logs do not time them: {', '.join(mixed)}."
        if mixed
        else ""
    )
    return curve_chart(title, curves, "samples", decorate, note)


def curve_chart(
    title: str,
    curves: Sequence[Curve],
    over: str,
    decorate: Callable[[Axes], None] = lambda axes: None,
    note: str = "",
    finding: str = "",
) -> Chart | None:
    """Draw curves over ``samples`` or ``seconds``, thinned if there are too many points for a page;
    None for less than two points.

    Args:
        decorate: draws on the axes after the curves.
        finding: what the curves show; by default where they begin and end.
    """
    if sum(len(curve.points) for curve in curves) < 2:
        return None
    ends = [curve.points[-1][0] for curve in curves if curve.points]
    most = max(_MOST_POINTS // len(curves), _LEAST_POINTS)
    scale, unit = (1.0, "") if over == "samples" else time_unit(statistics.median_high(ends))

    def paint(axes: Axes) -> None:
        logarithmic(axes, "x", [end / scale for end in ends])
        for variable, words, points, dashes, _ in curves:
            x, y = zip(*thin(points, most), strict=True) if points else ((), ())
            look: dict[str, Any] = {
                "color": COLORS[variable],
                "linestyle": dashes,
                "linewidth": 1.3,
                "alpha": 0.85,
            }
            look |= {
                "marker": "." if len(points) < _MOST_MARKED else "",
                "markersize": 4,
                "markeredgewidth": 0,
            }
            # matplotlib leaves labels that begin with an underscore out of the legend.
            axes.plot([value / scale for value in x], y, label=f" {words}", **look)
        axes.set_xlabel("samples trained on" if over == "samples" else f"{unit} since run_start")
        if over == "samples":
            in_thousands(axes, "x")
        decorate(axes)

    shown = max(_MOST_ROWS // len(curves), 2)
    rows = [
        [curve.name or curve.words, _shown(x / scale), f"{y:.4g}"]
        for curve in curves
        for x, y in thin(curve.points, shown)
    ]
    points = _table(["", unit or "samples", title], rows)
    return draw(title, paint, finding or _course(curves), points, note=note)


def _course(curves: Sequence[Curve]) -> str:
    """Return where the curves begin and end."""
    drawn = [curve.points for curve in curves if curve.points]
    first = _range([points[0][1] for points in drawn])
    last = _range([points[-1][1] for points in drawn])
    plural = f" ({len(drawn)} curves)" if len(drawn) > 1 else ""
    return f"At the beginning {first}, at the end {last}{plural}"


def _range(values: Sequence[float]) -> str:
    """Return one value, or the smallest and the largest."""
    least = _shown(min(values))
    most = _shown(max(values))
    return least if least == most else f"{least} to {most}"


def _shown(value: float) -> str:
    """Return a number of a sentence or table: three digits, and thousands with separators."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> ReportTable:
    """Return the table of a figure's points, with at most `_MOST_ROWS` rows."""
    if len(rows) > _MOST_ROWS:
        last = len(rows) - 1
        rows = [rows[round(index * last / (_MOST_ROWS - 1))] for index in range(_MOST_ROWS)]
    return ReportTable(columns, rows)


def paint_levels(axes: Axes, levels: Mapping[str, float]) -> None:
    """Draw the accuracies of simple predictors."""
    for name, value in levels.items():
        _level(axes.axhline, value, f"{name} {value:.3f}")


def sweep(found: Sequence[Estimate]) -> Chart:
    """Draw a plan's time to train over GPUs with its band, and perfect scaling for comparison."""
    gpus = [estimate.job.gpus for estimate in found]
    minutes = [estimate.seconds / _MINUTE for estimate in found]
    low, high = ([estimate.score_band[end] / _MINUTE for estimate in found] for end in (0, 1))
    perfect = [minutes[0] * gpus[0] / count for count in gpus]

    def paint(axes: Axes) -> None:
        logarithmic(axes, "x", gpus)
        logarithmic(axes, "y", minutes)
        axes.fill_between(
            gpus, low, high, color=COLORS["s0"], alpha=0.2, linewidth=0, label="90 % of scores"
        )
        axes.plot(
            gpus, minutes, marker="o", markersize=4, color=COLORS["s0"], label="time to train"
        )
        axes.plot(
            gpus,
            perfect,
            linestyle="--",
            linewidth=0.8,
            color=COLORS["ink"],
            label="perfect scaling",
        )
        axes.set(xlabel=f"{found[0].job.label} GPUs", ylabel="minutes")

    first, last = (f"{_shown(time)} minutes" for time in (minutes[0], minutes[-1]))
    finding = f"{first} on {counted(gpus[0], 'GPU')}, {last} on {gpus[-1]:,}"
    rows = [
        [f"{count:,}", *map(_shown, numbers)]
        for count, *numbers in zip(gpus, minutes, low, high, strict=True)
    ]
    points = _table(["GPUs", "minutes", "90 % of scores from", "to"], rows)
    return draw("Time to train", paint, finding, points)


def _curves(
    results: Sequence[Result], points: Callable[[Result, ReportedRun], Points]
) -> list[Curve]:
    """Return a curve per run, colored by system.

    Those of a single system are colored by whether the run counts.
    """
    if len(results) == 1:
        lone = results[0]
        looks = [(run, _look(lone, run)) for run in lone.runs]
        return [
            Curve(look.color, look.words, points(lone, run), look.dashes, f"run {run.name}")
            for run, look in looks
        ]
    return [
        Curve(
            f"s{index % SERIES}",
            result.system.name,
            points(result, run),
            _DASHES[index % len(_DASHES)],
            f"{result.system.name}, run {run.name}",
        )
        for index, result in enumerate(results)
        for run in result.runs
    ]


def _look(result: Result, run: ReportedRun) -> _Look:
    """Return how a run within one system is drawn: counted, not in the mean, or not successful."""
    mark = result.marks.get(run.name)
    if mark is None:
        words = "counted" if FASTEST in result.marks.values() else "reached the target"
        return _Look("s0", words, "-", "")
    if mark in (FASTEST, SLOWEST):
        return _Look("muted", "fastest or slowest: not counted", "--", "stripes")
    return _Look("warn", mark, ":", "cross")


def _level(
    line: Callable[..., object], value: float, words: str, *, is_target: bool = False
) -> None:
    """Draw a line across the figure with ``axhline`` or ``axvline``: dashed for a target,
    dotted for others.
    """
    color, dashes, width = ("ink", "--", 1.1) if is_target else ("muted", ":", 1.2)
    line(value, color=COLORS[color], linestyle=dashes, linewidth=width, label=words)


def _paint_reference(
    axes: Axes,
    point: ReferencePoint,
    has_numbers: bool = True,
    bottom: float = 0.0,
    top: float = 1.0,
) -> None:
    """Draw a reference convergence point over part of the figure's height;
    without numbers if there are several.
    """
    low, high = (point.mean_samples + sign * point.stdev_samples for sign in (-1, 1))
    batch = ""
    mean = ""
    least = ""
    if has_numbers:
        batch = f" at batch {point.global_batch_size}"
        least = f": {point.min_mean_samples:,.0f}"
        mean = f": {point.mean_samples:,.0f} ± {point.stdev_samples:,.0f} samples"
    words = f"reference{batch}, mean ± standard deviation{mean}"
    axes.axvspan(low, high, bottom, top, color=COLORS["band"], alpha=0.4, linewidth=0, label=words)
    look: dict[str, Any] = {"color": COLORS["muted"], "linestyle": ":", "linewidth": 1.2}
    axes.axvline(
        point.min_mean_samples,
        bottom,
        top,
        label=f"smallest mean that the rules accept{least}",
        **look,
    )
