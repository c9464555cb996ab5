"""``mlbert report``: report the results of runs, for one system or several, in the terminal or as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mlbert.programs.console import new_table, safe, standard_output, write_page
from mlbert.report.results import Result, read_result
from mlbert.report.runs import read_systems
from mlbert.report.tables import as_json, count, duration, meaning, percent, speed, time_to_train, verdict

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def report(
    paths: Annotated[
        list[Path], typer.Argument(metavar="DIR|LOG", help="LOGDIRs, systems' results, trees, or MLPerf logs.")
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report with figures as an HTML page.")
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> int:
    """Print the results of runs, several systems in one table; exit with 1 if a run missed its target."""
    results = [read_result(system) for system in read_systems(paths)]
    if is_json:
        typer.echo(json.dumps(as_json(results), indent=2))
    else:
        _print(standard_output(), results)
    if html is not None:
        from mlbert.report.page import report_page  # matplotlib takes a second

        write_page(html, report_page(results))
        typer.echo(f"page: {html}", err=is_json)
    return 0 if all(run.succeeded for result in results for run in result.runs) else 1


def _print(console: Console, results: Sequence[Result]) -> None:
    for result in results if len(results) == 1 else ():
        console.print(_runs(result))
        for name, accuracy in result.system.baselines.items():
            console.print(f"baseline {name.replace('_', ' ')}: accuracy {accuracy:.4f}")
        for what, share in result.peak_shares.items():
            console.print(f"{percent(share)} of the {what}")
        console.print(f"{time_to_train(result)}: {meaning(result)}")
    if len(results) > 1:
        console.print(_comparison(results))
    for result in results:
        for note in result.system.notes:
            console.print(safe(f"{result.system.name}: {note}"))
    console.print(verdict(results))


def _runs(result: Result) -> Table:
    table = new_table(
        safe(f"Runs in {result.system.folder}"), ("run", "status"), ("time", "samples", "accuracy", "samples/s")
    )
    for run in result.runs:
        mark = result.marks.get(run.name)
        table.add_row(
            safe(run.name),
            safe(run.status if mark is None else f"{run.status}: {mark}"),
            duration(run.seconds),
            count(run.samples),
            "-" if run.accuracy is None else f"{run.accuracy:.4f}",
            speed(run.samples_per_second),
        )
    return table


def _comparison(results: Sequence[Result]) -> Table:
    numbers = ("time", "runs", "batch", "accel.", "samples", "/s")
    table = new_table(f"{len(results)} systems: olympic means", ("system",), numbers)
    for result in results:
        table.add_row(
            safe(result.system.name),
            time_to_train(result),
            f"{result.num_converged}/{len(result.runs)}",
            count(result.batch),
            count(result.accelerators) if result.accelerators else "-",
            count(result.mean_samples),
            speed(result.samples_per_second),
        )
    return table
