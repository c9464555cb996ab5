"""Model one training step on a GPU that need not be present: launches, bytes, memory and time of each part.

    python tools/model_step.py [--config large] [--gpu h200] [--rates measured|tuned] [--packs N] [--json FILE]

The step is counted on PyTorch's "meta" device (`counted`), and its time is modelled from the rates in `counted.gpus`:
those that today's kernels had on an H200, or those that they are expected to reach. Requires Triton, to count kernels.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from counted.gpus import GPUS, MEASURED, TUNED
from counted.model import SEQUENCES_A_PACK
from counted.table import Modelled, model
from mlbert.config.bert_config import BertConfig
from mlbert.host.provenance import shipped

SEQUENCES = (96, 448)


def draw(rows: Sequence[Modelled], gpu: str, kind: str) -> Table:
    """Return the table of modelled steps."""
    shown = Table(title=f"A step on one {gpu}: counted, and modelled with {kind} rates. ms (launches, GB)")
    shown.add_column("part")
    for row in rows:
        shown.add_column(f"{row.precision}, {row.sequences} sequences", justify="right")
    for part in rows[0].milliseconds:
        cells = [f"{row.milliseconds[part]:.2f} ({row.launches[part]}, {row.gigabytes[part]:.1f})" for row in rows]
        shown.add_row(part, *cells)
    shown.add_section()
    shown.add_row("all", *(f"{sum(row.milliseconds.values()):.1f}" for row in rows))
    shown.add_row("sequences/s", *(f"{row.sequences_per_second:.0f}" for row in rows))
    shown.add_row("peak memory, GB", *(f"{row.peak_memory_gb:.1f}" for row in rows))
    return shown


def main(words: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Model one training step on a GPU, in bfloat16 and in FP8.")
    parser.add_argument("--config", default="large", help="a name of configs/, or a bert_config.json")
    parser.add_argument("--gpu", default="h200", choices=[name for name, gpu in GPUS.items() if gpu.rates])
    parser.add_argument("--rates", default=MEASURED, choices=[MEASURED, TUNED], help="default: %(default)s")
    parser.add_argument("--packs", type=int, help="full packs in the batch; default: 48 and 224")
    parser.add_argument("--json", type=Path, help="write the rows there")
    given = parser.parse_args(words)
    named = shipped("configs") / f"{given.config}.json"
    shape = BertConfig.from_json(named if named.is_file() else Path(given.config))
    batches = [given.packs * SEQUENCES_A_PACK] if given.packs else SEQUENCES
    gpu = GPUS[given.gpu]
    rows = model(shape, gpu, ("bf16", "fp8"), batches, given.rates)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
    Console().print(draw(rows, gpu.name, given.rates))


if __name__ == "__main__":
    main()
