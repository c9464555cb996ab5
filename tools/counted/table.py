"""The table of tools/model_step.py: modelled steps of a shape for several precisions and batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counted.gpus import Gpu
from counted.model import SEQUENCES_A_PACK, seconds_of_parts
from counted.parts import PARTS, totals
from counted.steps import count
from mlbert.config.bert_config import BertConfig


@dataclass(frozen=True)
class Modelled:
    """A modelled step: milliseconds, launches and GB by part, and peak memory."""

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


def model(config: BertConfig, gpu: Gpu, precisions: Sequence[str], batches: Sequence[int], kind: str) -> list[Modelled]:
    """Model each precision with each batch size: `SEQUENCES_A_PACK` sequences per pack, and the rates of a kind."""
    rows = []
    for sequences in batches:
        for precision in precisions:
            counted = count(config, sequences // SEQUENCES_A_PACK, precision, gpu)
            sums = totals(counted.step, counted, config)
            seconds = seconds_of_parts(counted, config, gpu, kind)
            rows.append(
                Modelled(
                    precision=precision,
                    sequences=sequences,
                    tokens=counted.static_shape.tokens,
                    milliseconds={part: 1e3 * seconds[part] for part in PARTS},
                    launches={part: sums[part].launches for part in PARTS},
                    gigabytes={part: sums[part].moved / 1e9 for part in PARTS},
                    teraflops=sum(total.flops for total in sums.values()) / 1e12,
                    peak_memory_gb=counted.memory.peak / 1e9,
                )
            )
    return rows
