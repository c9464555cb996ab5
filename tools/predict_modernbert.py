"""Predict a ModernBERT training step on a GPU that need not be present.

    python tools/predict_modernbert.py [--gpu h200] [--json FILE]

Base and large, sequences of 1,024 and 8,192 tokens, bfloat16 and FP8, as one CUDA graph: launches,
bytes and FLOPs are counted (`counted.modernbert`), tokens/s, joules per token and the share of the
GPU's matrix rate are modeled from rates that were measured on an H200. Requires Triton.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from counted.gpus import GPUS
from counted.modernbert import GAPS, PARTS, Prediction, Workload, predict
from mlbert.config.bert_config import BertConfig
from mlbert.host.provenance import shipped

# Model -> tokens of a micro-batch, which fit an H200's memory.
TOKENS = {"base": 131_072, "large": 65_536}
LENGTHS = (1024, 8192)
PRECISIONS = ("bf16", "fp8")
WIDTH = 160  # columns of the printed tables
# Tokens/s of ModernBERT-base on one of 8 H100: 1.719 T tokens of 1,024 in 194 hours (arXiv
# 2412.13663), measured with everything that a run has.
PUBLISHED = 308_000


def workloads() -> dict[str, Workload]:
    """Return the predicted steps by name."""
    found = {}
    for name, tokens in TOKENS.items():
        shape = BertConfig.from_json(shipped("configs") / f"modernbert_{name}.json")
        config = shape.with_options("vocab_size_multiple=64")
        for length in LENGTHS:
            for precision in PRECISIONS:
                key = f"{name}, {length} tokens, {precision}"
                found[key] = Workload(config, length, tokens, precision)
    return found


def summary(predictions: Mapping[str, Prediction]) -> Table:
    """Return a table with a line for each step."""
    table = Table(title="One training step")
    table.add_column("step")
    for title in (
        "launches",
        "GB",
        "TFLOP",
        "memory, GB",
        "tokens/s",
        "J/token",
        "of matrix rate",
    ):
        table.add_column(title, justify="right")
    for name, found in predictions.items():
        cells = [
            f"{sum(found.launches.values()):,}",
            f"{sum(found.gigabytes.values()):.0f}",
            f"{found.needed_teraflops:.1f}",
            f"{found.memory_gb:.0f}",
        ]
        low = found.low
        high = found.high
        cells += [
            f"{low.tokens_per_second:,.0f} to {high.tokens_per_second:,.0f}",
            f"{1e3 * high.joules_per_token:.2f} to {1e3 * low.joules_per_token:.2f} m",
            f"{low.matrix_share:.0%} to {high.matrix_share:.0%}",
        ]
        table.add_row(name, *cells)
    return table


def parts_table(name: str, found: Prediction) -> Table:
    """Return the parts of one step."""
    table = Table(title=name)
    table.add_column("part")
    for title in ("launches", "GB", "TFLOP", "ms"):
        table.add_column(title, justify="right")
    for part in (*PARTS, GAPS):
        slow = found.low.milliseconds[part]
        fast = found.high.milliseconds[part]
        table.add_row(
            part,
            f"{found.launches.get(part, 0):,}",
            f"{found.gigabytes.get(part, 0.0):.1f}",
            f"{found.teraflops.get(part, 0.0):.1f}",
            f"{fast:.1f} to {slow:.1f}",
        )
    return table


def main(words: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Predict a ModernBERT training step on a GPU.")
    known = [name for name, gpu in GPUS.items() if gpu.rates]
    parser.add_argument("--gpu", default="h200", choices=known)
    parser.add_argument("--json", type=Path, help="file for the predictions")
    given = parser.parse_args(words)
    gpu = GPUS[given.gpu]
    predictions = {name: predict(workload, gpu) for name, workload in workloads().items()}
    if given.json:
        content = {name: asdict(found) for name, found in predictions.items()}
        given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    console = Console(width=WIDTH)
    console.print(summary(predictions))
    console.print(f"Published for base on an H100, 1,024 tokens: {PUBLISHED:,} tokens/s.")
    for name, found in predictions.items():
        console.print(parts_table(name, found))


if __name__ == "__main__":
    main()
