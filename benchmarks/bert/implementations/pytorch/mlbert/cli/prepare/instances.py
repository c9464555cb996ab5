"""``mlbert prepare instances`` and ``digest``: the benchmark's generator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlbert.cli.prepare.options import (
    Cased,
    DupeFactor,
    MaskedLmProb,
    MaxPredictions,
    MaxSeqLength,
    Out,
    Seed,
    ShortSeqProb,
    Workers,
    counted,
    num_workers,
    say,
)
from mlbert.cli.prepare.progress import console_progress
from mlbert.prepare.instance_set import InstanceJob, SetFormat, prepare_instances, set_digests
from mlbert.prepare.instances import InstanceOptions
from mlbert.prepare.text_parts import expand_inputs

app = typer.Typer()


@app.command("instances")
def instances_command(
    inputs: Annotated[
        list[Path],
        typer.Option(
            "--input",
            help="Text part (one sentence a line, a blank line between documents), or a folder of parts: its part-* "
            "and *.txt files without eval*.txt. Can be given several times.",
        ),
    ],
    vocab: Annotated[Path, typer.Option("--vocab", help="WordPiece vocabulary, vocab.txt.")],
    out: Out,
    max_seq_length: MaxSeqLength = 512,
    max_predictions: MaxPredictions = 76,
    masked_lm_prob: MaskedLmProb = 0.15,
    short_seq_prob: ShortSeqProb = 0.1,
    dupe_factor: DupeFactor = 10,
    seed: Seed = 12345,
    workers: Workers = 0,
    cased: Cased = False,
    set_format: Annotated[
        SetFormat, typer.Option("--format", help="A prepared set, or TFRecord files as the benchmark has them.")
    ] = SetFormat.hdf5,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad parts out and list them.")] = False,
) -> None:
    """Turn text parts into instances, equal to the benchmark's generator; one shard or file for each part."""
    options = InstanceOptions(
        max_seq_length=max_seq_length,
        max_predictions_per_seq=max_predictions or max(1, round(max_seq_length * masked_lm_prob)),
        masked_lm_prob=masked_lm_prob,
        short_seq_prob=short_seq_prob,
        dupe_factor=dupe_factor,
        random_seed=seed,
    )
    job = InstanceJob(
        parts=tuple(expand_inputs(inputs, skip_bad=skip_bad)),
        vocab_file=vocab,
        out=out,
        options=options,
        lower_case=not cased,
        set_format=set_format,
        skip_bad=skip_bad,
    )
    made = prepare_instances(job, workers=num_workers(workers), progress=console_progress())
    left_out = f", {counted(len(made.skipped), 'part')} left out" if made.skipped else ""
    say(f"{out}: {made.num_sequences:,} instances, {made.num_tokens:,} tokens{left_out}")


@app.command("digest")
def digest_command(
    paths: Annotated[list[Path], typer.Argument(help="Prepared set, one of its shards, TFRecord file or folder.")],
) -> None:
    """Print the sha256 of the padded features, the file and the number of instances."""
    for path in paths:
        for name, count, sha256 in set_digests(path):
            typer.echo(f"{sha256}  {name}  {count}")
