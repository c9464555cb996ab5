"""``mlbert export``: a run, finished or not, or one of its checkpoints in another program's form."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class Form(StrEnum):
    """Whose form."""

    HUGGINGFACE = "huggingface"


@app.command()
def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|CHECKPOINT", help="LOGDIR, a run_<i>, its checkpoints/step_<n>, or weights.")
    ],
    to: Annotated[Form, typer.Option(help="Form.")] = Form.HUGGINGFACE,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="New folder; without it <name>-huggingface beside the source.")
    ] = None,
) -> None:
    """Write weights as a folder that transformers loads: from_pretrained(DIR).

    Of a run without weights/ it is the newest checkpoint. mlbert convert does the same for other programs' files.
    """
    from mlbert.models.weights.load import export_to_huggingface  # torch takes a second

    target = out or source.resolve().with_name(f"{source.resolve().name}-{to.value}")
    export_to_huggingface(source, target)
    typer.echo(f"wrote {target}")
    if not (target / "vocab.txt").is_file():
        typer.echo("no vocabulary was found: put the vocab.txt that made the data there")
