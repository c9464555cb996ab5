"""``mlbert prepare python-text`` and ``text``: turn any text into a finished data folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mlbert.cli.prepare.options import Out, PoolArguments, TextArguments, say, with_options
from mlbert.data.prepare import (
    glue_download,
    glue_stand_ins,
    pipeline,
    python_text,
    text_folder,
)

app = typer.Typer()


def _report(out: Path, summary: dict[str, Any]) -> None:
    """Say where the data is, and which accuracies a model has to beat."""
    bigram = summary["baselines"]["bigram_accuracy"]
    most_frequent = summary["baselines"]["most_frequent_accuracy"]
    say(f"prepared data: {out}")
    say(f"to beat: {bigram:.4f} (guessing from one neighbor), {most_frequent:.4f} (most frequent)")


@app.command("python-text")
@with_options(max_seq_length=64, max_predictions=0)
def python_text_command(out: Out, run: PoolArguments, given: TextArguments) -> None:
    """Prepare the English text contained in this Python installation.

    \b
    Examples:
      mlbert prepare python-text --out data
    """
    documents = python_text.documents()
    source = python_text.source_name()
    summary = pipeline.prepare_text(documents, out, given.text(), source, run.executor())
    _report(out, summary)


@app.command("text")
@with_options(max_seq_length=128, max_predictions=0)
def text_command(
    folder: Annotated[Path, typer.Option("--input", help="Folder of *.txt files, UTF-8.")],
    out: Out,
    run: PoolArguments,
    given: TextArguments,
    one_per_line: Annotated[
        bool,
        typer.Option("--one-per-line", help="One sentence per line, blank line between documents."),
    ] = False,
) -> None:
    """Prepare a folder of your own text files.

    \b
    Examples:
      mlbert prepare text --input texts/ --out data
      mlbert prepare text --input texts/ --out data --cased --vocab-size 8192
    """
    text_folder.keep_out(folder, out)
    options = given.text()
    source = text_folder.source_name(folder, one_per_line)
    documents = text_folder.documents(folder, one_per_line)
    if note := text_folder.name_note(folder):
        say(f"warning: {note}")
    summary = pipeline.prepare_text(documents, out, options, source, run.executor())
    _report(out, summary)


@app.command("python-glue")
def python_glue_command(
    out: Out,
    size: Annotated[
        float, typer.Option(help="Factor on the number of rows.", min=0.01, max=10)
    ] = 1.0,
) -> None:
    """Make stand-ins for GLUE's eight tasks, in their file formats,
    from this Python installation's documentation.

    \b
    Examples:
      mlbert prepare python-glue --out glue-data
    """
    glue_stand_ins.make(out, size)
    say(f"wrote GLUE's files to {out}")


@app.command("glue")
def glue_command(out: Out) -> None:
    """Download GLUE's eight tasks with the datasets library, in their official format.

    \b
    Examples:
      mlbert prepare glue --out glue-data
    """
    glue_download.fetch(out, say=say)
