"""``mlbert prepare import``, ``export-nvidia``, ``tfrecord-to-hdf5``, ``hdf5-to-tfrecord``:
other formats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlbert.cli.prepare.options import (
    MOST_FILES,
    Out,
    PoolArguments,
    ShareArguments,
    say,
    with_options,
)
from mlbert.data.formats.manifest import MAX_TOKENS
from mlbert.data.formats.padded import Widths
from mlbert.data.prepare import export_nvidia, import_store, tfrecords
from mlbert.host.texts import counted

app = typer.Typer()
_LISTED = 20  # skipped records printed; the manifest lists all

Input = Annotated[Path, typer.Option("--input", help="Folder of the data set.")]


@app.command("import")
@with_options()
def import_command(
    folder: Input,
    vocab: Annotated[
        Path, typer.Option("--vocab", help="vocab.txt that the data was prepared with.")
    ],
    out: Out,
    run: ShareArguments,
    max_seq_length: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_TOKENS, help="Maximum tokens per row, if the data does not define it."
        ),
    ] = 512,
    max_predictions: Annotated[
        int,
        typer.Option(min=1, max=MAX_TOKENS, help="Maximum masked tokens per sequence, likewise."),
    ] = 76,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip bad rows and files, and list them.")
    ] = False,
) -> None:
    """Convert NVIDIA's HDF5 shards (fixed, variable, packed, bins)
    or any other data set to a prepared set.

    Writes one shard per file; packs stay packs.

    \b
    Examples:
      mlbert prepare import --input hdf5/ --vocab vocab.txt --out set
    """
    limits = Widths(max_seq_length, max_predictions)
    manifest = import_store.import_store(
        folder, vocab, out, limits=limits, skip_bad=skip_bad, executor=run.executor()
    )
    packs = f" in {manifest.num_packs:,} packs" if manifest.num_packs else ""
    say(f"{out}: {manifest.num_sequences:,} sequences{packs}, {manifest.num_tokens:,} tokens")
    for line in manifest.provenance.get("skipped", {}).get("first", []):
        say(f"skipped: {line}")


@app.command("export-nvidia")
@with_options()
def export_command(
    folder: Input,
    out: Out,
    layout: Annotated[
        str, typer.Option(metavar="fixed|variable|packed", help="Layout of the rows.")
    ],
    run: PoolArguments,
    files: Annotated[
        int, typer.Option(min=0, max=MOST_FILES, help="Number of files; 0: one per 36,280 rows.")
    ] = 0,
) -> None:
    """Write a data set as HDF5 shards for NVIDIA's trainers.

    \b
    Examples:
      mlbert prepare export-nvidia --input set --layout packed --out hdf5
    """
    paths = export_nvidia.export_nvidia(
        folder, out, layout, num_files=files, executor=run.executor()
    )
    say(f"{out}: {counted(len(paths), 'file')}")


@app.command("tfrecord-to-hdf5")
@with_options()
def tfrecord_to_hdf5_command(
    inputs: Annotated[
        list[Path], typer.Option("--input", help="TFRecord file or folder of them; repeatable.")
    ],
    vocab: Annotated[
        Path, typer.Option("--vocab", help="vocab.txt that the records were made with.")
    ],
    out: Out,
    run: ShareArguments,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip bad records, and list them.")
    ] = False,
) -> None:
    """Convert the benchmark's TFRecords to a prepared set, one shard per file;
    verify every checksum.

    \b
    Examples:
      mlbert prepare tfrecord-to-hdf5 --input tf/ --vocab vocab.txt --out set
    """
    manifest = tfrecords.tfrecords_to_hdf5(
        inputs, vocab, out, skip_bad=skip_bad, executor=run.executor()
    )
    say(f"{out}: {manifest.num_sequences:,} sequences, {manifest.num_tokens:,} tokens")
    lines = [
        f"{file}: {bad}"
        for file, records in manifest.provenance["skipped"].items()
        for bad in records
    ]
    for line in lines[:_LISTED]:
        say(f"skipped: {line}")
    if skip_bad:
        more = f"; all are listed in {manifest.path}" if len(lines) > _LISTED else ""
        say(f"{counted(len(lines), 'record')} skipped{more}")


@app.command("hdf5-to-tfrecord")
@with_options()
def hdf5_to_tfrecord_command(
    folder: Annotated[Path, typer.Option("--input", help="Prepared set.")],
    out: Out,
    run: ShareArguments,
) -> None:
    """Convert a prepared set to TFRecords, one file per shard,
    as the benchmark's generator writes them.

    \b
    Examples:
      mlbert prepare hdf5-to-tfrecord --input set --out tfrecords
    """
    made = tfrecords.hdf5_to_tfrecords(folder, out, executor=run.executor())
    say(f"{out}: {counted(len(made.files), 'file')}, {counted(made.num_sequences, 'sequence')}")
