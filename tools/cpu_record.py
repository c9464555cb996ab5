"""Measure training steps on this machine's processor, and write a record of it.

    python tools/cpu_record.py [--out FOLDER] [--minutes 15] [--model demo|base]

The quickstart's model and BERT-base, in float32 and, if the processor multiplies it, in bfloat16:
our step against Hugging Face's model in plain use and as an expert runs it, the time of each part
of our step, and its speed with 1, 2 and all threads and with 8, 32 and 128 sequences.

Each of these measurements is a process and a JSON file in FOLDER (default:
records/<date>_cpu_<processor>). After ``--minutes``, no further one begins; call it again to go on.
The README of the folder is written when all are there. While other programs use the processor,
nothing is measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import resource
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import cpu_record_page
from cpu_cells import COMPARE, MODELS, PARTS, Cell, cells_of
from mlbert.config.bert_config import BertConfig
from mlbert.host.files import write_atomically
from mlbert.host.freed_memory import keep_freed_memory
from mlbert.host.machine import busy_seconds, processor_name
from mlbert.host.provenance import shipped
from mlbert.ops import api as ops
from mlbert.ops.peak import gemm_peak_flops
from mlbert.ops.precision import has_bf16_products
from mlbert.programs.bench import step_time
from mlbert.programs.bench.sides import make_batch
from op_shares import op_shares

RECORDS = Path(__file__).resolve().parents[1] / "records"
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SEED = 1
LOOK_SECONDS = 2.0  # for which the machine must be quiet before a measurement
QUIET_CORES = 0.25  # that other programs may use
MAX_SECONDS = 1800  # of a measurement; the expert's search at base size takes most
MINUTES = 15.0


class Stopped(Exception):
    """A measurement is not possible; the text says why, in one line."""


def measure(cell: Cell) -> dict[str, Any]:
    """Measure in this process, and return a JSON-able record; see `mlbert.programs.bench`."""
    torch.set_num_threads(cell.threads)
    keep_freed_memory()  # as in a training run
    dtype = TYPES[cell.precision]
    measured = MODELS[cell.model]
    config = BertConfig.from_json(shipped("configs") / f"{cell.model}.json")
    if cell.kind == PARTS:
        return _measure_parts(config, cell.sequences, dtype)
    peers: tuple[str, ...] = ()
    if cell.kind == COMPARE:
        peers = ("huggingface", "expert")
    else:
        config = with_layers(config, measured.swept_layers)
    return step_time.run(
        config,
        cell.sequences,
        measured.pairs_of(cell.sequences),
        dtype,
        peers,
        None,
        SEED,
        torch.device("cpu"),
    )


def _measure_parts(config: BertConfig, sequences: int, dtype: torch.dtype) -> dict[str, Any]:
    implementations = ops.select("auto", "cpu")
    batch = make_batch(config, sequences, None, SEED)
    peak = gemm_peak_flops(dtype)
    shares = op_shares(config, batch, dtype, SEED)
    record = step_time.common_record(config, batch, dtype, torch.device("cpu"), implementations)
    peak = max(peak, gemm_peak_flops(dtype))
    return {**record, "gemm_peak_flops_per_second": peak, **asdict(shares)}


def with_layers(config: BertConfig, layers: int) -> BertConfig:
    """Return the shape with this number of layers."""
    return config.with_options(f"num_hidden_layers={layers}")


def run_cell(cell: Cell, folder: Path) -> None:
    """Measure in a new process, and write the record to ``folder``.

    Raises:
        Stopped: other programs use the processor, or the measurement failed.
    """
    check_quiet(LOOK_SECONDS)
    words = [sys.executable, __file__, "--cell", cell.name]
    # Compiles in its own process, whose time counts as ours.
    environ = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    busy = busy_seconds()
    own = _children_seconds()
    started = time.monotonic()
    try:
        done = subprocess.run(
            words, stdout=subprocess.PIPE, text=True, env=environ, timeout=MAX_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise Stopped(f"{cell.name} took more than {MAX_SECONDS} s.") from None
    seconds = time.monotonic() - started
    if done.returncode != 0:
        raise Stopped(f"{cell.name} ended with status {done.returncode}. See the output above.")
    others = (busy_seconds() - busy - (_children_seconds() - own)) / seconds
    if others > QUIET_CORES:
        raise _busy(others)
    record = {**json.loads(done.stdout.splitlines()[-1]), **facts_of_run(seconds, others)}
    write_atomically(folder / f"{cell.name}.json", json.dumps(record, indent=2) + "\n")
    print(f"{cell.name}: {seconds:.0f} s", flush=True)


def facts_of_run(seconds: float, others: float) -> dict[str, Any]:
    """Return the part of a record that names the machine and its state.

    Args:
        seconds: of the measurement.
        others: cores that other programs used during it.
    """
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "seconds": seconds,
        "cores_used_by_others": others,
    }


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def check_quiet(seconds: float) -> None:
    """Raise Stopped if other programs use the processor for the next ``seconds``."""
    busy = busy_seconds()
    time.sleep(seconds)
    others = (busy_seconds() - busy) / seconds
    if others > QUIET_CORES:
        raise _busy(others)


def _busy(others: float) -> Stopped:
    cores = len(os.sched_getaffinity(0))
    return Stopped(
        f"other programs use {others:.1f} of {cores} cores. Stop them, and run this again."
    )


def default_folder() -> Path:
    """Return the folder of today's record of this processor."""
    name = processor_name().lower()
    for word in ("(r)", "(tm)", "amd", "intel", "cpu", "processor"):
        name = name.replace(word, " ")
    slug = "-".join(re.findall(r"[a-z0-9]+", name))
    today = datetime.date.today().isoformat()
    return RECORDS / f"{today}_cpu_{slug}-{len(os.sched_getaffinity(0))}cpu"


def main(words: list[str]) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description="Write a record of this processor's speed.")
    parser.add_argument("--out", type=Path, help="folder; default: below records/")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="after which no measurement begins"
    )
    parser.add_argument("--model", choices=list(MODELS), help="measure this model only")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.cell:
        print(json.dumps(measure(Cell.named(given.cell))))
        return 0
    folder = given.out or default_folder()
    precisions = list(TYPES) if has_bf16_products() else ["float32"]
    cells = cells_of(len(os.sched_getaffinity(0)), precisions)
    begun = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for cell in cells:
            is_late = time.monotonic() - begun > 60 * given.minutes
            is_left_out = given.model is not None and cell.model != given.model
            is_known = (folder / f"{cell.name}.json").exists()
            if not is_late and not is_left_out and not is_known:
                run_cell(cell, folder)
        check_quiet(LOOK_SECONDS)
    except (Stopped, OSError) as error:
        print(f"cpu_record: {error}", file=sys.stderr)
        return 2
    missing = [cell for cell in cells if not (folder / f"{cell.name}.json").exists()]
    if missing:
        print(f"{len(missing)} of {len(cells)} measurements are missing; run this again")
        return 0
    records = {cell: json.loads((folder / f"{cell.name}.json").read_text()) for cell in cells}
    write_atomically(folder / "README.md", cpu_record_page.page(records))
    print(f"written: {folder / 'README.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
