"""``mlaudit trace``: explain each value in a log and trace it to the code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlaudit.call_sites import own_trace
from mlaudit.cli.repository_root import repository_root
from mlaudit.logs import read_log
from mlaudit.trace import Tracer
from mlbert.host.console import printable
from mlbert.host.errors import UserError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def trace(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="A result_<i>.txt.")],
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="One key; default: a line for each key.")
    ] = None,
    tree: Annotated[
        Path | None, typer.Option(help="Repository with the log's files; default: this one.")
    ] = None,
) -> None:
    """Explain each value in a log and trace it to the code; exit with 1 if a link is broken.

    \b
    Examples:
      mlbert submission trace runs/quickstart/result_0.txt
      mlbert submission trace runs/quickstart/result_0.txt global_batch_size
    """
    content = read_log(log)
    if not content.events:
        raise UserError(
            "log.incomplete", log, "has no line of an MLPerf log", "Give a result_<i>.txt"
        )
    tracer = Tracer(content, repository_root(tree))
    words = [str(log.resolve()), *([key] if key else []), "--tree", str(tracer.sources.tree)]
    if (own := own_trace(tracer.sources, words)) is not None:
        typer.echo(printable(f"note: traced with the code of commit {tracer.sources.commit}"))
        typer.echo(own.stdout, nl=False)
        typer.echo(own.stderr, nl=False, err=True)
        raise typer.Exit(own.returncode)
    keys = [key] if key else tracer.keys
    chains = [tracer.chain(name) for name in keys]
    if tracer.sources.gap:
        typer.echo(
            printable(
                f"note: {tracer.sources.gap}; reading the current files in {tracer.sources.tree}"
            )
        )
    for chain in chains:
        if key is None:
            lines = [chain.summary(), *(f"  {link}" for link in chain.broken)]
        else:
            lines = chain.lines()
        for line in lines:
            typer.echo(printable(line))
    if any(chain.broken for chain in chains):
        raise typer.Exit(1)
