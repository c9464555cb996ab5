"""``mlbert prepare instances`` and ``digest``: generate the benchmark's instances."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlbert.cli.prepare.options import (
    InstanceArguments,
    Out,
    ShareArguments,
    say,
    with_options,
)
from mlbert.data.prepare.instance_set import InstanceJob, SetFormat, prepare_instances, set_digests
from mlbert.data.prepare.text_parts import expand_inputs
from mlbert.host.texts import counted

app = typer.Typer()


@app.command("instances")
@with_options(max_seq_length=512, max_predictions=76)
def instances_command(
    inputs: Annotated[
        list[Path],
        typer.Option(
            "--input",
            help=(
                "Text file (one sentence per line, blank line between documents), "
                "or a folder of them: its part-* and *.txt files except eval*.txt. Repeatable."
            ),
        ),
    ],
    vocab: Annotated[Path, typer.Option("--vocab", help="WordPiece vocabulary, vocab.txt.")],
    out: Out,
    run: ShareArguments,
    given: InstanceArguments,
    set_format: Annotated[
        SetFormat, typer.Option("--format", help="Format to write: ours, or the benchmark's.")
    ] = SetFormat.hdf5,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip bad files and list them.")
    ] = False,
) -> None:
    """Convert text files to instances exactly as the benchmark's generator does;
    one shard or file per text file.

    \b
    Examples:
      mlbert prepare instances --input text --vocab vocab.txt --out instances
    """
    job = InstanceJob(
        parts=tuple(expand_inputs(inputs, skip_bad=skip_bad)),
        vocab_file=vocab,
        out=out,
        options=given.instances(),
        lower_case=not given.cased,
        set_format=set_format,
        skip_bad=skip_bad,
    )
    made = prepare_instances(job, run.executor())
    skipped = made.provenance.get("skipped", [])
    left_out = f", {counted(len(skipped), 'part')} skipped" if skipped else ""
    say(f"{out}: {made.num_sequences:,} instances, {made.num_tokens:,} tokens{left_out}")


@app.command("digest")
def digest_command(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Prepared set, one of its shards, or TFRecord file or folder."),
    ],
) -> None:
    """Print the sha256 of the padded features, the file, and the number of instances.

    \b
    Examples:
      mlbert prepare digest instances
    """
    for path in paths:
        for name, count, sha256 in set_digests(path):
            typer.echo(f"{sha256}  {name}  {count}")
