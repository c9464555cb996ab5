"""``mlbert prepare import`` and ``export-nvidia``: other pipelines' folders in, NVIDIA's shards out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlbert.cli.prepare.options import Out, Workers, counted, num_workers, say
from mlbert.cli.prepare.progress import console_progress
from mlbert.prepare import export_nvidia, import_store
from mlbert.store.nvidia_index import Limits

app = typer.Typer()

Input = Annotated[Path, typer.Option("--input", help="Folder of the data set.")]


@app.command("import")
def import_command(
    folder: Input,
    vocab: Annotated[Path, typer.Option("--vocab", help="The vocabulary that it was made with, vocab.txt.")],
    out: Out,
    max_seq_length: Annotated[int, typer.Option(help="Most tokens of a row, where the data does not say.")] = 512,
    max_predictions: Annotated[int, typer.Option(help="Most masked tokens of a sequence, likewise.")] = 76,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad rows and unreadable files out; count and list them.")
    ] = False,
    workers: Workers = 0,
) -> None:
    """Turn a folder of NVIDIA's HDF5 shards (fixed, variable, packed, bins), or any other stored set, into a prepared
    set; one shard for each file, packs stay packs."""
    manifest = import_store.import_store(
        folder,
        vocab,
        out,
        limits=Limits(max_seq_length, max_predictions),
        skip_bad=skip_bad,
        workers=num_workers(workers),
        progress=console_progress(),
    )
    packs = f" in {manifest.num_packs:,} packs" if manifest.num_packs else ""
    say(f"{out}: {manifest.num_sequences:,} sequences{packs}, {manifest.num_tokens:,} tokens")
    for line in manifest.provenance.get("skipped", {}).get("first", []):
        say(f"left out: {line}")


@app.command("export-nvidia")
def export_command(
    folder: Input,
    out: Out,
    layout: Annotated[str, typer.Option(help="fixed, variable or packed.")],
    files: Annotated[int, typer.Option(help="Number of files; 0: one for each 36,280 rows.")] = 0,
    workers: Workers = 0,
) -> None:
    """Write a stored set as HDF5 shards that NVIDIA's trainers read."""
    paths = export_nvidia.export_nvidia(
        folder, out, layout, num_files=files, workers=num_workers(workers), progress=console_progress()
    )
    say(f"{out}: {counted(len(paths), 'file')}")
