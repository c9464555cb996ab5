"""``mlbert bench``: compare speeds as ratios measured within one run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from mlbert.config.bert_config import BertConfig
from mlbert.host.console import new_table, standard_output
from mlbert.host.errors import UserError
from mlbert.host.files import write_atomically
from mlbert.host.machine import busy_words, threads_per_rank
from mlbert.host.provenance import shipped

app = typer.Typer(add_completion=False, rich_markup_mode=None)

CONFIGS = shipped("configs")
# fewer: no median.
Pairs = Annotated[int, typer.Option(help="Measured steps per side.", min=5, max=10_000)]
JsonFile = Annotated[
    str | None, typer.Option("--json", help="Write the record to this file; - for stdout.")
]
DEFAULT_PACKS = {"tiny": 32, "demo": 32, "small": 16, "base": 8, "large": 4}


@app.callback()
def bench() -> None:
    """Measure speed on this machine."""


@app.command()
def step(
    config: Annotated[
        str, typer.Option(help="demo, tiny, small, base, large, or a bert_config.json.")
    ] = "demo",
    vs: Annotated[
        Literal["huggingface", "expert", "both"] | None,
        typer.Option(
            help="Measure Hugging Face's model too: in plain use, or as an expert runs it."
        ),
    ] = None,
    packs: Annotated[
        int | None,
        typer.Option(help="Packs per batch (sequences without --data).", min=1, max=4096),
    ] = None,
    pairs: Pairs = 5,
    precision: Annotated[
        Literal["auto", "fp32", "bf16"], typer.Option(help="Number format of the matrix products.")
    ] = "auto",
    data: Annotated[
        Path | None, typer.Option(help="Prepared data set to read sequences from.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="CPU threads; default: all, or 1 on a busy machine.", min=1, max=os.cpu_count()
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, data and dropout.")] = 1,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")
    ] = "auto",
    json_file: JsonFile = None,
) -> int:
    """Time one training step: forward, backward, optimizer."""
    import torch

    from mlbert.ops.precision import compute_dtype
    from mlbert.programs.bench.step_time import run

    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise UserError(
            "device.unavailable", "--device cuda", "finds no CUDA device", "Give --device cpu"
        )
    place = torch.device("cuda" if has_cuda and device != "cpu" else "cpu")
    is_gpu = place.type == "cuda"
    chosen = threads_per_rank(threads, 1, is_gpu=is_gpu)
    if threads or chosen == 1:
        torch.set_num_threads(chosen)
    shape = BertConfig.from_json(
        CONFIGS / f"{config}.json" if config in DEFAULT_PACKS else Path(config)
    )
    size = packs or DEFAULT_PACKS.get(config, 8)
    peers = ("huggingface", "expert") if vs == "both" else (vs,) if vs else ()
    record = run(shape, size, pairs, compute_dtype(precision, place), peers, data, seed, place)
    if not _write(record, json_file):
        _print(record)
    if busy := busy_words():
        is_limited = chosen == 1 and not threads
        note = "; one thread, --threads sets another number" if is_limited else ""
        print(f"warning: {busy}{note}: the figures vary more.", file=sys.stderr)
    return 0


def _write(record: dict[str, object], json_file: str | None) -> bool:
    """Write the record to a file or, for ``-``, to standard output.

    Returns True if nothing else may be printed.
    """
    text = json.dumps(record, indent=2) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
    elif json_file:
        write_atomically(Path(json_file), text)
    return json_file == "-"


def _print(record: dict) -> None:
    title = f"One training step, {record['precision']}, {record['threads']} threads"
    table = new_table(
        title, ("side",), ("median s", "sequences/s", "model GFLOP/s", "of GEMM peak")
    )
    for name, side in record["sides"].items():
        table.add_row(
            name,
            f"{side['median_seconds']:.3f}",
            f"{side['sequences_per_second']:.1f}",
            f"{side['model_flops_per_second'] / 1e9:.1f}",
            f"{100 * side['share_of_gemm_peak']:.0f} %",
        )
    console = standard_output()
    console.print(table)
    if chosen := record.get("expert"):
        console.print(
            f"expert: {', '.join(f'{name} {value}' for name, value in chosen['choice'].items())}"
        )
    for name, ratio in record["ratios"].items():
        console.print(f"ratio to {name} (median of pairs): {ratio['ratio']:.2f}")
