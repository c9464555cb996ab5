"""Model one training step on a GPU that need not be present:
the launches, bytes, memory and time of each part.

    python tools/model_step.py [--config large] [--gpu h200] [--rates measured|tuned] [--packs N]
                               [--json FILE]

The step is counted on PyTorch's "meta" device (`counted`). Its time is modeled from the rates in
`counted.gpus`: those measured for today's kernels on an H200, or those that kernels are expected to
reach. Requires Triton.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from counted.gpus import GPUS, MEASURED, TUNED, Gpu
from counted.model import SEQUENCES_A_PACK, seconds_of_parts
from counted.parts import PARTS, totals
from counted.steps import count
from mlbert.config.bert_config import BertConfig
from mlbert.host.provenance import shipped

SEQUENCES = (96, 448)


@dataclass(frozen=True)
class ModelledStep:
    """A modeled step: milliseconds, launches and GB by part, and peak memory."""

    precision: str
    sequences: int
    tokens: int
    milliseconds: dict[str, float]
    launches: dict[str, int]
    gigabytes: dict[str, float]
    teraflops: float
    peak_memory_gb: float

    @property
    def sequences_per_second(self) -> float:
        """Return the sequences per second of one GPU."""
        return self.sequences / sum(self.milliseconds.values()) * 1e3


def model_steps(
    config: BertConfig, gpu: Gpu, precisions: Sequence[str], batches: Sequence[int], kind: str
) -> list[ModelledStep]:
    """Model each precision with each batch size: `SEQUENCES_A_PACK` sequences per pack,
    and the rates of a kind.
    """
    rows = []
    for sequences, precision in itertools.product(batches, precisions):
        counted = count(config, sequences // SEQUENCES_A_PACK, precision, gpu)
        sums = totals(counted.step, counted, config)
        seconds = seconds_of_parts(counted, config, gpu, kind)
        modeled = ModelledStep(
            precision=precision,
            sequences=sequences,
            tokens=counted.static_shape.tokens,
            milliseconds={part: 1e3 * seconds[part] for part in PARTS},
            launches={part: sums[part].launches for part in PARTS},
            gigabytes={part: sums[part].moved / 1e9 for part in PARTS},
            teraflops=sum(total.flops for total in sums.values()) / 1e12,
            peak_memory_gb=counted.memory.peak / 1e9,
        )
        rows.append(modeled)
    return rows


def draw(rows: Sequence[ModelledStep], gpu: str, kind: str) -> Table:
    """Return the table of modeled steps."""
    shown = Table(
        title=f"A step on one {gpu}: counted, and modeled with {kind} rates. ms (launches, GB)"
    )
    shown.add_column("part")
    for row in rows:
        shown.add_column(f"{row.precision}, {row.sequences} sequences", justify="right")
    for part in rows[0].milliseconds:
        cells = [
            f"{row.milliseconds[part]:.2f} ({row.launches[part]}, {row.gigabytes[part]:.1f})"
            for row in rows
        ]
        shown.add_row(part, *cells)
    shown.add_section()
    shown.add_row("all", *(f"{sum(row.milliseconds.values()):.1f}" for row in rows))
    shown.add_row("sequences/s", *(f"{row.sequences_per_second:.0f}" for row in rows))
    shown.add_row("peak memory, GB", *(f"{row.peak_memory_gb:.1f}" for row in rows))
    return shown


def main(words: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description="Model one training step on a GPU, in bfloat16 and in FP8."
    )
    parser.add_argument(
        "--config", default="large", help="name of a file in configs/, or a bert_config.json"
    )
    parser.add_argument(
        "--gpu", default="h200", choices=[name for name, gpu in GPUS.items() if gpu.rates]
    )
    parser.add_argument(
        "--rates", default=MEASURED, choices=[MEASURED, TUNED], help="default: %(default)s"
    )
    parser.add_argument("--packs", type=int, help="full packs per batch (default: 48 and 224)")
    parser.add_argument("--json", type=Path, help="file for the rows")
    given = parser.parse_args(words)
    named = shipped("configs") / f"{given.config}.json"
    shape = BertConfig.from_json(named if named.is_file() else Path(given.config))
    batches = [given.packs * SEQUENCES_A_PACK] if given.packs else SEQUENCES
    gpu = GPUS[given.gpu]
    rows = model_steps(shape, gpu, ("bf16", "fp8"), batches, given.rates)
    if given.json:
        given.json.write_text(
            json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8"
        )
    Console().print(draw(rows, gpu.name, given.rates))


if __name__ == "__main__":
    main()
