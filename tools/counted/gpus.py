"""The GPUs for which a step can be counted and modeled: their properties and sustained rates.

Rates are for products, copies and sequences of this model's sizes, not from the data sheet.
`MEASURED` are those that today's kernels had on an H200 at its limit of 700 W
(records/2026-11-26_gpu-check_h200, the third call's profile of 93 sequences):

    bandwidth     4.2 of 4.8 TB/s for LAMB and for a copy; 2.9 TB/s for norms, GELU and casts
    products      650 (bfloat16) and 1,370 (FP8) TFLOP/s
    clock         1.6 GHz
    attention     180 us per sequence of 254.4 tokens,
                  forward and backward with dropout (bfloat16 189, FP8 170)

`TUNED` are what kernels are expected to reach: 4.2 TB/s everywhere, and attention in 104 us, an
expert's estimate that is scaled by instructions. For other GPUs bandwidths are the same share of
the data sheet's value; an H100 has the same multiprocessors and is assumed to be as fast. Unknown
rates are None, and such GPUs are not modeled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlaudit.planner.gpus import GPUS as FACTS

MEASURED = "measured"
TUNED = "tuned"
ISSUES_A_CLOCK = 4  # instructions that a multiprocessor issues per clock


@dataclass(frozen=True)
class Rates:
    """Sustained rates: bytes, FLOPs and clocks per second, and seconds of attention per token.

    ``elementwise`` is the bandwidth of norms, GELU and casts,
    ``bandwidth`` that of everything else.
    """

    bandwidth: float
    elementwise: float
    bf16_flops: float
    fp8_flops: float
    clock: float
    attention: float


@dataclass(frozen=True)
class Gpu:
    """A GPU's properties; ``fact`` is its name in `mlaudit.planner.gpus.GPUS`."""

    name: str
    fact: str
    capability: int
    multiprocessors: int
    rates: Mapping[str, Rates] | None = None

    @property
    def memory_bytes(self) -> int:
        """Return the memory size of the GPU."""
        return int(FACTS[self.fact].memory_gb * 1e9)


def _hopper(bandwidth: float) -> dict[str, Rates]:
    tokens = 254.4  # of a sequence
    return {
        MEASURED: Rates(bandwidth, bandwidth * 2.9 / 4.2, 650e12, 1370e12, 1.6e9, 180e-6 / tokens),
        TUNED: Rates(bandwidth, bandwidth, 650e12, 1370e12, 1.6e9, 104e-6 / tokens),
    }


# Multiprocessors, bandwidths and capabilities are from the data sheets.
GPUS: Mapping[str, Gpu] = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", "a100-sxm", 80, 108),
    "h100": Gpu("NVIDIA H100 80GB HBM3", "h100-sxm", 90, 132, _hopper(2.93e12)),
    "h200": Gpu("NVIDIA H200", "h200", 90, 132, _hopper(4.2e12)),
    "b200": Gpu("NVIDIA B200", "b200", 100, 148),
    "gb200": Gpu("NVIDIA GB200", "gb200", 100, 148),
}
