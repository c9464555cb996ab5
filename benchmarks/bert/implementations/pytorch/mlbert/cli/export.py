"""``mlbert export``: export a run or one of its checkpoints to another program's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CHECKPOINT",
            help="LOGDIR, a run_<i>, its checkpoints/step_<n>, or weights.",
        ),
    ],
    to: Annotated[Literal["huggingface"], typer.Option(help="Output format.")] = "huggingface",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="New folder; default: <name>-huggingface here."),
    ] = None,
) -> None:
    """Write weights as a folder that transformers loads with from_pretrained(DIR).

    For a run without weights/, export its newest checkpoint.
    For files of other programs, see mlbert convert.
    """
    from mlbert.models.weights.load import export_to_huggingface  # torch takes a second

    target = out or Path(f"{source.resolve().name}-{to}")
    export_to_huggingface(source, target)
    typer.echo(f"wrote {target}")
    if not (target / "vocab.txt").is_file():
        typer.echo(
            "no vocabulary found: copy the vocab.txt "
            "that the data was prepared with into this folder"
        )
