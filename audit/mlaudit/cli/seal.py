"""``mlaudit seal``: write checksums over a system's results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlaudit.cli.repository_root import repository_root
from mlaudit.seal import SUMS
from mlaudit.seal import seal as seal_system

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def seal(
    system: Annotated[str, typer.Argument(help="Folder in results/.")],
    tree: Annotated[
        Path | None, typer.Option(help="Repository that contains it; default: this one.")
    ] = None,
    logdir: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="LOGDIR", help="First copy logs and run files from this folder."
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Sign with this private key (ssh or minisign)."),
    ] = None,
) -> None:
    """Write SHA256SUMS over a system's logs, run files and description, for sha256sum -c.

    \b
    Examples:
      mlbert submission seal acme_x1_n4 --from runs/acme
    """
    root = repository_root(tree)
    names = seal_system(system, root, logdir, key)
    typer.echo(
        f"{root / 'results' / system / SUMS} covers {len(names)} files{', signed' if key else ''}"
    )
