"""``mlbert prepare pack``, ``shuffle``, ``bins``, ``bins-hdf5``, ``eval-set``, ``verify``:
build training sets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from mlbert.cli.prepare.options import (
    MOST_FILES,
    Out,
    PoolArguments,
    ShareArguments,
    say,
    with_options,
)
from mlbert.data.formats.manifest import MAX_TOKENS, Manifest
from mlbert.data.formats.open import describe
from mlbert.data.formats.streams import streams_of
from mlbert.data.formats.token_shards import describe_text
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.prepare import verify
from mlbert.data.prepare.shuffle import Packing, make_eval_set, shuffle_set
from mlbert.data.prepare.split_bins import EDGES, make_bins, make_hdf5_bins
from mlbert.host.console import console, console_progress
from mlbert.host.errors import UserError
from mlbert.host.texts import counted, parse_number

app = typer.Typer()
_LISTED = 30  # problems printed
DEFAULT_EDGES = ",".join(map(str, EDGES))

Input = Annotated[
    Path, typer.Option("--input", help="Folder of a data set with a known vocabulary.")
]
Shards = Annotated[
    int | None,
    typer.Option(min=1, max=MOST_FILES, help="Output shards; default: one per 300,000 sequences."),
]
OrderSeed = Annotated[
    int,
    typer.Option(
        min=0, max=(1 << 63) - 1, help="Seed of the order; the same seed gives the same bytes."
    ),
]

Edges = Annotated[
    str, typer.Option(metavar="N,N,...", help="Maximum sequence length of each bin, tokens.")
]


def _numbers(edges: str) -> list[int]:
    try:
        return [parse_number(edge, int) for edge in edges.split(",")]
    except ValueError:
        reason = f"{edges} is not a list of numbers"
        raise UserError(
            "config.value", "--edges", reason, "Use for example 128,256,384,512"
        ) from None


def _in_shards(manifest: Manifest) -> str:
    shards = counted(len(manifest.shards), "shard")
    return f"{manifest.path.parent}: {counted(manifest.num_sequences, 'sequence')} in {shards}"


@app.command("pack")
@with_options()
def pack_command(
    source: Input,
    out: Out,
    run: ShareArguments,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_TOKENS, help="Tokens per pack; default: max_seq_length."),
    ] = None,
    max_sequences: Annotated[
        int, typer.Option(min=2, max=512, help="Maximum sequences per pack.")
    ] = 3,
    seed: OrderSeed = 0,
    shards: Shards = None,
) -> None:
    """Combine short sequences into packs and shuffle them over the whole set.

    \b
    Examples:
      mlbert prepare pack --input instances --out packed
    """
    packing = Packing(max_tokens, max_sequences)
    manifest = shuffle_set(
        source, out, seed=seed, num_shards=shards, packing=packing, executor=run.executor()
    )
    rate = manifest.num_sequences / max(1, manifest.num_packs)
    filled = manifest.num_tokens / max(1, manifest.num_packs * (manifest.max_pack_tokens or 0))
    say(
        f"{out}: {manifest.num_sequences:,} sequences "
        f"in {manifest.num_packs:,} packs ({rate:.5f} per pack), "
        f"{filled:.3%} of slots filled"
    )


@app.command("shuffle")
@with_options()
def shuffle_command(
    source: Input, out: Out, run: ShareArguments, seed: OrderSeed = 0, shards: Shards = None
) -> None:
    """Shuffle the sequences of a set over the whole set.

    \b
    Examples:
      mlbert prepare shuffle --input instances --out shuffled --seed 1
    """
    manifest = shuffle_set(source, out, seed=seed, num_shards=shards, executor=run.executor())
    say(_in_shards(manifest))


@app.command("bins")
@with_options()
def bins_command(
    source: Input,
    out: Out,
    run: ShareArguments,
    edges: Edges = DEFAULT_EDGES,
    seed: OrderSeed = 0,
    shards: Annotated[
        int | None, typer.Option(min=1, max=MOST_FILES, help="Shards per bin; default: by size.")
    ] = None,
) -> None:
    """Split a set into shuffled bins by length; all shards of a bin have equal size.

    \b
    Examples:
      mlbert prepare bins --input instances --out bins --edges 128,512
    """
    manifests = make_bins(
        source, out, edges=_numbers(edges), num_shards=shards, seed=seed, executor=run.executor()
    )
    for manifest in manifests:
        say(_in_shards(manifest))


@app.command("bins-hdf5")
@with_options()
def bins_hdf5_command(
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="Folder of any data set.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="New folder with one subfolder per bin.")
    ],
    run: PoolArguments,
    edges: Edges = DEFAULT_EDGES,
    layout: Annotated[
        str,
        typer.Option(metavar="fixed|variable", help="fixed: rows padded to their bin's length."),
    ] = "fixed",
) -> None:
    """Split a set into bins by length, each a folder of HDF5 shards for NVIDIA's trainers:
    128, 256 ...

    \b
    Examples:
      mlbert prepare bins-hdf5 instances bins --edges 128,256,384,512
    """
    sizes = make_hdf5_bins(
        source, out, edges=_numbers(edges), layout=layout, executor=run.executor()
    )
    for name, size in sizes.items():
        say(f"{out / name}: {counted(size, 'sequence')}")


@app.command("eval-set")
def eval_set_command(
    source: Input,
    out: Out,
    num: Annotated[int, typer.Option(min=1, help="Number of examples.")] = 10_000,
) -> None:
    """Pick evenly spaced evaluation examples, in order, by the benchmark's rule.

    \b
    Examples:
      mlbert prepare eval-set --input eval_instances --out eval
    """
    manifest = make_eval_set(source, out, num=num, progress=console_progress())
    say(f"{out}: {manifest.num_sequences:,} examples, {manifest.num_masked:,} masked tokens")


@app.command("verify")
@with_options()
def verify_command(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Prepared sets, bins, TFRecords, MDS or NVIDIA's HDF5 shards."),
    ],
    run: PoolArguments,
    md5: Annotated[
        Path | None, typer.Option("--md5", help="Published MD5 sums of files or of NVIDIA's rows.")
    ] = None,
) -> None:
    """Re-read everything and count the good samples; exit with 1 if anything is wrong.

    \b
    Examples:
      mlbert prepare verify packed eval
    """
    sums = verify.Md5List.read(md5) if md5 else None
    reports = verify.verify(folders, md5=sums, executor=run.executor())
    console.print(_table(reports))
    problems = [problem for report in reports for problem in report.problems]
    for problem in problems[:_LISTED]:
        say(problem)
    if len(problems) > _LISTED:
        say(f"and {len(problems) - _LISTED:,} more")
    if sums:
        names = {file.path.name for report in reports for file in report.files}
        say(
            f"{sums.path}: {len(names & {*sums.files, *sums.rows}):,} of {len(names):,} files are "
            "in the list"
        )
    good, found = (sum(report.total(name) for report in reports) for name in ("good", "sequences"))
    say(f"{good:,} of {found:,} samples are good")
    if problems or good != found:
        raise typer.Exit(1)


def _table(reports: list[verify.SetReport]) -> Table:
    """Return a table with one column per set."""
    table = Table()
    table.add_column("set")
    columns = []
    for report in reports:
        table.add_column(str(report.folder), overflow="fold", justify="right")
        samples, tokens, packs = (report.total(name) for name in ("sequences", "tokens", "packs"))
        slots = packs * ((report.info.max_pack_tokens or 0) if report.info else 0)
        facts = {
            "kind": report.info.kind if report.info else "unreadable",
            "files": f"{len(report.files):,}",
            "samples": f"{samples:,}",
            "good samples": f"{report.total('good'):,}",
            "tokens": f"{tokens:,}",
            "mean length": f"{tokens / max(samples, 1):.2f}",
            "masked tokens": f"{report.total('masked') / max(tokens, 1):.2%}",
            "random next sentence": f"{report.total('random_next') / max(samples, 1):.2%}",
            "packs": f"{packs:,}" if packs else "none",
            "slots filled": f"{tokens / slots:.3%}" if slots else "",
            "problems": f"{len(report.problems):,}",
        }
        columns.append(facts)
    for name in columns[0]:
        table.add_row(name, *(facts[name] for facts in columns))
    return table


@app.command("identity", hidden=True)
def identity(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A prepared set.")],
    tokenizer: Annotated[str | None, typer.Option(help="Of a set of texts.")] = None,
    streams: Annotated[str | None, typer.Option(help="JSON of several sets of texts.")] = None,
    remote: Annotated[str | None, typer.Option(help="Address that DIR is a copy of.")] = None,
) -> None:
    """Print, as JSON, the identity that a log gives a set; mlaudit uses it to repeat a run."""
    if tokenizer is None:
        found = describe(folder).known_as
    else:
        sets = streams_of("--streams", streams, folder, remote)
        found = describe_text(sets, load_tokenizer(tokenizer)).identity
    typer.echo(json.dumps(found))
