"""What all figures share: how a run is drawn, what the legend says of it, axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from mlbert.report.results import FASTEST, MISSED, SLOWEST, Result
from mlbert.report.runs import Run
from mlbert.report.svg import SERIES, colour, series

WIDTH, HEIGHT = 460.0, 300.0  # of a figure, in the units of the page's text
MOST_ROWS = 24  # that have a label each
DASHED, DOTTED = (0, (4, 3)), (0, (1, 2))
_DASHES = ("-", (0, (5, 2)), DOTTED)  # a colour that comes back has the next of them
_ROW = 24.0
_AXIS_SPACE, _LEAST_HEIGHT = 64.0, 180.0
LOG_FROM = 12  # largest value over smallest, from which on an axis is logarithmic


@dataclass(frozen=True)
class Key:
    """One entry of a legend."""

    kind: str  # line, dashed, dotted, dot, tick, box, band or bar
    variable: str  # colour
    words: str


@dataclass(frozen=True)
class Chart:
    """One figure with its words."""

    title: str
    svg: str
    legend: Sequence[Key]
    note: str = ""


@dataclass(frozen=True)
class Style:
    """How the line or bar of a run looks."""

    variable: str
    dashes: object = "-"

    @property
    def colour(self) -> str:
        """For matplotlib."""
        return colour(self.variable)


def height_of_rows(rows: int) -> float:
    """Height of a figure with so many bars or strips."""
    return max(min(rows, MOST_ROWS) * _ROW + _AXIS_SPACE, _LEAST_HEIGHT)


def styled(results: Sequence[Result]) -> Iterator[tuple[Result, Run, Style]]:
    """All runs: of several systems each has its colour, of one those that do not count are set off."""
    for index, result in enumerate(results):
        for run in result.runs:
            yield result, run, style_of_mark(result, run) if len(results) == 1 else style_of_system(index)


def style_of_system(index: int) -> Style:
    """The colour of a system, and its dashes where colours repeat."""
    return Style(series(index), _DASHES[index // SERIES % len(_DASHES)])


def style_of_mark(result: Result, run: Run) -> Style:
    """Of one system: what counts, what is left out of the mean, what missed the target."""
    return Style({None: "s0", MISSED: "warn"}.get(result.marks.get(run.name), "muted"))


def keys_of(results: Sequence[Result], kind: str = "line") -> list[Key]:
    """The legend of `styled`."""
    if len(results) > 1:
        names = [(style_of_system(index), result.system.name) for index, result in enumerate(results)]
        return [Key(kind if style.dashes == "-" else "dashed", style.variable, name) for style, name in names]
    marks = set(results[0].marks.values())
    keys = [Key(kind, "s0", "counted" if {FASTEST, SLOWEST} & marks else "reached the target")]
    keys += [Key(kind, "muted", "fastest and slowest: not counted")] if {FASTEST, SLOWEST} <= marks else []
    keys += [Key(kind, "muted", FASTEST)] if FASTEST in marks and SLOWEST not in marks else []
    return keys + ([Key(kind, "warn", MISSED)] if MISSED in marks else [])


def reference_keys(result: Result | None) -> list[Key]:
    """The legend of a reference convergence point; without numbers where several are meant."""
    point = result.reference if result else None
    mean = f": {point.mean_samples:,.0f} ± {point.stdev_samples:,.0f} samples" if point else ""
    least = f": {point.min_mean_samples:,.0f}" if point else ""
    batch = f" at batch {point.global_batch_size}" if point else ""
    return [
        Key("band", "band", f"reference{batch}, mean ± standard deviation{mean}"),
        Key("dotted", "muted", f"smallest mean that the rules accept{least}"),
    ]


def logarithmic(axes: Axes, axis: str, values: Sequence[float]) -> None:
    """A logarithmic axis ("x" or "y") where the values differ by more than a factor of 12."""
    low, high = min(values, default=1.0), max(values, default=1.0)
    if low <= 0 or high < LOG_FROM * low:
        return
    getattr(axes, f"set_{axis}scale")("log")
    target = axes.xaxis if axis == "x" else axes.yaxis
    is_narrow = high < 200 * low
    target.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if is_narrow else (1.0,), numticks=6))
    target.set_minor_locator(NullLocator())
    target.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"))


def few_ticks() -> MaxNLocator:
    """At most six, at round numbers."""
    return MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])


def in_thousands(axes: Axes, axis: str) -> None:
    """Labels such as 150k and 2.5M."""
    target = axes.xaxis if axis == "x" else axes.yaxis
    target.set_major_formatter(EngFormatter(sep=""))


def label_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Bars from the top down, each with its label where there is room."""
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    if len(labels) <= MOST_ROWS:
        axes.set_yticks(range(len(labels)), labels)
    else:
        axes.set_ylabel(f"{len(labels)} runs")
