"""``mlaudit export``: export a submission tree."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlaudit import official
from mlaudit.cli.repository_root import repository_root
from mlaudit.findings import failed
from mlaudit.tree_export import export_tree
from mlbert.host.console import safe, standard_output

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def export(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="New folder for the submission.")
    ],
    tree: Annotated[
        Path | None, typer.Option(help="Repository to export; default: this one.")
    ] = None,
) -> None:
    """Export the repository without tests, tools, records, caches and dot files,
    and run the repository checker on it.

    \b
    Examples:
      mlbert submission export ../submission
    """
    num_files = export_tree(repository_root(tree), directory)
    finding = official.run(official.repo_checker(directory.resolve()))[0]
    console = standard_output()
    console.print(safe(f"{num_files} files in {directory}. repo_checker: {finding.words}"))
    if failed([finding]):
        raise typer.Exit(1)
