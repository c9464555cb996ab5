"""Figures as SVG inside a page: matplotlib draws, the page's style sheet gives colours and fonts.

Colours are placeholders that become CSS variables, so that one figure does for light and dark. Text stays text.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

SERIES = 8  # colours that the style sheet has for lines
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
    """The placeholder of a CSS variable."""
    return f"#0000{_VARIABLES.index(variable) + 1:02x}"


def series(index: int) -> str:
    """The variable of a line's colour; they repeat after `SERIES`."""
    return f"s{index % SERIES}"


def draw(name: str, title: str, description: str, size: tuple[float, float], paint: Callable[[Axes], None]) -> str:
    """One figure as an ``<svg>`` element.

    Args:
        name: unique on its page; ids begin with it.
        title: what a screen reader says first.
        description: what the figure shows, in a sentence.
        size: width and height in the units of the page's text.
        paint: draws on the axes.
    """
    colours: dict[Any, Any] = {
        **dict.fromkeys(("text.color", "axes.labelcolor"), colour("ink")),
        **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), colour("muted")),
        **dict.fromkeys(("axes.edgecolor", "grid.color"), colour("grid")),
    }
    with matplotlib.rc_context({**_SETTINGS, **colours, "svg.hashsalt": name}), warnings.catch_warnings():
        # The page's font has letters that matplotlib's own has not.
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
    """The element alone: no prolog, metadata or size; ids that are unique on the page; CSS variables for colours."""
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
