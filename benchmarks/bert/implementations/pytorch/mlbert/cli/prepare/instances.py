"""``mlbert prepare instances`` and ``digest``: generate the benchmark's instances."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from mlbert.cli.prepare.options import (
    Cased,
    InstanceArguments,
    Merges,
    Out,
    ShareTask,
    Workers,
    console,
    counted,
    say,
    with_options,
)
from mlbert.data.prepare.instance_set import InstanceJob, SetFormat, prepare_instances, set_digests
from mlbert.data.prepare.jobs import expand_inputs
from mlbert.data.prepare.sizing import PreparationEstimate, estimate
from mlbert.data.prepare.step_tasks import parse_share
from mlbert.programs.console import console_progress

app = typer.Typer()


@app.command("instances")
@with_options(InstanceArguments, max_seq_length=512, max_predictions=76)
def instances_command(
    inputs: Annotated[
        list[Path],
        typer.Option(
            "--input",
            help="Text file (one sentence per line, blank line between documents), or a folder of them: its part-* and "
            "*.txt files except eval*.txt. Repeatable.",
        ),
    ],
    vocab: Annotated[Path, typer.Option("--vocab", help="WordPiece vocabulary, vocab.txt.")],
    out: Out,
    given: InstanceArguments,
    workers: Workers = 0,
    set_format: Annotated[SetFormat, typer.Option("--format", help="Ours, or the benchmark's.")] = SetFormat.hdf5,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip bad files and list them.")] = False,
    task: ShareTask = None,
    merge: Merges = False,
) -> None:
    """Convert text files to instances exactly as the benchmark's generator does; one shard or file per text file."""
    share = parse_share(task, merge)
    job = InstanceJob(
        parts=tuple(expand_inputs(inputs, skip_bad=skip_bad)),
        vocab_file=vocab,
        out=out,
        options=given.instances(),
        lower_case=not given.cased,
        set_format=set_format,
        skip_bad=skip_bad,
    )
    made = prepare_instances(job, workers=workers, progress=console_progress(), share=share)
    left_out = f", {counted(len(made.skipped), 'part')} skipped" if made.skipped else ""
    say(f"{out}: {made.num_sequences:,} instances, {made.num_tokens:,} tokens{left_out}")


@app.command("digest")
def digest_command(
    paths: Annotated[list[Path], typer.Argument(help="Prepared set, one of its shards, or TFRecord file or folder.")],
) -> None:
    """Print the sha256 of the padded features, the file, and the number of instances."""
    for path in paths:
        for name, count, sha256 in set_digests(path):
            typer.echo(f"{sha256}  {name}  {count}")


REFERENCE_CORES = 16


@app.command("estimate")
def estimate_command(
    inputs: Annotated[list[Path], typer.Option("--input", help="Text file or folder of them; repeatable.")],
    vocab: Annotated[Path, typer.Option("--vocab", help="WordPiece vocabulary, vocab.txt.")],
    sample_mb: Annotated[float, typer.Option(min=0.001, max=1_000_000, help="Sample size, MB.")] = 20,
    workers: Workers = 0,
    cased: Cased = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict time, disk and memory for the input and for the benchmark's 156,726,829 instances."""
    parts = expand_inputs(inputs)
    counts = sorted({workers, REFERENCE_CORES})
    measured, estimates = estimate(parts, vocab, sample_bytes=round(sample_mb * 1e6), lower_case=not cased)
    if as_json:
        document = {"measured": measured, "estimates": [item.document(counts) for item in estimates]}
        typer.echo(json.dumps(document, indent=1))
        return
    speed = measured["sequences_per_second"]
    say(
        f"measured on {measured['sample_bytes'] / 1e6:.1f} MB of text with one process: {speed['instances']:,.0f} "
        f"instances/s, {speed['pack']:,.0f} sequences/s packed"
    )
    for item in estimates:
        console.print(_table(item, counts))


def _table(item: PreparationEstimate, counts: list[int]) -> Table:
    title = f"{item.name}: {item.num_sequences:,} instances, {item.text_bytes / 1e9:.3g} GB of text, {item.parts} parts"
    table = Table(
        "step", *(f"{count} workers" for count in counts), "disk", "peak disk", "memory per worker", title=title
    )
    for step in item.steps:
        sizes = (step.disk_bytes, step.peak_disk_bytes, step.worker_bytes)
        times = (_time(step.seconds(count)) for count in counts)
        table.add_row(step.name, *times, *(f"{size / 1e9:.3g} GB" for size in sizes))
    totals = (_time(sum(step.seconds(count) for step in item.steps)) for count in counts)
    peak = max(step.peak_disk_bytes for step in item.steps)
    table.add_row("total", *totals, f"{item.steps[-1].disk_bytes / 1e9:.3g} GB", f"{peak / 1e9:.3g} GB", "")
    return table


def _time(seconds: float) -> str:
    minutes = seconds / 60
    if minutes < 2:
        return f"{seconds:.3g} s"
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
