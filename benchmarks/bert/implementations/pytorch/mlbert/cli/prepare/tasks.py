"""``mlbert prepare python-glue`` and ``glue``: GLUE's files, made of Python's documentation or fetched."""

from __future__ import annotations

from typing import Annotated

import typer

from mlbert.cli.prepare.options import Out, say
from mlbert.data.prepare import glue_files

app = typer.Typer()


@app.command("python-glue")
def python_glue_command(
    out: Out, size: Annotated[float, typer.Option(help="Factor on the numbers of rows.", min=0.01, max=10)] = 1.0
) -> None:
    """Make stand-ins for GLUE's eight tasks, in its files' forms, of what this Python installation says."""
    glue_files.make(out, size)
    say(f"wrote GLUE's files into {out}")


@app.command("glue")
def glue_command(out: Out) -> None:
    """Fetch GLUE's eight tasks through the datasets library, in their official form."""
    glue_files.fetch(out, tell=say)
