"""``mlbert prepare python-glue`` and ``glue``: GLUE's files, downloaded or made from Python's documentation."""

from __future__ import annotations

from typing import Annotated

import typer

from mlbert.cli.prepare.options import Out, say
from mlbert.data.prepare import glue_files

app = typer.Typer()


@app.command("python-glue")
def python_glue_command(
    out: Out, size: Annotated[float, typer.Option(help="Factor on the number of rows.", min=0.01, max=10)] = 1.0
) -> None:
    """Make stand-ins for GLUE's eight tasks, in their file formats, from this Python installation's documentation."""
    glue_files.make(out, size)
    say(f"wrote GLUE's files to {out}")


@app.command("glue")
def glue_command(out: Out) -> None:
    """Download GLUE's eight tasks with the datasets library, in their official format."""
    glue_files.fetch(out, tell=say)
