"""``mlbert submission diff``: what differs between two sets of runs."""

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

from mlbert.cli.repeat import repeat_command
from mlbert.host.provenance import tree_root
from mlbert.mlperf.compare import Comparison, Difference, Measure, Side, compare_sides, read_side
from mlbert.mlperf.rules import UNVERIFIED
from mlbert.mlperf.significance import LEVEL, Ratio
from mlbert.programs.output import new_table, safe, standard_output

_NAME_WIDTH = 30  # columns
_MOST_FILES = 20  # that are shown
_CODE_HOME = "benchmarks/bert/implementations/"
_METHOD = (
    "B/A: median of the ratios of all pairs of runs (Hodges-Lehmann), its 95 % interval, and Mann and Whitney's p. "
    "Runs that missed the target count in speed only."
)


def register(app: typer.Typer) -> None:
    """Add ``diff`` and ``repeat`` to ``mlbert submission``."""
    app.command("diff")(diff_command)
    app.command("repeat")(repeat_command)


def diff_command(
    a: Annotated[Path, typer.Argument(metavar="A", help="results/<system>, a LOGDIR or one log; anybody's.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two sets of runs: settings, code, system; speed, samples and time to the target with significance."""
    sides = read_side(a), read_side(b)
    found = compare_sides(*sides, tree_root())
    if as_json:
        typer.echo(json.dumps({"a": str(a), "b": str(b), **asdict(found)}, indent=2))
        return
    _print(standard_output(), sides, found)


def _print(console: Console, sides: tuple[Side, Side], found: Comparison) -> None:
    for letter, side, good, runs in zip("AB", sides, found.successes, found.runs, strict=True):
        console.print(f"{letter}: {safe(side.name)}, {runs} runs, {good} reached the target")
    for title, rows in (("settings", found.settings), ("code", found.code), ("system", found.system)):
        if rows:
            console.print(_differences(title, rows))
        else:
            console.print(f"{title}: nothing that is told differs")
    _print_files(console, found)
    console.print(_measures(found.measures))
    means = found.olympic_minutes
    if None not in means:
        ratio = f", B/A {means[1] / means[0]:.4g}" if means[0] and means[1] else ""
        console.print(f"olympic means of the time to train: A {means[0]:.4g}, B {means[1]:.4g} minutes{ratio}")
    for measure in found.measures:
        console.print(_verdict(measure))
    for note in (*found.notes, _METHOD, UNVERIFIED):
        console.print(safe(note))


def _differences(title: str, rows: Sequence[Difference]) -> Table:
    """Two lines or more for each: a value has the room that its name leaves."""
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


def _print_files(console: Console, found: Comparison) -> None:
    if found.history:
        console.print(safe(found.history))
    for name in found.files[:_MOST_FILES]:
        console.print(f"  {safe(name.removeprefix(_CODE_HOME))}")
    if len(found.files) > _MOST_FILES:
        console.print(f"  and {len(found.files) - _MOST_FILES} more")


def _measures(measures: Sequence[Measure]) -> Table:
    table = new_table("runs, median (count)", ("",), ("A", "B", "B/A", "95 % interval", "p"))
    for measure in measures:
        cells = (_median(measure.a), _median(measure.b), *_ratio(measure.ratio))
        table.add_row(f"{measure.name}, {measure.unit}", *cells)
    return table


def _median(values: Sequence[float]) -> str:
    return f"{_number(statistics.median(values))} ({len(values)})" if values else "-"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _ratio(ratio: Ratio | None) -> tuple[str, str, str]:
    if ratio is None:
        return "-", "-", "-"
    interval = "-" if ratio.low is None else f"{ratio.low:.4g}–{ratio.high:.4g}"
    return f"{ratio.value:.4g}", interval, "-" if ratio.p is None else f"{ratio.p:.2g}"


def _verdict(measure: Measure) -> str:
    """What the numbers of a row mean."""
    ratio = measure.ratio
    if ratio is None:
        return f"{measure.name}: not on both sides"
    if ratio.p is None or ratio.low is None:
        return f"{measure.name}: too few runs to tell a difference"
    if not ratio.is_significant:
        return f"{measure.name}: no significant difference at {LEVEL:.0%}".replace("%", " %")
    change = abs(ratio.value - 1)
    return f"{measure.name}: B is {change:.1%} {'higher' if ratio.value > 1 else 'lower'}".replace("%", " %")
