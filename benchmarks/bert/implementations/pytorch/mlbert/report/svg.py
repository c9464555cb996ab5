"""Draw figures as inline SVG with matplotlib; the page's style sheet provides colours and fonts.

Colours are placeholders that become CSS variables, so that one figure works in light and dark mode. Text stays text.
This module also defines the styles, legends and axes shared by all figures, and formats numbers and names.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from mlbert.report.results import FASTEST, MISSED, SLOWEST, Result
from mlbert.report.runs import ReportedRun

SERIES = 8  # line colours in the style sheet
# Variables of templates/style.css in the order of their placeholders.
_VARIABLES = ("ink", "muted", "grid", "warn", "band", "card", *(f"s{index}" for index in range(SERIES)))
_POINTS_PER_INCH = 72
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.8,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "figure.constrained_layout.use": True,
    "path.simplify": False,
}


def colour(variable: str) -> str:
    """Return the placeholder of a CSS variable."""
    return f"#0000{_VARIABLES.index(variable) + 1:02x}"


def series(index: int) -> str:
    """Return the CSS variable of a line's colour; colours repeat after `SERIES`."""
    return f"s{index % SERIES}"


def draw(name: str, title: str, description: str, size: tuple[float, float], paint: Callable[[Axes], None]) -> str:
    """Draw one figure as an ``<svg>`` element.

    Args:
        name: unique on the page; prefix of all ids.
        title: read first by screen readers.
        description: one sentence about the figure.
        size: width and height in the units of the page's text.
        paint: draws on the axes.
    """
    colours: dict[Any, Any] = {
        **dict.fromkeys(("text.color", "axes.labelcolor"), colour("ink")),
        **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), colour("muted")),
        **dict.fromkeys(("axes.edgecolor", "grid.color"), colour("grid")),
    }
    with matplotlib.rc_context({**_SETTINGS, **colours, "svg.hashsalt": name}), warnings.catch_warnings():
        # The page's font has glyphs that matplotlib's lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = Figure(figsize=(size[0] / _POINTS_PER_INCH, size[1] / _POINTS_PER_INCH))
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.margins(x=0.02)
        paint(axes)
        target = io.StringIO()
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(target.getvalue(), name, title, description)


def _inline(text: str, name: str, title: str, description: str) -> str:
    """Return the bare element: no prolog, metadata or size; ids unique on the page; CSS variables for colours."""
    box = re.search(r'viewBox="[^"]*"', text)
    start, end = text.index(">", text.index("<svg")) + 1, text.rindex("</svg>")
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", text[start:end], flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*">', "<g>", body)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)
    body = re.sub(r"#0000([01][0-9a-f])\b", _variable, body)
    body = re.sub(r"font: ([\d.]+)px[^;\"]*", r"font-size: \1px", body)
    body = re.sub(r"\n\s*", "\n", body)
    head = f'<svg class="plot" role="img" {box[0] if box else ""} aria-labelledby="{name}-t {name}-d">'
    words = f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(description)}</desc>'
    return f"{head}{words}{body}</svg>"


def _variable(match: re.Match[str]) -> str:
    index = int(match[1], 16) - 1
    return f"var(--{_VARIABLES[index]})" if 0 <= index < len(_VARIABLES) else match[0]


WIDTH, HEIGHT = 460.0, 300.0  # of a figure, in the units of the page's text
MOST_ROWS = 24  # rows with labels
DASHED, DOTTED = (0, (4, 3)), (0, (1, 2))
_DASHES = ("-", (0, (5, 2)), DOTTED)  # a repeated colour gets the next one
_ROW = 24.0
_AXIS_SPACE, _LEAST_HEIGHT = 64.0, 180.0
LOG_FROM = 12  # ratio of largest to smallest value above which an axis is logarithmic


@dataclass(frozen=True)
class Key:
    """One entry of a legend."""

    kind: str  # line, dashed, dotted, dot, tick, box, band or bar
    variable: str  # colour
    words: str


@dataclass(frozen=True)
class Chart:
    """One figure with its title, legend and note."""

    title: str
    svg: str
    legend: Sequence[Key]
    note: str = ""


@dataclass(frozen=True)
class Style:
    """Style of a run's line or bar."""

    variable: str
    dashes: object = "-"

    @property
    def colour(self) -> str:
        """The colour for matplotlib."""
        return colour(self.variable)


def height_of_rows(rows: int) -> float:
    """Return the height of a figure with this many bars or strips."""
    return max(min(rows, MOST_ROWS) * _ROW + _AXIS_SPACE, _LEAST_HEIGHT)


def styled(results: Sequence[Result]) -> Iterator[tuple[Result, ReportedRun, Style]]:
    """Yield all runs with their style: by system, or for a single system by whether the run counts."""
    for index, result in enumerate(results):
        for run in result.runs:
            yield result, run, style_of_mark(result, run) if len(results) == 1 else style_of_system(index)


def style_of_system(index: int) -> Style:
    """Return the colour of a system, with dashes once colours repeat."""
    return Style(series(index), _DASHES[index // SERIES % len(_DASHES)])


def style_of_mark(result: Result, run: ReportedRun) -> Style:
    """Return the style of a run within one system: counted, excluded from the mean, or missed the target."""
    return Style({None: "s0", MISSED: "warn"}.get(result.marks.get(run.name), "muted"))


def keys_of(results: Sequence[Result], kind: str = "line") -> list[Key]:
    """Return the legend for `styled`."""
    if len(results) > 1:
        names = [(style_of_system(index), result.system.name) for index, result in enumerate(results)]
        return [Key(kind if style.dashes == "-" else "dashed", style.variable, name) for style, name in names]
    marks = set(results[0].marks.values())
    keys = [Key(kind, "s0", "counted" if {FASTEST, SLOWEST} & marks else "reached the target")]
    keys += [Key(kind, "muted", "fastest and slowest: not counted")] if {FASTEST, SLOWEST} <= marks else []
    keys += [Key(kind, "muted", FASTEST)] if FASTEST in marks and SLOWEST not in marks else []
    return keys + ([Key(kind, "warn", MISSED)] if MISSED in marks else [])


def reference_keys(result: Result | None) -> list[Key]:
    """Return the legend of a reference convergence point; without numbers if there are several."""
    point = result.reference if result else None
    mean = f": {point.mean_samples:,.0f} ± {point.stdev_samples:,.0f} samples" if point else ""
    least = f": {point.min_mean_samples:,.0f}" if point else ""
    batch = f" at batch {point.global_batch_size}" if point else ""
    return [
        Key("band", "band", f"reference{batch}, mean ± standard deviation{mean}"),
        Key("dotted", "muted", f"smallest mean that the rules accept{least}"),
    ]


def logarithmic(axes: Axes, axis: str, values: Sequence[float]) -> None:
    """Make an axis ("x" or "y") logarithmic if the values differ by more than a factor of 12."""
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
    """Return a locator with at most six ticks, at round numbers."""
    return MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])


def in_thousands(axes: Axes, axis: str) -> None:
    """Use labels such as 150k and 2.5M."""
    target = axes.xaxis if axis == "x" else axes.yaxis
    target.set_major_formatter(EngFormatter(sep=""))


def label_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Order bars from the top down and label them if there is room."""
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    if len(labels) <= MOST_ROWS:
        axes.set_yticks(range(len(labels)), labels)
    else:
        axes.set_ylabel(f"{len(labels)} runs")


MINUTE, HOUR = 60.0, 3600.0
_LONGEST_NAME = 26


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the seconds in the unit that suits an axis up to this many seconds, and the unit's name."""
    if seconds < 3 * MINUTE:
        return 1.0, "seconds"
    return (MINUTE, "minutes") if seconds < 3 * HOUR else (HOUR, "hours")


def duration(seconds: float | None) -> str:
    """Format a time: 84.21 s, 5 min 0.5 s, 6 h 6 min."""
    if seconds is None or math.isinf(seconds):
        return "-"
    if round(seconds, 2) < MINUTE:
        return f"{seconds:.2f} s"
    if round(seconds, 1) < HOUR:
        minutes, rest = divmod(round(seconds, 1), MINUTE)
        return f"{minutes:.0f} min {rest:.1f} s"
    hours, minutes = divmod(round(seconds / MINUTE), 60)
    return f"{hours:,d} h {minutes} min"


def count(value: float | None, digits: int = 0) -> str:
    """Format a number with thousands separators; a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def speed(value: float | None) -> str:
    """Format samples per second, with one decimal for small numbers."""
    return count(value, 1 if value is not None and value < 1000 else 0)


def percent(value: float) -> str:
    """Format a fraction as a percentage."""
    return f"{100 * value:.1f} %"


def shorten(name: str, longest: int = _LONGEST_NAME) -> str:
    """Shorten a name to fit next to a figure: cut its middle, replace control characters."""
    name = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
    if len(name) <= longest:
        return name
    head = longest // 2
    return f"{name[:head]}…{name[-(longest - head - 1) :]}"
