"""``mlbert bench``: compare speeds as ratios measured within one run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from mlbert.config.bert_config import BertConfig
from mlbert.host.console import console_progress, new_table, standard_output
from mlbert.host.errors import UserError
from mlbert.host.files import write_atomically
from mlbert.host.freed_memory import keep_freed_memory
from mlbert.host.machine import busy_words, threads_per_rank
from mlbert.host.progress import Progress
from mlbert.host.provenance import shipped
from mlbert.host.waiting import adapted_waits

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
    """Time one training step: forward, backward, optimizer.

    \b
    Examples:
      mlbert bench step --config demo --vs huggingface
      mlbert bench step --config large --packs 448 --precision bf16
    """
    import torch

    from mlbert.ops.precision import compute_dtype
    from mlbert.programs.bench.step_time import faster_dtype, run

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
    if not is_gpu:
        keep_freed_memory()  # for all sides
    peers = ("huggingface", "expert") if vs == "both" else (vs,) if vs else ()
    with adapted_waits(1 if is_gpu else torch.get_num_threads()):
        if precision == "auto" and not is_gpu:
            dtype = faster_dtype(shape, size, data, seed)
        else:
            dtype = compute_dtype(precision, place)
        record = run(shape, size, pairs, dtype, peers, data, seed, place)
    if not _write(record, json_file):
        _print(record)
    if busy := busy_words():
        is_limited = chosen == 1 and not threads
        note = "; one thread, --threads sets a different number" if is_limited else ""
        print(f"warning: {busy}{note}: the figures vary more.", file=sys.stderr)
    return 0


@app.command()
def loader(
    data: Annotated[
        Path | None,
        typer.Option(
            help="MDS set of token ids to read; default: random ids, generated for the run."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="With --data: its vocab.txt or tokenizer.json.")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of a row.", min=8, max=8192)] = 1024,
    rounds: Annotated[int, typer.Option(help="Measured turns of each side.", min=1, max=1000)] = 7,
    seconds: Annotated[
        float, typer.Option(help="Length of a turn in seconds.", min=0.01, max=600)
    ] = 2.0,
    cores: Annotated[
        int, typer.Option(help="CPU cores that each side may use.", min=1, max=os.cpu_count())
    ] = 1,
    seed: Annotated[
        int, typer.Option(help="Seed of the generated data, the order and the masks.")
    ] = 1,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the batches go.")] = "cpu",
    json_file: JsonFile = None,
) -> int:
    """Time the loader: token ids in shards to masked, packed batches on the device.

    \b
    Examples:
      mlbert bench loader --length 1024 --cores 4
    """
    import torch

    from mlbert.programs.bench.loader import run

    if data is not None and tokenizer is None:
        reason = "is missing"
        remedy = "Name the vocabulary of the set: --tokenizer FILE"
        raise UserError("config.missing", "--tokenizer", reason, remedy)
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device.unavailable", "--device cuda", "finds no CUDA device", "Give --device cpu"
        )
    record = run(
        data,
        tokenizer,
        length,
        rounds,
        seconds,
        cores,
        torch.device(device),
        seed,
        Progress() if json_file == "-" else console_progress(),
    )
    if not _write(record, json_file):
        _print_loader(record)
    if busy := busy_words():
        print(f"warning: {busy}: the figures vary more.", file=sys.stderr)
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


def _print_loader(record: dict) -> None:
    cores = record["cores"]
    title = f"Loading rows of {record['length']} tokens, {cores} core{'s' if cores > 1 else ''}"
    table = new_table(title, ("side",), ("median tokens/s", "of the slots", "mlbert is"))
    for name, side in record["sides"].items():
        ratio = record["ratios"].get(name)
        words = "" if ratio is None else f"{ratio['ratio']:.1f} times as fast"
        table.add_row(
            name,
            f"{side['median_tokens_per_second']:,.0f}",
            f"{100 * side['share_of_slots']:.0f} %",
            words,
        )
    console = standard_output()
    console.print(table)
    for name, reason in record["skipped"].items():
        console.print(f"skipped {name}: {reason}")
