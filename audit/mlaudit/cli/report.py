"""``mlaudit report``: report the results of runs, for one system or several,
in the terminal or as a page.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mlaudit.cli.report_table import as_table
from mlaudit.planner.cost import Prices
from mlaudit.report import tables
from mlaudit.report.results import Result, read_result
from mlaudit.report.runs import read_systems
from mlbert.host.console import safe, standard_output, write_page
from mlbert.host.metrics import evaluation_titles

# Column of the report -> its header in the terminal, which has declared metrics, too.
_RUNS = {
    "run": "run",
    "status": "status",
    "": "",
    "time to train": "time",
    "samples": "samples",
    "accuracy": "accuracy",
    "samples/s": "samples/s",
}
_SYSTEMS = {
    "system": "system",
    "time to train": "time",
    "runs": "runs",
    "batch": "batch",
    "accelerators": "accel.",
    "samples to target": "samples",
    "samples/s": "/s",
}
# Simple predictors, in the words of `mlbert pretrain`.
_BASELINES = {
    "bigram": "guessing from one neighbor",
    "most_frequent": "always guessing the most frequent token",
}

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR|LOG", help="LOGDIRs, systems' results, submission trees, or MLPerf logs."
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the report with figures as an HTML page."),
    ] = None,
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(help="US dollars per GPU-hour.", min=0, max=1e4)
    ] = None,
    co2_per_kwh: Annotated[float | None, typer.Option(help="kg of CO2.", min=0, max=10)] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> int:
    """Print the results of runs, several systems in one table;
    exit with 1 if a run did not reach its target.

    \b
    Examples:
      mlbert report runs/quickstart --html report.html
      mlbert report results/*/bert
    """
    results = [read_result(system) for system in read_systems(paths)]
    prices = Prices(price_per_gpu_hour, co2_per_kwh=co2_per_kwh)
    if is_json:
        typer.echo(json.dumps(tables.as_json(results, prices), indent=2))
    else:
        _print(standard_output(), results, prices)
    if html is not None:
        from mlaudit.report.page import report_page  # matplotlib takes a second

        write_page(html, report_page(results, prices))
        typer.echo(f"page: {html}", err=is_json)
    return 0 if all(run.succeeded for result in results for run in result.runs) else 1


def _print(console: Console, results: Sequence[Result], prices: Prices) -> None:
    if len(results) == 1:
        result = results[0]
        runs = tables.runs(result)
        metrics = [title for title in evaluation_titles().values() if title in runs.columns]
        headers = {**_RUNS, **dict(zip(metrics, metrics, strict=True))}
        console.print(safe(f"Runs in {result.system.folder}"))
        console.print(as_table("", runs, headers))
        for name, accuracy in result.system.baselines.items():
            words = _BASELINES.get(name, name.replace("_", " "))
            console.print(f"accuracy of {words}: {accuracy:.4f}")
        for what, share in result.peak_shares.items():
            console.print(f"{tables.percent(share)} of the {what}")
        console.print(f"{tables.time_to_train(result)}: {tables.meaning(result)}")
    if len(results) > 1:
        console.print(
            as_table(f"{len(results)} systems: olympic means", tables.comparison(results), _SYSTEMS)
        )
    for result in results:
        if (costs := tables.costs(result, prices)) is not None:
            console.print(as_table(f"Energy and cost of {result.system.name}", costs))
        for note in result.system.notes:
            console.print(safe(f"{result.system.name}: {note}"))
    console.print(tables.verdict(results))
