"""``mlaudit round``: one table for all results of a round."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mlaudit.cli.report_table import as_table
from mlaudit.findings import STANDARD_OUTPUT, Outcome
from mlaudit.report import round_tables
from mlaudit.round_table import AuditedRound, audit_round
from mlbert.host.console import console_progress, safe, standard_output, write_page
from mlbert.host.exit_statuses import FAILED

_SHOWN = (Outcome.ERROR, Outcome.WARN)

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def round_(
    trees: Annotated[
        list[Path],
        typer.Argument(metavar="TREE", help="Submitters' trees, or folders of such trees."),
    ],
    general: Annotated[
        bool, typer.Option("--general", help="Include results of every benchmark.")
    ] = False,
    official: Annotated[
        bool,
        typer.Option(
            "--official", help="Also run the official tools, which takes 5 times as long."
        ),
    ] = False,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the table as CSV.")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Also write the table and all findings there; - prints only JSON.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write an HTML page.")
    ] = None,
) -> None:
    """Audit every result of a round, one row for each system.

    Scores are minutes, samples are those to the target, speed is per accelerator. Exit status: 0 no
    errors, 1 at least one ERROR, 2 a path cannot be audited.

    \b
    Examples:
      mlaudit round training_results_v5.0 --csv round.csv --html round.html
    """
    progress = console_progress(Console(stderr=True))
    audited = audit_round(trees, progress, official=official, general=general)
    if json_file == STANDARD_OUTPUT:
        sys.stdout.write(round_tables.as_json(audited))
    else:
        _print(standard_output(), audited)
    if json_file not in (None, STANDARD_OUTPUT):
        write_page(json_file, round_tables.as_json(audited))
    if csv is not None:
        write_page(csv, round_tables.as_csv(audited))
    if html is not None:
        from mlaudit.report.page import round_page  # matplotlib takes a second

        write_page(html, round_page(audited, ", ".join(map(str, trees))))
        typer.echo(f"page: {html}", err=json_file == STANDARD_OUTPUT)
    if audited.has_failed:
        raise typer.Exit(FAILED)


def _print(console: Console, audited: AuditedRound) -> None:
    number = len(audited.rows)
    title = "1 result" if number == 1 else f"{number} results"
    console.print(as_table(title, round_tables.terminal_table(audited)))
    for row in audited.rows:
        for finding in row.findings:
            if finding.outcome in _SHOWN:
                name = f"{row.submitter} {row.system}"
                words = f"{finding.outcome.value}: {finding.check}: {finding.words}"
                console.print(safe(f"{name}: {words}"))
    for finding in audited.copies:
        if finding.outcome is not Outcome.PASS:
            console.print(safe(f"{finding.outcome.value}: {finding.check}: {finding.words}"))
    if audited.others and not any(row.benchmark in audited.others for row in audited.rows):
        names = ", ".join(f"{number} of {name}" for name, number in audited.others.items())
        console.print(safe(f"left out: {names} (include them with --general)"))
