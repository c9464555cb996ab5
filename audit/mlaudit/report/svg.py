"""Draw figures as inline SVG with matplotlib; the page's style sheet provides colors and fonts.

Colors are placeholders that become CSS variables, so that one figure works in light and dark mode.
Text stays text. The legend is HTML, because text in a figure does not wrap on a phone.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

from mlaudit.report.tables import ReportTable

SERIES = 8  # line colors in the style sheet
# Variables of templates/style.css, each with its placeholder.
COLORS = {
    name: f"#0000{index:02x}"
    for index, name in enumerate(
        ("paper", "ink", "muted", "grid", "warn", "band", *(f"s{i}" for i in range(SERIES))),
        start=1,
    )
}
# Name of a bar's pattern, also a class of its swatch in the style sheet -> matplotlib's hatch.
PATTERNS = {
    "": "",
    "dots": "...",
    "stripes": "////",
    "cross": "xxxx",
}
# Sizes of a figure, in the units of the page's text.
_WIDTH = 460.0
_HEIGHT = 300.0  # of a figure without rows
_ROW = 24.0  # height of a row
_AXIS_SPACE = 64.0  # height of the axis and its labels
_LEAST_HEIGHT = 180.0  # of a figure with rows
_POINTS_PER_INCH = 72
MOST_ROWS = 24  # rows with labels
LOG_FROM = 12  # ratio of largest to smallest value above which an axis is logarithmic
_NARROW = 200  # ratio below which a logarithmic axis has three labels per power of ten
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "grid.linewidth": 0.8,
    "hatch.linewidth": 1.2,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.dashed_pattern": (4, 3),
    "lines.dotted_pattern": (1, 2),
    "figure.constrained_layout.use": True,
    "path.simplify": False,
    **dict.fromkeys(("text.color", "axes.labelcolor"), COLORS["ink"]),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), COLORS["muted"]),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), COLORS["grid"]),
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


class Key(NamedTuple):
    """One entry of a legend."""

    kind: str  # classes of its swatch in the style sheet
    color: str  # placeholder, or CSS once it is in a `Chart`
    words: str


@dataclass(frozen=True)
class Chart:
    """One figure with its title, finding, legend, note, and a table of what it shows."""

    title: str
    svg: str
    legend: Sequence[Key]
    finding: str
    points: ReportTable
    note: str = ""


def draw(
    title: str,
    paint: Callable[[Axes], None],
    finding: str,
    points: ReportTable,
    rows: int = 0,
    note: str = "",
) -> Chart:
    """Draw one figure as an ``<svg>`` element.

    Args:
        title: unique on the page.
        paint: draws on the axes; what it gives a label enters the legend.
        finding: what the figure shows, for those who do not see it.
        points: what is drawn.
        rows: rows of bars or strips; 0 if the figure has none.
        note: text below the figure.
    """
    height = max(min(rows, MOST_ROWS) * _ROW + _AXIS_SPACE, _LEAST_HEIGHT) if rows else _HEIGHT
    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": title}), warnings.catch_warnings():
        # The page's font has glyphs that matplotlib's lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = Figure(figsize=(_WIDTH / _POINTS_PER_INCH, height / _POINTS_PER_INCH))
        axes = figure.add_subplot()
        paint(axes)
        target = io.StringIO()
        figure.savefig(target, format="svg", transparent=True, metadata=_NO_METADATA)
    labeled = zip(*axes.get_legend_handles_labels(), strict=True)
    legend = dict.fromkeys(
        _key(artist, words.strip()) for artist, words in labeled if _is_in_view(artist, axes)
    )
    words = f"{title}: {finding}; {axes.get_xlabel()}; {', '.join(key.words for key in legend)}"
    svg = target.getvalue()
    # Ids that are the same in every figure.
    svg = re.sub(r' id="[a-z0-9.]+_\d+"', "", svg[svg.index("<svg") :])
    svg = svg.replace("<svg", f'<svg class="plot" role="img" aria-label="{escape(words)}"', 1)
    return Chart(
        title,
        _with_variables(svg),
        [key._replace(color=_with_variables(key.color)) for key in legend],
        finding,
        points,
        note,
    )


def _with_variables(text: str) -> str:
    """Replace the placeholders of colors by CSS variables."""
    for name, color in COLORS.items():
        text = text.replace(color, f"var(--{name})")
    return text


def _is_in_view(artist: Any, axes: Axes) -> bool:
    """Return False for a line without a point inside the axes."""
    if not isinstance(artist, Line2D):
        return True
    view = axes.bbox.padded(1)  # an axhline ends on its edges
    return any(
        view.contains(x, y) for x, y in artist.get_transform().transform(artist.get_xydata())
    )


def _key(artist: Any, words: str) -> Key:
    """Return the legend entry of something drawn."""
    if isinstance(artist, Line2D):
        looks = {"|": "tick", "o": "dot", "--": "dashed", ":": "dotted", "-.": "dashdot"}
        kind = looks.get(str(artist.get_marker())) or looks.get(str(artist.get_linestyle()), "line")
        return Key(kind, to_hex(artist.get_color()), words)
    patch = artist[0] if isinstance(artist, BarContainer) else artist
    if not patch.get_fill():
        return Key("box", to_hex(patch.get_edgecolor()), words)
    if patch.get_alpha():
        return Key("band", to_hex(patch.get_facecolor()), words)
    patterns = {hatch: name for name, hatch in PATTERNS.items()}
    kind = f"bar {patterns[patch.get_hatch() or '']}".strip()
    return Key(kind, to_hex(patch.get_facecolor()), words)


def logarithmic(axes: Axes, axis: str, values: Sequence[float]) -> None:
    """Make an axis ("x" or "y") logarithmic if the values differ by more than a factor of 12."""
    low = min(values, default=1.0)
    high = max(values, default=1.0)
    if low <= 0 or high < LOG_FROM * low:
        return
    if axis == "x":
        axes.set_xscale("log")
    else:
        axes.set_yscale("log")
    target = axes.xaxis if axis == "x" else axes.yaxis
    labeled = (1.0, 2.0, 5.0) if high < _NARROW * low else (1.0,)
    target.set_major_locator(LogLocator(subs=labeled, numticks=6))
    target.set_minor_locator(NullLocator())
    target.set_major_formatter("{x:g}")


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
