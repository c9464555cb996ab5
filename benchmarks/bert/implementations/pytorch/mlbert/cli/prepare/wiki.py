"""``mlbert prepare download``, ``recognize`` and ``clean``: get and clean source files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlbert.cli.prepare.options import Out, PoolArguments, say, with_options
from mlbert.data.prepare import clean, download
from mlbert.data.prepare.clean import recognize
from mlbert.host.console import console_progress
from mlbert.host.texts import counted

app = typer.Typer()


@app.command("download")
def download_command(
    out: Out,
    mirror: Annotated[
        str,
        typer.Option(
            help="Get every file from here: https://, http://, file:// or a folder.",
            metavar="URL|FOLDER",
        ),
    ] = "",
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMES", help="Files or groups, comma-separated; repeatable."),
    ] = None,
    manifest: Annotated[
        Path | None, typer.Option(help="List of files to use instead of the benchmark's.")
    ] = None,
) -> None:
    """Download the benchmark's files; resumes, and accepts only files with the published size and
    MD5 sum.

    \b
    Examples:
      mlbert prepare download --out /data/bert/download
    """
    listed = download.read_list(manifest)
    wanted = [name for entry in only or [] for name in entry.split(",") if name]
    chosen = download.select(listed, wanted)
    found = download.fetch_all(chosen, out, mirror, progress=console_progress())
    say(f"{out}: {counted(len(found), 'file')}, sizes and MD5 sums as published")


@app.command("recognize")
def recognize_command(path: Annotated[Path, typer.Argument(help="Folder or file.")]) -> None:
    """Print what a folder contains: wikiextractor, text, tfrecord, nvidia or prepared.

    \b
    Examples:
      mlbert prepare recognize /data/bert/text
    """
    typer.echo(recognize(path))


@app.command("clean")
@with_options()
def clean_command(
    folder: Annotated[Path, typer.Option("--input", help="Folder written by WikiExtractor.")],
    out: Out,
    run: PoolArguments,
    parts: Annotated[int, typer.Option(min=1, max=99_999, help="Number of text files.")] = 500,
    eval_articles: Annotated[
        int, typer.Option(min=0, max=100_000_000, help="Articles to withhold for evaluation.")
    ] = 10_000,
    eval_md5: Annotated[
        Path | None, typer.Option(help="Withhold the articles whose MD5 sums are in this file.")
    ] = None,
    eval_min_found: Annotated[
        float,
        typer.Option(min=0, max=1, help="Fraction of --eval-md5's articles that must be found."),
    ] = clean.MIN_FOUND,
) -> None:
    """Convert WikiExtractor's output to text files:
    one sentence per line, blank line between articles.

    The withheld articles go to eval.txt.

    \b
    Examples:
      mlbert prepare clean --input wiki/ --out text --parts 500
    """
    options = clean.CleanOptions(parts, eval_articles, eval_md5, eval_min_found)
    summary = clean.clean(folder, out, options, run.executor())
    made = f"{counted(parts, 'part')}, {counted(summary['articles'], 'article')}"
    say(f"{out}: {made}; {summary['eval_articles']:,} withheld in eval.txt")
