"""``mlaudit diff``: compare two sets of runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mlaudit import compare, significance
from mlaudit.rules import UNVERIFIED
from mlbert.host.console import new_table, safe, standard_output
from mlbert.host.provenance import tree_root

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_NAME_WIDTH = 30  # columns
_MOST_FILES = 20  # shown
_CODE_HOME = "benchmarks/bert/implementations/"
_METHOD = (
    "B/A: median of the ratios of all pairs of runs (Hodges-Lehmann), its 95 % interval, "
    "and Mann and Whitney's p. "
    "Runs that did not reach the target count for speed only."
)


@app.command()
def diff(
    a: Annotated[
        Path,
        typer.Argument(
            metavar="A", help="results/<system>, a LOGDIR or one log, from any submitter."
        ),
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="The result to compare with.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two sets of runs: settings, code, system;
    speed, samples and time to target, with significance.

    \b
    Examples:
      mlbert submission diff results/SYSTEM runs/mine
    """
    side_a = compare.read_side(a)
    side_b = compare.read_side(b)
    found = compare.compare_sides(side_a, side_b, tree_root())
    if as_json:
        typer.echo(json.dumps({"a": str(a), "b": str(b), **asdict(found)}, indent=2))
        return
    _print(standard_output(), (side_a, side_b), found)


def _print(
    console: Console,
    sides: tuple[compare.ComparedSide, compare.ComparedSide],
    found: compare.Comparison,
) -> None:
    for letter, side, good, runs in zip("AB", sides, found.successes, found.runs, strict=True):
        console.print(f"{letter}: {safe(side.name)}, {runs} runs, {good} reached the target")
    for title, rows in (
        ("settings", found.settings),
        ("code", found.code),
        ("system", found.system),
    ):
        if rows:
            console.print(_differences(title, rows))
        else:
            console.print(f"{title}: no recorded difference")
    _print_files(console, found)
    console.print(_measures(found.measures))
    means = found.olympic_minutes
    if None not in means:
        ratio = f", B/A {means[1] / means[0]:.4g}" if means[0] and means[1] else ""
        console.print(
            f"olympic means of the time to train: A {means[0]:.4g}, B {means[1]:.4g} minutes{ratio}"
        )
    for measure in found.measures:
        console.print(_verdict(measure))
    for note in (*found.notes, _METHOD, UNVERIFIED):
        console.print(safe(note))


def _differences(title: str, rows: Sequence[compare.Difference]) -> Table:
    """Return a table with one line per side, so that long values fit."""
    table = new_table(title, ())
    table.show_header = False
    table.add_column(max_width=_NAME_WIDTH, overflow="fold")
    table.add_column()
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(safe(row.name), "A", _with_origin(row.a, row.origin_a))
        table.add_row("", "B", _with_origin(row.b, row.origin_b))
    return table


def _with_origin(value: str, origin: str) -> str:
    place = origin.rpartition("/")[2]
    return safe(value) + (f" [dim]({safe(place)})[/]" if place else "")


def _print_files(console: Console, found: compare.Comparison) -> None:
    if found.history:
        console.print(safe(found.history))
    for name in found.files[:_MOST_FILES]:
        console.print(f"  {safe(name.removeprefix(_CODE_HOME))}")
    if len(found.files) > _MOST_FILES:
        console.print(f"  and {len(found.files) - _MOST_FILES} more")


def _measures(measures: Sequence[compare.Measure]) -> Table:
    table = new_table("runs, median (count)", ("",), ("A", "B", "B/A", "95 % interval", "p"))
    for measure in measures:
        table.add_row(
            f"{measure.name}, {measure.unit}",
            _median(measure.a),
            _median(measure.b),
            *_ratio(measure.ratio),
        )
    return table


def _median(values: Sequence[float]) -> str:
    return f"{_number(statistics.median(values))} ({len(values)})" if values else "-"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _ratio(ratio: significance.Ratio | None) -> tuple[str, str, str]:
    if ratio is None:
        return "-", "-", "-"
    interval = "-" if ratio.low is None else f"{ratio.low:.4g}–{ratio.high:.4g}"
    p = "-" if ratio.p is None else f"{ratio.p:.2g}"
    return f"{ratio.value:.4g}", interval, p


def _verdict(measure: compare.Measure) -> str:
    """Return the conclusion of one row in words."""
    ratio = measure.ratio
    if ratio is None:
        return f"{measure.name}: not measured on both sides"
    if ratio.p is None or ratio.low is None:
        return f"{measure.name}: too few runs to detect a difference"
    if not ratio.is_significant:
        return f"{measure.name}: no significant difference at {significance.LEVEL:.0%}".replace(
            "%", " %"
        )
    change = abs(ratio.value - 1)
    return f"{measure.name}: B is {change:.1%} {'higher' if ratio.value > 1 else 'lower'}".replace(
        "%", " %"
    )
