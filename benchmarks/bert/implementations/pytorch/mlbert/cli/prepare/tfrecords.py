"""``mlbert prepare tfrecord-to-hdf5`` and ``hdf5-to-tfrecord``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlbert.cli.prepare.options import Out, Workers, counted, num_workers, say
from mlbert.cli.prepare.progress import console_progress
from mlbert.prepare import tfrecords

app = typer.Typer()
_LISTED = 20  # lines of left-out records on the console; the manifest has them all


@app.command("tfrecord-to-hdf5")
def tfrecord_to_hdf5_command(
    inputs: Annotated[list[Path], typer.Option("--input", help="TFRecord file, or folder of them; may be repeated.")],
    vocab: Annotated[Path, typer.Option("--vocab", help="WordPiece vocabulary that they were made with, vocab.txt.")],
    out: Out,
    workers: Workers = 0,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad records out; they are counted and listed.")
    ] = False,
) -> None:
    """Turn the benchmark's TFRecords into a prepared set, one shard for each file; every checksum is checked."""
    manifest = tfrecords.tfrecords_to_hdf5(
        inputs, vocab, out, skip_bad=skip_bad, workers=num_workers(workers), progress=console_progress()
    )
    say(f"{out}: {manifest.num_sequences:,} sequences, {manifest.num_tokens:,} tokens")
    lines = [f"{file}: {bad}" for file, records in manifest.provenance["skipped"].items() for bad in records]
    for line in lines[:_LISTED]:
        say(f"left out: {line}")
    if skip_bad:
        more = f"; all are listed in {manifest.path}" if len(lines) > _LISTED else ""
        say(f"{counted(len(lines), 'record')} left out{more}")


@app.command("hdf5-to-tfrecord")
def hdf5_to_tfrecord_command(
    folder: Annotated[Path, typer.Option("--input", help="Prepared set.")],
    out: Out,
    workers: Workers = 0,
) -> None:
    """Turn a prepared set into TFRecords, one file for each shard, as the benchmark's generator writes them."""
    made = tfrecords.hdf5_to_tfrecords(folder, out, workers=num_workers(workers), progress=console_progress())
    say(f"{out}: {counted(len(made['files']), 'file')}, {counted(made['num_sequences'], 'sequence')}")
