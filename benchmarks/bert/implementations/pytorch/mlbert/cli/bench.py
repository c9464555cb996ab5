"""``mlbert bench``: speed as ratios and shares measured in one run."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mlbert.cli.output import wide_console
from mlbert.core.errors import UserError

if TYPE_CHECKING:
    import torch

    from mlbert.models import BertConfig

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
LADDER_SECONDS = 3.0  # of each rung
LADDER_PLAIN, LADDER_HUGGINGFACE = 32, 96  # sequences at most where memory grows fast
LADDER_SMALL = 16
DEFAULT_PACKS = {"tiny": 32, "demo": 32, "small": 16, "base": 8, "large": 4}


class Peer(StrEnum):
    """What to measure against."""

    huggingface = "huggingface"


@app.callback()
def bench() -> None:
    """Measure speed on this machine."""


@app.command()
def step(
    config: Annotated[str, typer.Option(help="demo, tiny, small, base, large, or a bert_config.json.")] = "demo",
    vs: Annotated[Peer | None, typer.Option(help="Measure this peer in the same run.")] = None,
    packs: Annotated[int | None, typer.Option(help="Packs in the batch (without --data: sequences).", min=1)] = None,
    pairs: Annotated[int, typer.Option(help="Counted steps of each side.")] = 5,
    precision: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = "auto",
    data: Annotated[Path | None, typer.Option(help="Prepared set to take the sequences from.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default all cores.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, data and dropout.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time goes, by groups of kernels.")] = False,
    ladder: Annotated[bool, typer.Option("--ladder", help="Measure one fast op after the other instead.")] = False,
    json_file: Annotated[str | None, typer.Option("--json", help="Write the record there; - for stdout.")] = None,
) -> int:
    """Time one training step: forward, backward, optimizer."""
    import torch

    from mlbert.bench.step import run
    from mlbert.models import BertConfig
    from mlbert.ops.precision import compute_dtype

    place = _device(device)

    path = CONFIGS / f"{config}.json" if config in DEFAULT_PACKS else Path(config)
    if precision not in ("auto", "fp32", "bf16"):
        raise UserError("--precision", f"{precision!r} is unknown", "Give auto, fp32 or bf16")
    if threads:
        torch.set_num_threads(threads)
    shape, dtype, size = (
        BertConfig.from_json(path),
        compute_dtype(precision, place),
        packs or DEFAULT_PACKS.get(config, 8),
    )
    if ladder:
        if profile or vs or data:
            raise UserError("--ladder", "measures made-up sequences, Hugging Face's step too", "Give it alone")
        return _ladder(shape, place, dtype, size, seed, json_file)
    record = run(shape, size, pairs, dtype, vs is not None, data, seed, place, profile)
    if _write_json(record, json_file):
        _print(record)
        if profile:
            _print_profile(record["profile"])
    return 0


def _device(name: str) -> torch.device:
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise UserError("--device", f"{name!r} is unknown", "Give auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda", "finds no CUDA device", "Give --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _ladder(
    shape: BertConfig, device: torch.device, dtype: torch.dtype, packs: int, seed: int, json_file: str | None
) -> int:
    from mlbert.bench.hardware import environment_facts
    from mlbert.bench.ladder import Ladder, Sizes

    sizes = Sizes(packs, min(packs, LADDER_PLAIN), min(packs, LADDER_HUGGINGFACE), min(packs, LADDER_SMALL))
    measured = {}
    for name, row in Ladder(shape, device, dtype, sizes, LADDER_SECONDS, seed).rows():
        measured[name] = row()
    if not _write_json({**environment_facts(device), "rows": measured}, json_file):
        return 0
    table = Table(title=f"One training step, {str(dtype).removeprefix('torch.')}, {device}")
    for column in ("step", "sequences", "median s", "sequences/s", "model GFLOP/s"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for name, row in measured.items():
        if "skipped" in row:
            table.add_row(name, row["skipped"], "", "", "")
            continue
        figures = f"{row['sequences'] / row['sequences_per_second']:.3f}", f"{row['sequences_per_second']:.1f}"
        table.add_row(name, str(row["sequences"]), *figures, f"{1e3 * row['rate']:.1f}")
    wide_console().print(table)
    return 0


def _print_profile(found: dict) -> None:
    console, table = wide_console(), Table(title="Where the step's time goes")
    for column in ("group", "ms", "share", "rate", "of peak", "longest"):
        table.add_column(column, justify="left" if column in ("group", "longest") else "right")
    for group, row in found["groups"].items():
        rate = f"{row['rate']:.3g} {row['unit']}" if "rate" in row else "-"
        share_of_peak = f"{row['share_of_peak']:.0%}" if "share_of_peak" in row else "-"
        longest = next(iter(row["names"]), "")[:50]
        table.add_row(group, f"{1e3 * row['seconds']:.3f}", f"{row['share']:.1%}", rate, share_of_peak, longest)
    console.print(table)
    if "budgets" not in found:
        return
    table = Table(title="Microseconds a sequence")
    for column in ("", *found["budgets"]["classes"], "sum"):
        table.add_column(column, justify="right" if column else "left")
    lines = {"measured": found["budgets"]["measured"]}
    lines |= {f"estimate: {name}": values for name, values in found["budgets"]["estimates"].items()}
    for name, values in lines.items():
        table.add_row(name, *(f"{value:.0f}" for value in values), f"{sum(values):.0f}")
    console.print(table)


@app.command()
def prepare(
    text: Annotated[Path | None, typer.Option("--input", help="Text part; default: text of this Python's own.")] = None,
    vocab: Annotated[Path | None, typer.Option(help="Its vocabulary, vocab.txt.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of each side.", min=1)] = 3,
    lengths: Annotated[int, typer.Option(help="Sequences to pack.", min=1)] = 10_000_000,
    json_file: Annotated[str | None, typer.Option("--json", help="Write the record there; - for stdout.")] = None,
) -> int:
    """Time preparing and loading data on one core: text to instances, TFRecords to HDF5, batches, packing."""
    from mlbert.bench.prepare import run

    record = run(text, vocab, rounds, lengths)
    if _write_json(record, json_file):
        _print_prepare(record)
    return 0


def _write_json(record: dict, json_file: str | None) -> bool:
    """Write the record where it is wanted; returns whether standard output is still free for a table."""
    text = json.dumps(record, indent=2) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
        return False
    if json_file:
        Path(json_file).write_text(text, encoding="utf-8")
    return True


def _print_prepare(record: dict) -> None:
    console, generator = wide_console(), record["generator"]
    title = f"{generator['instances']:,} instances of {record['input']['name']}, one core"
    table = Table(title=title)
    for column in ("generator", "CPU s", "tokenizer s", "start s", "instances/s", "tokens/s", "text MB/s"):
        table.add_column(column, justify="right")
    for name in ("native", "plain"):
        side = generator[name]
        table.add_row(
            name,
            f"{side['median_seconds']:.3f}",
            f"{side['median_tokenizer_seconds']:.3f}",
            f"{side['median_start_seconds']:.3f}",
            f"{side['instances_per_second']:,.0f}",
            f"{side['tokens_per_second']:,.0f}",
            f"{side['text_megabytes_per_second']:.2f}",
        )
    console.print(table)
    console.print(f"ratio (median of {generator['rounds']} pairs): {generator['ratio']:.1f}")
    console.print(f"TFRecords to HDF5: {record['tfrecord_to_hdf5']['megabytes_per_second']:.0f} MB/s")
    loader, packing = record["loader"], record["packing"]
    console.print(f"batches from packed shards: {loader['sequences_per_second']:,.0f} sequences/s")
    filled = f"{100 * packing['filled']:.2f} % filled"
    console.print(f"packing {packing['lengths']:,} lengths: {packing['seconds']:.1f} s, {filled}")


def _print(record: dict) -> None:
    table = Table(title=f"One training step, {record['precision']}, {record['threads']} threads")
    for column in ("side", "median s", "sequences/s", "model GFLOP/s", "of GEMM peak"):
        table.add_column(column, justify="right")
    for name, side in record["sides"].items():
        table.add_row(
            name,
            f"{side['median_seconds']:.3f}",
            f"{side['sequences_per_second']:.1f}",
            f"{side['model_flops_per_second'] / 1e9:.1f}",
            f"{100 * side['share_of_gemm_peak']:.0f} %",
        )
    console = wide_console()
    console.print(table)
    if "ratio" in record:
        console.print(f"ratio (median of pairs): {record['ratio']:.2f}")
